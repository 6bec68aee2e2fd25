"""Requests to the servers of a model: HTTP/1.1 over connections that are kept.

It receives bodies as bytes and returns answers as bytes, piece by piece as they come; it knows no model. httptools, as
in the server, reads the protocol. A client for everything (httpx, httpcore, aiohttp) runs several times as much Python
for a request and for each of its pieces, and all of it stands between a server's token and a client who waits for it:
see `docs/benchmarks.md`.

What is wrong with a server is an OSError.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from urllib.parse import urlsplit

import httptools

__all__ = ["Answer", "HttpClient"]

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_S = 600.0
"""How long a server may send nothing."""
_MAX_IDLE = 64
"""Connections to one server that are kept without a request."""
_MAX_PIECES = 256
"""Pieces that may wait for a reader until no more is read."""
_MAX_HEAD_BYTES = 2**19
"""Of an answer, and of those that come before it."""


class HttpClient:
    """Asks servers. All requests have the same headers."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: defaultdict[str, list[_Connection]] = defaultdict(list)
        """By server; closed ones may be among them."""

    async def ask(self, method: str, base: str, path: str, body: bytes = b"") -> Answer:
        """Send a request to the server at `base`, such as `http://gpu-1:8000`; return when its answer begins.

        A kept connection that a server closes instead of answering says nothing about the server: the request is made
        again on a new one.

        Raises:
            OSError: the server cannot be reached, or breaks off before it answers.
        """
        url = urlsplit(base)
        head = (
            f"{method} {url.path}{path} HTTP/1.1\r\nhost: {url.netloc}\r\n{self._headers}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        request = head.encode("latin-1") + body
        idle = self._idle[base]
        while idle:
            with suppress(ConnectionError):
                return await _sent(request, idle.pop(), idle)
        return await _sent(request, await _connect(url.scheme, url.hostname or "", url.port), idle)

    def close(self) -> None:
        """Close all connections that are kept."""
        for idle in self._idle.values():
            while idle:
                idle.pop().transport.close()


class Answer:
    """What a server answers. Made by `HttpClient.ask`; close it when it was read, or is not wanted any more."""

    def __init__(self, connection: _Connection, idle: list[_Connection]) -> None:
        self._connection = connection
        self._idle = idle

    @property
    def status(self) -> int:
        """The status code."""
        return self._connection.status

    @property
    def kind(self) -> str:
        """The media type of the body, without parameters; empty: the server does not tell it."""
        return self._connection.kind.partition(";")[0].strip().lower()

    async def piece(self) -> bytes | None:
        """Return the next bytes of the body as they come, None at its end.

        Raises:
            OSError: the server breaks off, or sends nothing for 10 minutes.
        """
        return await self._connection.piece()

    async def whole(self, max_bytes: int) -> bytes:
        """Return what is left of the body.

        Raises:
            OSError: as `piece`, or there are more than `max_bytes`.
        """
        pieces = []
        while (piece := await self.piece()) is not None:
            pieces.append(piece)
            max_bytes -= len(piece)
            if max_bytes < 0:
                raise ConnectionError("what it answers is too long")
        return b"".join(pieces)

    def close(self) -> None:
        """Keep the connection if the answer was read to its end, else close it, which cancels the request."""
        if self._connection.is_reusable and len(self._idle) < _MAX_IDLE:
            self._idle.append(self._connection)
        else:
            self._connection.transport.abort()


async def _sent(request: bytes, connection: _Connection, idle: list[_Connection]) -> Answer:
    """Return the answer to a request, as soon as it begins."""
    try:
        await connection.begin(request)
    except BaseException:
        connection.transport.abort()
        raise
    return Answer(connection, idle)


async def _connect(scheme: str, host: str, port: int | None) -> _Connection:
    context = _trusted() if scheme == "https" else None
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(_Connection, host, port or (443 if context else 80), ssl=context)
    return connection


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()


class _Connection(asyncio.Protocol):
    """One request and its answer at a time. The parser calls the methods `on_...`."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._is_over = True
        """Whether no answer is waited for."""

    async def begin(self, request: bytes) -> None:
        """Send a request and wait for the head of its answer."""
        if self._error is not None:
            raise self._error
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._is_over = self._has_length = self._is_kept = False
        self.status, self.kind = 0, ""
        self._num_head_bytes = 0
        self._heard_at = self._loop.time()
        self._silence = self._loop.call_later(_SILENCE_S, self._listen)
        self.transport.write(request)
        while self.status < 200:
            await self._wait()

    async def piece(self) -> bytes | None:
        """Return the next piece of the body, None at its end."""
        while not self._pieces:
            if self._is_over:
                return None
            await self._wait()
        if len(self._pieces) == _MAX_PIECES:
            self.transport.resume_reading()
        return self._pieces.popleft()

    @property
    def is_reusable(self) -> bool:
        """Whether the answer was read to its end, and the connection has none."""
        return self._is_over and self._is_kept and self._error is None and not self._pieces

    async def _wait(self) -> None:
        """Wait until something has come."""
        if self._error is not None:
            raise self._error
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _listen(self) -> None:
        """Give a server up that has been silent for too long."""
        silent_s = self._loop.time() - self._heard_at
        if silent_s < _SILENCE_S:
            self._silence = self._loop.call_later(_SILENCE_S - silent_s, self._listen)
        else:
            self._error = TimeoutError(f"it has sent nothing for {_SILENCE_S:g} s")
            self.transport.abort()

    # What asyncio reports

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Read a part of an answer."""
        if self._is_over:
            self.transport.abort()
            return
        self._heard_at = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = ConnectionError(f"what it sends is not HTTP: {error}")
            self.transport.abort()
        if self.status < 200:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._error = self._error or ConnectionError("the head of its answer does not end")
                self.transport.abort()
        if len(self._pieces) >= _MAX_PIECES:
            self.transport.pause_reading()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take it for the end of an answer that has no other, or for an error."""
        if not self._is_over:
            self._silence.cancel()
            self._is_over = self.status >= 200 and not self._has_length and exc is self._error is None
        self._error = self._error or ConnectionError(str(exc or "it has closed the connection"))
        self._tell()

    # What the parser reports

    def on_message_begin(self) -> None:
        """Refuse an answer that nobody asked for."""
        if self._is_over:
            raise ConnectionError

    def on_header(self, name: bytes, value: bytes) -> None:
        """See what the body is, and how its end is told."""
        name = name.lower()
        self._has_length = self._has_length or name in (b"content-length", b"transfer-encoding")
        if name == b"content-type":
            self.kind = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Begin the answer."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Keep a piece."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """End the answer."""
        if self.status >= 200:  # Others come before the answer.
            self._silence.cancel()
            self._is_over = True
            self._is_kept = self._parser.should_keep_alive()
