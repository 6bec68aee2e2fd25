"""The connections to servers of a model: kept, closed, broken off, silent."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from legato.engines.upstream import http
from legato.engines.upstream.http import Answer, HttpClient

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Ask = Callable[[], Awaitable[Answer]]

BODY = b'{"prompt": "Once"}'
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n"
END = b"0\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Return a request's head and body; nothing at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    return head + await reader.readexactly(length)


async def whole(answer: Answer) -> bytes:
    """Read an answer and close it."""
    with closing(answer):
        return await answer.whole(2**26)


def run(serve: Serve, check: Callable[[Ask], Awaitable[None]], *, tls: ssl.SSLContext | None = None) -> None:
    """Serve connections with `serve` while `check` makes requests."""

    async def main() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            finally:
                writer.close()

        client = HttpClient({"authorization": "Bearer key"})
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            base = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}/base"
            async with asyncio.timeout(20):
                await check(lambda: client.ask("POST", base, "/path", BODY))
            client.close()

    asyncio.run(main())


def test_a_request_has_everything_that_a_server_needs() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(LENGTH)

    async def check(ask: Ask) -> None:
        answer = await ask()
        assert answer.status == 200
        assert await whole(answer) == b"one"

    run(serve, check)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    assert first == b"POST /base/path HTTP/1.1"
    assert body == BODY
    assert [field for field in fields if not field.startswith(b"host: 127.0.0.1:")] == [
        b"authorization: Bearer key",
        b"content-type: application/json",
        b"content-length: %d" % len(BODY),
    ]


@pytest.mark.parametrize(
    ("answers", "num_connections"),
    [
        ([LENGTH, LENGTH, LENGTH], 1),
        ([CHUNKED + END, LENGTH, CHUNKED + END], 1),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH] * 3, 1),
        ([LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")] * 3, 3),
        ([b"HTTP/1.0 200 OK\r\n\r\none"] * 3, 3),
        ([LENGTH + b"more"] * 3, 3),
        ([LENGTH + LENGTH] * 3, 3),
    ],
)
def test_a_connection_is_kept_if_it_can_be(answers: list[bytes], num_connections: int) -> None:
    """And an answer is whole either way, also one that only the end of the connection ends."""
    left, connections = [*answers], []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while await read_request(reader):
            answer = left.pop(0)
            writer.write(answer)
            if b"close" in answer or b"HTTP/1.0" in answer:
                return

    async def check(ask: Ask) -> None:
        for _ in answers:
            assert await whole(await ask()) == b"one"

    run(serve, check)
    assert len(connections) == num_connections


def test_pieces_come_as_they_are_sent() -> None:
    may_end = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        await may_end.wait()
        writer.write(b"3\r\ntwo\r\n" + END)

    async def check(ask: Ask) -> None:
        answer = await ask()
        assert await answer.piece() == b"one"
        may_end.set()
        assert [await answer.piece(), await answer.piece()] == [b"two", None]
        answer.close()

    run(serve, check)


def test_a_kept_connection_that_was_closed_meanwhile_is_not_noticed() -> None:
    """Whether its end was seen before the next request or only after it was sent."""
    numbers = iter(range(100))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        await read_request(reader)
        writer.write(LENGTH)
        if number % 2:
            await read_request(reader)  # And no answer.

    async def check(ask: Ask) -> None:
        for _ in range(6):
            assert await whole(await ask()) == b"one"
            await asyncio.sleep(0.02)

    run(serve, check)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"no HTTP at all\r\n\r\n"])
def test_a_new_connection_without_an_answer_is_an_error(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)

    async def check(ask: Ask) -> None:
        with pytest.raises(ConnectionError):
            await ask()

    run(serve, check)


@pytest.mark.parametrize("sent", [CHUNKED, LENGTH[:-1], CHUNKED + b"no chunk\r\n"])
def test_an_answer_that_breaks_off_is_an_error_behind_what_has_come(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)

    async def check(ask: Ask) -> None:
        answer = await ask()
        assert str(await answer.piece()).startswith("b'on")
        with pytest.raises(ConnectionError):
            await answer.piece()
        answer.close()

    run(serve, check)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_falls_silent_is_given_up(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_SILENCE_S", 0.2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head)
        for _ in range(6):  # Longer than the limit, but not at a time.
            await asyncio.sleep(0.08)
            writer.write(b"one")
        await reader.read()

    async def check(ask: Ask) -> None:
        answer = await ask()
        for _ in range(6):
            assert await answer.piece() == b"one"
        with pytest.raises(TimeoutError, match=r"nothing for 0\.2 s"):
            await answer.piece()
        answer.close()

    run(serve, check)


@pytest.mark.parametrize("has_begun", [True, False])
def test_who_leaves_closes_the_connection(has_begun: bool) -> None:
    """For a server that is how a request is cancelled."""
    is_closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if has_begun:
            writer.write(CHUNKED)
        with suppress(ConnectionError):
            await reader.read()
        is_closed.set()

    async def check(ask: Ask) -> None:
        if has_begun:
            (await ask()).close()
        else:
            asking = asyncio.ensure_future(ask())
            await asyncio.sleep(0.1)
            asking.cancel()
        await is_closed.wait()

    run(serve, check)


def test_an_answer_that_was_not_read_keeps_no_connection() -> None:
    """It may have more pieces than wait for a reader, and then no more is read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader):
            writer.write(CHUNKED + b"1\r\nx\r\n" * 300 + END)

    async def check(ask: Ask) -> None:
        (await ask()).close()
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await whole(await ask()) == b"one" + b"x" * 300

    run(serve, check)


def test_what_nobody_reads_is_not_fetched() -> None:
    num_sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await read_request(reader)
        writer.write(CHUNKED)
        while num_sent < 4000:
            writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
            await writer.drain()
            num_sent += 1
        writer.write(END)

    async def check(ask: Ask) -> None:
        answer = await ask()
        await asyncio.sleep(0.5)
        assert num_sent < 4000, "16 MB are more than two sockets and a queue hold"
        assert len(await whole(answer)) == 3 + 4000 * 0x1000

    run(serve, check)


def test_a_server_behind_tls_has_to_show_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = "req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost -days 2"
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *made.split(), *files], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(LENGTH)

    async def check_refused(ask: Ask) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask()

    async def check(ask: Ask) -> None:
        assert await whole(await ask()) == b"one"

    http._trusted.cache_clear()
    run(serve, check_refused, tls=tls)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    http._trusted.cache_clear()
    run(serve, check, tls=tls)
    http._trusted.cache_clear()
