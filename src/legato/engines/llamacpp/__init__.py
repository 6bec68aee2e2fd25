"""The embedded engine: llama.cpp in a worker process.

`engine` lives in the server's process, `worker` runs `scheduler` over `binding` in its own. Only `binding` imports
llama_cpp.
"""
