from openai import OpenAI

client = OpenAI(
    base_url="https://moark.ai/v1",
    api_key="your_access_token"
)

stream = client.completions.create(
    model="Qwen2.5-72B-Instruct",
    prompt="In the distant future, humanity has been able to",
    stream=True,
    max_tokens=200,
    temperature=0.9
)

for chunk in stream:
    if chunk.choices[0].text:
        print(chunk.choices[0].text, end="")
