"""One request and its answer on a connection, as an application sees them (ASGI).

It receives a request's head and the pieces of its body, and writes the answer as HTTP/1.1 or, for clients that speak
it, HTTP/1.0. It knows no sockets, and nothing of what is asked.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

__all__ = ["REFUSAL", "Exchange", "Refusal", "Wire"]

REFUSAL = "legato.refusal"
"""The ASGI extension that is there if a request is refused: an application has to answer with that alone."""

_log = logging.getLogger("legato.server")

_NO_BODY = (204, 304)
_UNSENDABLE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Refusal(Exception):
    """A request that is answered before anybody looks at what it asks: it is no HTTP, too slow, or one too many.

    `text` is for the client. `reason` is for the log, if it has more to say.
    """

    def __init__(self, status: int, text: str, *, reason: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.reason = reason or text
        self.retry_after_s = retry_after_s


class Wire(Protocol):
    """What an exchange needs of its connection."""

    writable: asyncio.Event
    """Set while the write buffer is empty, or the client has left."""

    @property
    def idle_timeout_s(self) -> float:
        """How long the connection is kept for another request."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def want(self) -> None:
        """Resume reading, if it was paused because the application had not read the body."""

    def done(self, exchange: Exchange) -> None:
        """Go on to the next request, or close: this one is answered, or given up."""


class Exchange:
    """A request and its answer."""

    def __init__(self, scope: Scope, wire: Wire, *, keep_alive: bool, expects_continue: bool = False) -> None:
        """Begin with a request's head.

        Args:
            scope: the request.
            wire: where it came from.
            keep_alive: whether the client would send another one on this connection.
            expects_continue: whether the client waits for `100 Continue` before it sends the body.
        """
        self.scope = scope
        self.keep_alive = keep_alive
        self.has_more = True
        """Whether more of the request's body is to come."""
        self.is_answered = False
        self._wire = wire
        self._expects_continue = expects_continue
        self._body = bytearray()
        self._changed = asyncio.Event()
        self._refusal: Refusal | None = None
        self._is_gone = False
        self._has_begun = False
        self._head = b""
        """The answer's head, until it goes out with the beginning of the body."""
        self._num_left: int | None = None
        """Bytes of the answer's body that are still to come; None: there is no Content-Length."""
        self._is_chunked = False
        self._has_body = True

    @property
    def num_buffered(self) -> int:
        """Bytes of the request's body that the application has not read yet."""
        return len(self._body)

    # What comes from the connection

    def feed(self, data: bytes) -> None:
        """Take a piece of the request's body; what comes behind the answer is dropped."""
        if not self.is_answered:
            self._body += data
            self._changed.set()

    def end_body(self) -> None:
        """Take note that the request is complete."""
        self.has_more = False
        self._changed.set()

    def refuse(self, refusal: Refusal) -> None:
        """Give up the request: further bytes are not HTTP. `receive` raises the refusal."""
        self._refusal = refusal
        self.keep_alive = False
        self.end_body()

    def leave(self) -> None:
        """Take note that the client is gone."""
        self._is_gone = True
        self._changed.set()

    # What the application does

    async def run(self, app: ASGIApp) -> None:
        """Let the application answer. What it leaves unfinished is cut off."""
        if self._refusal is not None:
            self.scope["extensions"][REFUSAL] = self._refusal
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - the last resort: logged here, and nowhere else
            _log.exception("an answer has failed")
            if not self._has_begun and not self._is_gone:
                await self.send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
                await self.send({"type": "http.response.body"})
        finally:
            if not self.is_answered:
                self.keep_alive = False
                self._wire.done(self)

    async def receive(self) -> Message:
        """Return the next piece of the body, or that the client has gone or has its answer.

        Raises:
            Refusal: the client sent bytes that are not HTTP.
        """
        if self._expects_continue and self.has_more and not self._has_begun and not self._is_gone:
            self._expects_continue = False
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._is_gone and not self.is_answered:
            self._wire.want()
            await self._changed.wait()
            self._changed.clear()
        if self._is_gone or self.is_answered:
            return {"type": "http.disconnect"}
        if self._refusal is not None:
            raise self._refusal
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self.has_more}

    async def send(self, message: Message) -> None:
        """Send a part of the answer, once all before it is sent."""
        if not self._wire.writable.is_set():
            await self._wire.writable.wait()
        if self._is_gone:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self._has_begun:
            self._begin(message["status"], message["headers"])
        elif kind == "http.response.body" and self._has_begun and not self.is_answered:
            self._go_on(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"an answer cannot go on with `{kind}` here")

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Make the head, and decide how the end of the body shows: by its length, in chunks, or by closing."""
        lines = [_status_line(status), _date_line(int(time.time()))]
        for name, value in headers:
            name = name.lower()
            if _UNSENDABLE.search(name) or _UNSENDABLE.search(value):
                raise RuntimeError(f"a header cannot be sent: {name!r}")
            if name == b"content-length":
                self._num_left = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and value != b"close"
                continue
            lines.append(b"%s: %s\r\n" % (name, value))
        is_old = self.scope["http_version"] == "1.0"
        self._has_body = self.scope["method"] != "HEAD" and status not in _NO_BODY
        if self._has_body and self._num_left is None:
            if is_old:
                self.keep_alive = False
            else:
                self._is_chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif is_old:
            lines.append(b"connection: keep-alive\r\n")
        else:
            lines.append(b"keep-alive: timeout=%d\r\n" % self._wire.idle_timeout_s)
        self._has_begun = True
        self._head = b"".join([*lines, b"\r\n"])

    def _go_on(self, body: bytes, *, is_last: bool) -> None:
        data = body if self._has_body else b""
        if self._is_chunked:
            data = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            data += b"0\r\n\r\n" if is_last else b""
        elif self._num_left is not None and self._has_body:
            self._num_left -= len(body)
            if self._num_left < 0 or (is_last and self._num_left):
                raise RuntimeError("an answer's body is not as long as its head says")
        if self._head or data:
            self._wire.write(self._head + data)
        self._head = b""
        if is_last:
            self.is_answered = True
            self._body.clear()
            self._changed.set()
            self._wire.done(self)


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


@functools.lru_cache(1)
def _date_line(now: int) -> bytes:
    return f"date: {formatdate(now, usegmt=True)}\r\n".encode()
