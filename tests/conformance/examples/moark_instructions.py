from openai import OpenAI

client = OpenAI(
    base_url="https://moark.ai/v1",
    api_key="your_access_token"
)

client.completions.create(
    model="Qwen2.5-72B-Instruct",
    prompt="I once heard that the most beautiful things in the world are those that",
    extra_body={"instructions": "Continue in a reflective and poetic style, with elegant language and vivid imagery"},
    max_tokens=100
)
