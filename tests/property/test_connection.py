"""What a connection answers does not depend on how the bytes arrive, and no bytes end it badly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from legato.config import LimitSettings
from legato.server.http.connection import Connection
from legato.server.http.exchange import REFUSAL, Exchange


class Line(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0


class Alone:
    """The owner of one connection."""

    limits = LimitSettings()

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def run(self, exchange: Exchange) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(exchange.run(echo)))

    def waits(self, connection: Connection) -> None:
        """Nothing follows from it."""

    def works(self, connection: Connection) -> None:
        """Nothing follows from it."""

    def closed(self, connection: Connection) -> None:
        """Nothing follows from it."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what was asked: chunked if it has a body, else of known length."""
    if (refusal := scope["extensions"].get(REFUSAL)) is not None:
        await send({"type": "http.response.start", "status": refusal.status, "headers": []})
        await send({"type": "http.response.body", "body": refusal.text.encode()})
        return
    body, more = b"", True
    try:
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
    except Exception as error:  # noqa: BLE001 - it is a refusal, and told like one
        body = repr(error).encode()
    shown = f"{scope['method']} {scope['path']} {scope['http_version']} {scope['headers']} ".encode() + body
    headers = [] if body else [(b"content-length", b"%d" % len(shown))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": shown[:10], "more_body": True})
    await send({"type": "http.response.body", "body": shown[10:]})


async def answers(pieces: Sequence[bytes]) -> tuple[bytes, bool]:
    """Return what a connection writes when these pieces arrive, and whether it is closed then."""
    owner, line = Alone(), Line()
    connection = Connection(owner)
    connection.connection_made(line)
    for piece in pieces:
        for _ in range(2000):
            if not line.is_paused:
                break
            await asyncio.sleep(0)
        if line.is_closed:
            break
        connection.data_received(piece)
    for _ in range(100):
        await asyncio.sleep(0)
    is_closed = line.is_closed
    connection.connection_lost(None)
    for task in owner.tasks:
        await task  # None hangs, and none fails.
    return re.sub(rb"date: [^\r]*\r\n", b"", line.written), is_closed


HEADS = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /x?y HTTP/1.1\r\nHost: a\r\nX: b\r\n\r\n",
    b"POST /%41%ff HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nHost: t\r\n\r\n",
    b"GET /u HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"POST /u HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /old HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]
LAST = [
    b"GET / HTTP/1.0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nx\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhel",
    b"\x16\x03\x01 no HTTP \r\n\r\n",
    b"GET /u HTTP/1.1\r\nHos",
    b"",
]


@st.composite
def cut(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes]]:
    """Bytes, and the same in pieces."""
    whole = draw(data)
    places = sorted(draw(st.sets(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[start:end] for start, end in zip([0, *places], [*places, len(whole)], strict=True)]
    return whole, [piece for piece in pieces if piece]


conversations = st.builds(
    lambda heads, last, rest: b"".join(heads) + last + rest,
    st.lists(st.sampled_from(HEADS), max_size=8),
    st.sampled_from(LAST),
    st.sampled_from([b"", HEADS[0], HEADS[3]]),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A conversation with some bytes that are others."""
    data = bytearray(draw(conversations))
    for place in draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=4)):
        if data:
            data[place] = draw(st.integers(0, 255))
    return bytes(data)


@given(cut(conversations))
def test_the_cuts_between_reads_do_not_matter(given: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = given
    assert asyncio.run(answers([whole])) == asyncio.run(answers(pieces))


@given(cut(damaged() | st.binary(max_size=300)))
def test_no_bytes_end_it_badly(given: tuple[bytes, list[bytes]]) -> None:
    whole, pieces = given
    for given_pieces in ([whole] if whole else [], pieces):
        written, _ = asyncio.run(answers(given_pieces))
        assert written == b"" or written.startswith(b"HTTP/1.1 ")


def test_requests_are_answered_one_after_the_other() -> None:
    written, is_closed = asyncio.run(answers([b"".join(HEADS) + LAST[0]]))
    assert written.count(b"HTTP/1.1 200 ") == len(HEADS) + 1
    assert is_closed
