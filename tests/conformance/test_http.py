"""HTTP itself: what is no message that can be read in one way alone, HTTP/1.0, and what becomes of each request."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from legato.config import LimitSettings, ServerSettings
from legato.storage.keys import Key
from tests.conformance.reading import COMPLETIONS, body_for, eventually, stays_alive
from tests.conformance.test_cases_http import connected, head, read_answer
from tests.conformance.test_watch import metrics
from tests.conftest import Served, serve_script

OPEN = "Authorization: Bearer sesame"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server without keys."""
    with serve_script([b"one ", b"two ", b"three"]) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server with a key."""
    with serve_script([b"ok"], server=ServerSettings(port=0, api_keys=("sesame",))) as served:
        yield served


def exchange(served: Served, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the connection is closed."""
    with connected(served) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def lines(*given: str | bytes) -> bytes:
    """A head of these lines."""
    return b"\r\n".join([line.encode() if isinstance(line, str) else line for line in given] + [b"", b""])


# ---------------------------------------------------------------------------------------------------------------------
# Messages that two readers could take for different ones

GET, POST, HOST = "GET /health HTTP/1.1", f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost"
CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (400, lines(GET, HOST, HOST)),
        (400, lines(GET, HOST, "Host: evil.example")),
        (400, lines(GET, "Host: evil.example", "X-A: b", "hOsT: localhost")),
        (400, lines(GET)),
        (400, lines(GET, "X-Host: localhost")),
        (400, lines(GET, "Host: local host")),
        (400, lines(GET, "Host: localhost, localhost")),
        (400, lines(GET, "Host: user@localhost")),
        (400, lines(GET, "Host: localhost/x")),
        (400, lines(GET, b"Host: localhost\xff")),
        (400, lines(GET, "Host: [::1")),
        (400, lines(GET, "Host: localhost:80:80")),
        (400, lines("GET /health HTTP/1.0", HOST, HOST)),
        (400, lines("GET http:///health HTTP/1.1", HOST)),
        (400, lines("GET http://user@localhost/health HTTP/1.1", HOST)),
        (403, lines("GET http://evil.example/health HTTP/1.1", HOST, "Connection: close")),
        (400, lines("CONNECT localhost:80 HTTP/1.1", HOST)),
        (400, lines(POST, HOST, "Content-Length: 2", "Content-Length: 2") + b"{}"),
        (400, lines(POST, HOST, "Content-Length: 2", "Content-Length: 3") + b"{}"),
        (400, lines(POST, HOST, "Content-Length: 2, 2") + b"{}"),
        (400, lines(POST, HOST, "Content-Length: +2") + b"{}"),
        (400, lines(POST, HOST, "Content-Length: 0x2") + b"{}"),
        (400, lines(POST, HOST, "Content-Length:") + b"{}"),
        (400, lines(POST, HOST, "Content-Length: 2", "Transfer-Encoding: chunked") + CHUNKS),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked", "Content-Length: 2") + CHUNKS),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked") + CHUNKS),
        (501, lines(POST, HOST, "Transfer-Encoding: identity") + b"{}"),
        (501, lines(POST, HOST, "Transfer-Encoding: xchunked") + CHUNKS),
        (400, lines(POST, HOST, b"Transfer-Encoding: \x0bchunked") + CHUNKS),
        (501, lines(POST, HOST, "Transfer-Encoding: gzip, chunked") + CHUNKS),
        (400, lines(POST.replace("1.1", "1.0"), HOST, "Transfer-Encoding: chunked") + CHUNKS),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked") + b"2\n{}\r\n0\r\n\r\n"),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked") + b"2 \r\n{}\r\n0\r\n\r\n"),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked") + b"-2\r\n{}\r\n0\r\n\r\n"),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked") + b"2\r\n{}}\r\n0\r\n\r\n"),
        (400, lines(POST, HOST, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n{}"),
        (400, lines(GET, "Host : localhost")),
        (400, lines(GET, "Host\t: localhost")),
        (400, lines(GET, " Host: localhost")),
        (400, lines(GET, HOST, "X-A: b", " c")),
        (400, lines(GET, HOST, "X-A: b", "\tHost: evil.example")),
        (400, lines(GET, HOST, ": b")),
        (400, lines(GET, HOST, "X-A")),
        (400, lines(GET, HOST, b"X-A: b\x00c")),
        (400, lines(GET, HOST, b"X-A: b\rc")),
        (400, lines(GET, HOST).replace(b"\r\n", b"\n")),
        (400, lines(GET, HOST).replace(b"localhost\r\n", b"localhost\n")),
        (400, lines("get /health HTTP/1.1", HOST)),
        (400, lines(b"GET /h\xc3\xa9alth HTTP/1.1", HOST)),
        (400, lines(b"GET /health\x01 HTTP/1.1", HOST)),
        (505, lines("GET /health HTTP/2.0", HOST)),
        (505, lines("GET /health HTTP/0.9", HOST)),
        (505, b"GET /health\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(served: Served, status: int, data: bytes) -> None:
    """Behind it another request is hidden, which must not be answered."""
    with stays_alive(served):
        answer = exchange(served, data + lines(GET, HOST, "Connection: close"))
    top, _, text = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status), answer
    assert answer.count(b"\r\nx-request-id: ") == 1
    assert b"connection: close" in top
    assert status == 403 or b"content-type: text/plain" in top
    assert text


@pytest.mark.parametrize(
    "data",
    [
        lines(GET, "Host: LOCALHOST:1"),
        lines(GET, "Host:\t localhost \t"),
        lines("GET http://localhost:8080/health HTTP/1.1", "Host: evil.example"),
        lines("GET http://127.0.0.1/health?x=1 HTTP/1.1", HOST),
        lines("GET /health#x HTTP/1.1", HOST),
        lines("GET /health HTTP/1.0"),
        b"\r\n\r\n" + lines(GET, HOST),
        lines(GET, HOST, "Content-Length: 2") + b"{}",
        lines(GET, HOST, b"X-A: caf\xe9"),
    ],
)
def test_what_can_be_read_in_one_way_is_answered(served: Served, data: bytes) -> None:
    with connected(served) as connection:
        connection.sendall(data)
        assert read_answer(connection, bytearray())[0] == 200


def test_spaces_around_a_length_do_not_count(served: Served) -> None:
    body = json.dumps(body_for(served, COMPLETIONS)).encode()
    with connected(served) as connection:
        connection.sendall(head("POST", COMPLETIONS, f"Content-Length:  {len(body)} \t") + body)
        assert read_answer(connection, bytearray())[0] == 200


def test_headers_behind_a_body_are_none(locked: Served) -> None:
    for trailer in (OPEN, "Host: evil.example", "Content-Type: text/plain"):
        with connected(locked) as connection:
            connection.sendall(head("POST", COMPLETIONS, "Transfer-Encoding: chunked"))
            connection.sendall(b"2\r\n{}\r\n0\r\n" + trailer.encode() + b"\r\n\r\n")
            assert read_answer(connection, bytearray())[0] == 401
    with connected(locked) as connection:
        connection.sendall(head("POST", COMPLETIONS, "Transfer-Encoding: chunked", OPEN))
        connection.sendall(b"2\r\n{}\r\n0\r\nAuthorization: Bearer wrong\r\nHost: evil.example\r\n\r\n")
        assert read_answer(connection, bytearray())[0] == 400  # The body is no request; the key is right.


@pytest.mark.parametrize("piece", [b"1;" + b"x" * 4000, b"0\r\nX-Trailer: " + b"x" * 4000])
def test_what_stands_around_a_body_has_an_end(served: Served, piece: bytes) -> None:
    with stays_alive(served), connected(served) as connection:
        connection.sendall(head("POST", COMPLETIONS, "Transfer-Encoding: chunked"))
        connection.sendall(piece)
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 80_000_000)


def test_requests_that_come_at_once_are_answered_in_order(served: Served) -> None:
    with connected(served) as connection:
        buffer = bytearray()
        connection.sendall(b"".join(head("GET", f"/nothing/{number}") for number in range(50)))
        connection.sendall(head("GET", "/health") + b"no HTTP\r\n\r\n" + head("GET", "/health"))
        for number in range(50):
            assert f"/nothing/{number}`" in read_answer(connection, buffer)[2].decode()
        assert read_answer(connection, buffer)[0] == 200
        assert read_answer(connection, buffer)[0] == 400
        assert connection.recv(100) == b""


def test_more_requests_than_are_read_ahead_are_left_to_be_sent_again(served: Served) -> None:
    with connected(served) as connection:
        buffer = bytearray()
        connection.sendall(head("GET", "/health") * 1000)
        num = 0
        with suppress(EOFError):
            for _ in range(1000):
                assert read_answer(connection, buffer)[0] == 200
                num += 1
        assert 64 <= num < 1000


# ---------------------------------------------------------------------------------------------------------------------
# HTTP/1.0


def old(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    """A request as HTTP/1.0 has it."""
    length = [f"Content-Length: {len(body)}"] if body else []
    return lines(f"{method} {path} HTTP/1.0", *length, *headers) + body


def test_a_stream_over_http_1_0_is_the_body_alone(served: Served) -> None:
    body = json.dumps(body_for(served, COMPLETIONS, stream=True, max_tokens=100)).encode()
    for headers in ((), ("Host: localhost", "Connection: keep-alive")):
        top, _, sent = exchange(served, old("POST", COMPLETIONS, *headers, body=body)).partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 200 ")
        assert b"transfer-encoding" not in top
        assert b"keep-alive" not in top
        assert b"\r\nconnection: close" in top
        events = sent.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2]]
        assert "".join(texts) == "one two three"


