from openai import OpenAI

client = OpenAI(
  base_url="https://moark.ai/v1",
  api_key="your_access_token"
)

response = client.completions.create(
  model="Qwen2.5-72B-Instruct",
  prompt="Spring has arrived, and the flowers in the park",
  max_tokens=50,
  temperature=0.8
)
print(response.choices[0].text)
