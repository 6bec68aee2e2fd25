prompt = """
Please complete the email response fragment following the style of the examples below:

Example 1:
Input fragment: "Could we adjust the time of next Monday's meeting?"
Completed content: "Hello, we can adjust the time of next Monday's meeting. Would you be available at 2 PM next Monday or 10 AM on Wednesday? Looking forward to your reply."

Example 2:
Input fragment: "Regarding the project delay issue, I'd like to discuss solutions with you."
Completed content: "Hello, regarding the project delay issue, I'm happy to discuss solutions with you. I'm available this afternoon and all day tomorrow. What time works best for you?"

Fragment to complete: "Could you provide the financial statements from last month?"
Completed content:
"""

from openai import OpenAI

client = OpenAI(
    base_url="https://moark.ai/v1",
    api_key="your_access_token"
)

client.completions.create(
    model="Qwen2.5-72B-Instruct",
    prompt=prompt,
    max_tokens=50
)
