curl -X POST "https://api-ap-southeast-1.modelarts-maas.com/v2/chat/completions" \
  -H "Content-Type: application/json" \
  -H "Authorization: Bearer $MAAS_API_KEY" \
  -d '{
	"model": "deepseek-v3.2",
	"messages":  [{
      "role": "user", "content": "Implement quick sort for an array using Python. Do not add any additional content." 
    },
    {
      "role": "assistant","content": "def quick_sort(array)","prefix": true
    }],
    "temperature": 0.6,
	"stream": false
  }'
