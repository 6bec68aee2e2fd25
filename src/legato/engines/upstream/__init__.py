"""An engine on other machines: servers that continue token ids over HTTP, such as vLLM.

It receives Jobs and returns Steps, like every engine. `tokenizer` reads the model's own tokenizer files, `replicas`
chooses among servers of the same model, `engine` turns a Job into requests.
"""
