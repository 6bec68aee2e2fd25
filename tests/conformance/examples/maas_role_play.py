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
                "content": "Below is a scene from Dream of the Red Chamber. Please conduct a dialogue according to the assigned roles. For each round of dialogue, only provide the response for the current character and do not generate any additional content. After leaving her village cottage and traveling into the city, Granny Liu soon arrived before a grand estate. She beheld vermilion gates and high walls, with exquisitely carved beams and painted rafters. Majestic stone lions stood before the entrance, reflecting the strict dignity and status of the household."
            }, {
                "role" : "assistant",
                "content": "Granny Liu said:,",
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
