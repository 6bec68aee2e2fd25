"""The OpenAPI document: what answers have (`schemas`), and the paths that give them (`document`).

Here is what describes the server's routes. Nothing here answers requests, but for the document itself.
"""
