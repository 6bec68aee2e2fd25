"""LlamaIndex's client for servers like OpenAI's: URL, MODEL. Prints what came of each way to use it."""

import json
import sys

import openai
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
count = "Count: 1 2 3"
turns = [ChatMessage(role="user", content="Count."), ChatMessage(role="assistant", content=count)]


def client(**options):
    return OpenAILike(model=model, api_base=f"{url}/v1", api_key="any", temperature=0, max_retries=0, **options)


limited = client(max_tokens=8)
unlimited = client().complete(count).raw
flags = {"extra_body": {"continue_final_message": True}}
chat = client(max_tokens=8, is_chat_model=True, additional_kwargs=flags)
continued = chat.chat(turns)
told = {
    "text": limited.complete(count).text,
    "streamed": "".join(piece.delta for piece in limited.stream_complete(count)),
    "flattened": limited.chat(turns).message.content,
    "unlimited": {"finish": unlimited.choices[0].finish_reason, "tokens": unlimited.usage.completion_tokens},
    "continued": continued.message.content,
    "continued_streamed": "".join(piece.delta or "" for piece in chat.stream_chat(turns)),
}
try:
    client(additional_kwargs={"stop": ["a", ""]}).complete(count)
except openai.BadRequestError as error:
    told["refused"] = {"param": error.param, "message": error.message}
print(json.dumps(told))