def test_an_answer_over_http_1_0_is_closed_unless_it_is_asked_to_stay(served: Served) -> None:
    body = json.dumps(body_for(served, COMPLETIONS, max_tokens=100)).encode()
    top, _, sent = exchange(served, old("POST", COMPLETIONS, body=body)).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in top
    assert json.loads(sent)["choices"][0]["text"] == "one two three"
    with connected(served) as connection:
        buffer = bytearray()
        for _ in range(3):
            connection.sendall(old("POST", COMPLETIONS, "Connection: Keep-Alive", body=body))
            status, headers, _ = read_answer(connection, buffer)
            assert (status, headers["connection"]) == (200, "keep-alive")
            assert "keep-alive" not in headers
        connection.sendall(old("GET", "/health"))
        assert read_answer(connection, buffer)[1]["connection"] == "close"
        assert connection.recv(100) == b""


def test_head_over_http_1_0_has_no_body(served: Served) -> None:
    top, _, sent = exchange(served, old("HEAD", "/v1/models")).partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: " in top
    assert sent == b""


def test_nobody_is_asked_to_go_on_over_http_1_0(served: Served) -> None:
    body = json.dumps(body_for(served, COMPLETIONS)).encode()
    with connected(served) as connection:
        connection.sendall(old("POST", COMPLETIONS, "Expect: 100-continue", body=body)[: -len(body)])
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
        connection.settimeout(10)
        connection.sendall(body)
        assert read_answer(connection, bytearray())[0] == 200


