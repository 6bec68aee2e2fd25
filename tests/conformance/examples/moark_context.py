from openai import OpenAI

client = OpenAI(
    base_url="https://moark.ai/v1",
    api_key="your_access_token"
)

prompt = """
The following is a fragment of an article on environmental protection. Please continue it:

"With the acceleration of industrialization, environmental problems have become increasingly prominent. Air pollution, water pollution, soil pollution, etc., not only threaten ecological balance but also seriously affect human health. To address these challenges, each of us has a responsibility to take action,"
"""

client.completions.create(
    model="Qwen2.5-72B-Instruct",
    prompt=prompt,
    max_tokens=150
)
