"""HTTP/1.1 on sockets: connections, heads, and one request with its answer (ASGI).

Here is what turns bytes of a socket into requests and back. Nothing here knows routes, keys or generations.
"""
