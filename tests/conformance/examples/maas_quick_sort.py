import requests
import json

if __name__ == '__main__':
    url = "https://api-ap-southeast-1.modelarts-maas.com/v2/chat/completions"  # API address
    api_key = "MAAS_API_KEY"  # Replace MAAS_API_KEY with the obtained API key.

    # Send request.
    headers = {
        'Content-Type': 'application/json',
        'Authorization': f'Bearer {api_key}'
    }
    data = {
		"model": "deepseek-v3.2",
		"messages" : [{
				"role" : "user",
				"content": "Implement quick sort for an array using Python. Do not add any additional content."
			}, {
				"role" : "assistant",
				"content" : "def quick_sort(array)",
				"prefix" : True
			}
		],
		"temperature": 0.6,
		"stream": False
	}
    response = requests.post(url, headers=headers, data=json.dumps(data), verify=False)

    with open('response.txt', 'w', encoding='utf-8') as f:
        f.write(f"Status Code: {response.status_code}\n")
        f.write("Response Content:\n")
        f.write(response.text)
    # Print result.
    print(response.status_code)
    print(response.text)
