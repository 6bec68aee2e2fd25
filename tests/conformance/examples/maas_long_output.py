import requests
import json
import os

def continuous_generate():
    url = "https://api-ap-southeast-1.modelarts-maas.com/v2/chat/completions"
    api_key = "MAAS_API_KEY"

    # Initial message
    messages = [
        {"role": "user", "content":"Please continue the following story with a conversation theme: In a lush green forest, there lives a rabbit named Little White."}, 
        {"role": "assistant", "content": "", "prefix": True}
    ]

    headers = {
        'Content-Type': 'application/json',
        'Authorization': f'Bearer {api_key}'
    }

    full_response_content = messages[-1]["content"]  # Record completed content
    loop_count = 0
    max_loops = 30  # Maximum loop count to prevent infinite loops

    while True:
        data = {
            "model": "deepseek-v3.2",
            "messages": messages,
            "temperature": 0.6,
            "stream": False
        }

        response = requests.post(url, headers=headers, data=json.dumps(data), verify=False)

        if response.status_code != 200:
            print("Error:", response.text)
            break

        result = response.json()
        choice = result['choices'][0]
        finish_reason = choice.get('finish_reason')
        content = choice['message']['content']

        # Concatenate new content to historical responses
        full_response_content += content

        # Update assistant's content to the current complete cumulative content
        messages[-1]["content"] = full_response_content

        loop_count += 1
		 # Stop if the maximum number of loops is reached or finish_reason is not length
        if finish_reason != "length" or loop_count >= max_loops:
            if loop_count >= max_loops:
                print(f" Reached max loop limit {max_loops}, stopped.")
            break

    # Output the final complete content
    print(" Final Complete Content:")
    print(full_response_content)

    # (Optional) Save the output to a file
    with open("final_output.txt", "w", encoding="utf-8") as f:
        f.write(full_response_content)

if __name__ == "__main__":
    continuous_generate()