# ---------------------------------------------------------------------------------------------------------------------
# Each request is one line, and counted once


def admin(name: str) -> Key:
    """A key that may read metrics."""
    return Key(name, admin=True)


REQUESTS = [
    ("GET", "/nope", 404, "unknown", head("GET", "/nope")),
    ("GET", "/%0a%1b[2Jx", 404, "unknown", head("GET", "/%0a%1b[2Jx?secret=1")),
    ("GET", "/v1//completions", 404, "unknown", head("GET", "/v1//completions")),
    ("DELETE", COMPLETIONS, 405, COMPLETIONS, head("DELETE", COMPLETIONS)),
    ("PROPFIND", COMPLETIONS, 405, COMPLETIONS, head("PROPFIND", COMPLETIONS)),
    ("POST", "/health", 405, "/health", head("POST", "/health")),
    ("GET", "/v1/models", 401, "/v1/models", head("GET", "/v1/models")),
    ("GET", "/v1/models/x%20y", 404, "/v1/models/{name:path}", head("GET", "/v1/models/x%20y", OPEN)),
    ("GET", "/v1/models", 403, "/v1/models", head("GET", "/v1/models", OPEN).replace(b"localhost", b"a.test")),
    ("POST", COMPLETIONS, 413, COMPLETIONS, head("POST", COMPLETIONS, OPEN, "Content-Length: 999999999")),
    ("POST", COMPLETIONS, 415, COMPLETIONS, head("POST", COMPLETIONS, OPEN, "Content-Type: text/plain")),
    (
        "OPTIONS",
        "/v1/models",
        200,
        "unknown",
        head("OPTIONS", "/v1/models", "Origin: https://a.test", "Access-Control-Request-Method: GET"),
    ),
    ("GET", "/health", 400, "unknown", head("GET", "/health", "Host: twice")),
    ("GET", "/health", 505, "unknown", head("GET", "/health").replace(b"1.1", b"2.0")),
    ("GET", "/health", 431, "unknown", head("GET", "/health", "X-A: " + "x" * 70_000)[:-2]),
    ("POST", COMPLETIONS, 400, "unknown", head("POST", COMPLETIONS, OPEN, "Transfer-Encoding: chunked") + b"x\r\n"),
    ("-", "-", 400, "unknown", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ("-", "-", 400, "unknown", b"FOO /secret HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ("GET", "/health", 408, "unknown", head("GET", "/health")[:-2]),
]


@pytest.fixture(scope="module")
def counted() -> Iterator[Served]:
    """A server for what goes wrong."""
    settings = ServerSettings(port=0, api_keys=("sesame",), cors_origins=("https://a.test",))
    with serve_script([b"ok"], server=settings, limits=LimitSettings(head_timeout_s=0.5)) as served:
        yield served


@pytest.mark.parametrize(("method", "path", "status", "route", "data"), REQUESTS)
def test_each_request_is_one_line_and_counted_once(
    counted: Served, method: str, path: str, status: int, route: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "legato.server")
    key = counted.store.create_key(admin(f"{abs(hash((data, status)))}"))
    before = metrics(counted, Authorization=f"Bearer {key}")
    caplog.clear()
    with connected(counted) as connection:
        connection.sendall(data)
        got, headers, _ = read_answer(connection, bytearray())
    assert got == status

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == "legato.server"]
        return [message for message in messages if message.startswith(headers["x-request-id"])]

    assert eventually(lambda: len(said()) == 1)
    words = said()[0].split(" ")
    assert words[:4] == [headers["x-request-id"], method, path, str(status)]
    assert "secret" not in said()[0]
    after = metrics(counted, Authorization=f"Bearer {key}")
    shown = method if method in ("GET", "POST", "DELETE", "OPTIONS") else "unknown"
    changed = {name: num - before.get(name, 0) for name, num in after.items() if "requests_total" in name}
    del changed['legato_requests_total{method="GET",path="/metrics",status="200"}']
    expected = f'legato_requests_total{{method="{shown}",path="{route}",status="{status}"}}'
    assert {name: num for name, num in changed.items() if num} == {expected: 1}


def test_paths_that_are_none_are_one_series(counted: Served) -> None:
    key = counted.store.create_key(admin("series"))
    authorization = {"Authorization": f"Bearer {key}"}
    counted.get("/nope", headers=authorization)
    num = len(metrics(counted, **authorization))
    for number in range(30):
        counted.get(f"/nope/{number}", headers=authorization)
        counted.get(f"/v1/models/{number}", headers=authorization)
    assert len(metrics(counted, **authorization)) <= num + 2


def test_who_leaves_within_a_head_is_no_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "legato.server")
    with serve_script([b"ok"]) as served:
        for data in (b"", b"GET /heal"):
            with connected(served) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""
    assert not any(" /heal" in record.getMessage() or " - " in record.getMessage() for record in caplog.records)
