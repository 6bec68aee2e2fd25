"""The Python client: continues texts and chats through Legato or through the vendors' own APIs.

Here is what a program imports that only talks to servers. Nothing here knows models, prompts or the database.
"""

from legato.client.clients import AsyncClient, AsyncWriting, Client, Writing
from legato.client.protocol import ClientError, Completion, ConnectFailed, StatusError, StreamInterrupted

__all__ = [
    "AsyncClient",
    "AsyncWriting",
    "Client",
    "ClientError",
    "Completion",
    "ConnectFailed",
    "StatusError",
    "StreamInterrupted",
    "Writing",
]
