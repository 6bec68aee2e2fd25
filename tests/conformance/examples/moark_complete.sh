curl https://moark.ai/v1/completions \
      -H "Content-Type: application/json" \
      -H "Authorization: Bearer your_access_token" \
      -d '{
        "model": "Qwen2.5-72B-Instruct",
        "prompt": "Artificial intelligence is a discipline that studies how to enable computers to",
        "stream": false,
        "max_tokens": 100,
        "temperature": 0.7
      }'
