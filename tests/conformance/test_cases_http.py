"""Faults in HTTP itself (`C...`): bodies, kept connections, keys, methods, and more requests than there is room for."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from legato.config import LimitSettings, ServerSettings
from legato.engines.scripted import Pause
from legato.run.admission import Admission
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    body_for,
    check_error,
    check_error_body,
    eventually,
    is_idle,
    num_running,
    stays_alive,
    text_of,
)
from tests.conftest import NO_TLS, Served, serve_script

KEYS = ("sesame", "ключ")
MB = 1 << 20


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    """A server without keys."""
    with serve_script([b"ok"]) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server with keys, which takes small bodies only."""
    settings = ServerSettings(port=0, api_keys=KEYS)
    with serve_script([b"ok"], server=settings, limits=LimitSettings(max_body_bytes=10_000)) as served:
        yield served


@contextmanager
def connected(served: Served, timeout_s: float = 10) -> Iterator[socket.socket]:
    """A bare connection to a server."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
        yield connection


def head(method: str, path: str, *headers: str | bytes) -> bytes:
    """A request's head; headers as they are to be sent."""
    lines = [header if isinstance(header, bytes) else header.encode() for header in headers]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), b"Host: localhost", *lines]) + b"\r\n\r\n"


def read_answer(
    connection: socket.socket, buffer: bytearray, method: str = "POST"
) -> tuple[int, dict[str, str], bytes]:
    """Read one answer; what comes behind it stays in the buffer. EOFError: the connection was closed before it."""

    def more() -> None:
        data = connection.recv(65536)
        if not data:
            raise EOFError(bytes(buffer))
        buffer.extend(data)

    while b"\r\n\r\n" not in buffer:
        more()
    top, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    size = 0 if method == "HEAD" else int(headers["content-length"])
    buffer[:] = rest
    while len(buffer) < size:
        more()
    body = bytes(buffer[:size])
    del buffer[:size]
    return int(status.split()[1]), headers, body


def resident_bytes() -> int:
    """Memory of this process, in which the server runs too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---------------------------------------------------------------------------------------------------------------------
# Bodies


def test_c065_a_large_body_that_is_within_the_limit_is_read(open_server: Served) -> None:
    body = body_for(open_server, COMPLETIONS, prompt="word " * (3 * MB // 5))
    error = check_error(open_server.post(COMPLETIONS, body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("declared", [True, False])
def test_c065_a_huge_body_is_refused_without_being_read_into_memory(open_server: Served, declared: bool) -> None:
    length = f"Content-Length: {200 * MB}" if declared else "Transfer-Encoding: chunked"
    chunk = b" " * MB if declared else b"%x\r\n%s\r\n" % (MB, b" " * MB)
    with stays_alive(open_server), connected(open_server) as connection:
        before, started = resident_bytes(), time.monotonic()

        def send() -> None:
            try:
                connection.sendall(head("POST", COMPLETIONS, length))
                for _ in range(200):
                    connection.sendall(chunk)
            except OSError:
                pass  # The server need not read it all.

        sender = threading.Thread(target=send)
        sender.start()
        status, headers, body = read_answer(connection, bytearray())
        assert time.monotonic() - started < 2
        sender.join(10)
        assert status == 413
        assert headers["connection"] == "close"
        assert check_error_body(json.loads(body))["code"] == "body_too_large"
        assert resident_bytes() - before < LimitSettings().max_body_bytes + 20 * MB


def test_c065_a_chunked_body_is_the_same_as_one_of_fixed_length(open_server: Served) -> None:
    data = json.dumps(body_for(open_server, COMPLETIONS)).encode()
    headers = {"content-type": "application/json"}
    for size in (1, 7, len(data)):
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        answer = httpx2.post(open_server.url + COMPLETIONS, content=pieces, headers=headers, verify=NO_TLS)
        assert text_of(answer.json()) == "ok"


@pytest.mark.parametrize("data", [gzip.compress(b"{}", mtime=0), b"{}"])
def test_a_compressed_body_is_refused_in_words(open_server: Served, data: bytes) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx2.post(open_server.url + COMPLETIONS, content=data, headers=headers, verify=NO_TLS)
    assert "`gzip`" in check_error(answer, 415)["message"]


@pytest.mark.parametrize("piece", [b"a" * 1000, b"X-Header: " + b"a" * 988 + b"\r\n"])
def test_headers_without_end_are_refused_and_not_kept(locked: Served, piece: bytes) -> None:
    with connected(locked) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Header: ")
        with pytest.raises(ConnectionError):
            connection.sendall(piece * (50 * MB // len(piece)))
    assert locked.get("/health").status_code == 200


def test_long_headers_are_taken_on_every_request_of_a_connection(open_server: Served) -> None:
    with httpx2.Client(base_url=open_server.url, verify=NO_TLS) as client:
        for _ in range(3):
            body = body_for(open_server, COMPLETIONS, prompt="a" * 3000, unknown="b" * MB)
            answer = client.post(COMPLETIONS, json=body, headers={"x-header": "a" * 50_000})
            assert text_of(answer.json()) == "ok"


def test_c065_a_body_that_stalls_is_given_up() -> None:
    with (
        serve_script([b"ok"], limits=LimitSettings(body_timeout_s=0.3)) as served,
        stays_alive(served),
        connected(served) as connection,
    ):
        started = time.monotonic()
        connection.sendall(head("POST", COMPLETIONS, "Content-Length: 1000") + b'{"model": ')
        status, headers, body = read_answer(connection, bytearray())
        assert (status, headers["connection"]) == (408, "close")
        check_error_body(json.loads(body))
        assert time.monotonic() - started < 5
        assert connection.recv(100) == b""
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("length", [b"10", b"0", b"99999999999999999999999999", b"-5", b"1e3"])
def test_c065_a_length_that_lies_harms_nobody(open_server: Served, length: bytes) -> None:
    secret = b'{"model": "m", "prompt": "very private text"}'
    with stays_alive(open_server), connected(open_server, 1) as connection:
        connection.sendall(head("POST", COMPLETIONS, b"Content-Length: " + length) + secret)
        data = b""
        try:
            while piece := connection.recv(65536):
                data += piece
        except TimeoutError:
            pass
        assert re.match(rb"HTTP/1.1 4\d\d ", data)
        assert b"private" not in data


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS.
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /he alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    ],
)
def test_what_is_no_http_is_400_and_harms_nobody(open_server: Served, data: bytes) -> None:
    with stays_alive(open_server), connected(open_server, 5) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        top, _, text = answer.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: text/plain" in top
        assert text == b"Invalid HTTP request received."


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b'{"a":1,"a":2}', b'{"a":NaN}', b'{"a":1e999}'])
def test_bodies_that_are_no_json_object_are_refused(open_server: Served, data: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = httpx2.post(
            open_server.url + path, content=data, headers={"content-type": "application/json"}, verify=NO_TLS
        )
        assert check_error(answer, 400)["code"] == "malformed_body"


def test_only_json_media_types_are_taken(open_server: Served) -> None:
    data = json.dumps(body_for(open_server, COMPLETIONS)).encode()
    kinds = {
        None: 200,
        "application/json; charset=utf-8": 200,
        "application/vnd.api+json": 200,
        "APPLICATION/JSON": 200,
    }
    for kind, status in {**kinds, "text/plain": 415, "application/x-www-form-urlencoded": 415}.items():
        headers = {"content-type": kind} if kind else {}
        answer = httpx2.post(open_server.url + COMPLETIONS, content=data, headers=headers, verify=NO_TLS)
        assert answer.status_code == status, kind
        if status != 200:
            check_error(answer, 415)


# ---------------------------------------------------------------------------------------------------------------------
# Kept connections

LONG = b"x" * 70_000
OPEN = "Authorization: Bearer sesame"


@pytest.mark.parametrize(
    ("status", "request_head"),
    [
        (401, head("POST", COMPLETIONS, "Authorization: Bearer wrong", "Content-Length: 70000")),
        (403, head("POST", COMPLETIONS, "Content-Length: 70000").replace(b"localhost", b"evil.example")),
        (404, head("POST", "/v1/nothing", OPEN, "Content-Length: 70000")),
        (405, head("POST", "/v1/models", OPEN, "Content-Length: 70000")),
        (405, head("DELETE", COMPLETIONS, OPEN, "Content-Length: 70000")),
        (413, head("POST", COMPLETIONS, OPEN, "Content-Length: 70000")),
        (415, head("POST", COMPLETIONS, OPEN, "Content-Type: text/plain", "Content-Length: 70000")),
        (400, head("POST", COMPLETIONS, OPEN, "Content-Length: 9000")),
    ],
)
def test_c066_a_refused_body_is_never_taken_for_a_request(locked: Served, status: int, request_head: bytes) -> None:
    body = LONG[:9000] if status == 400 else LONG
    with connected(locked) as connection:
        buffer = bytearray()
        connection.sendall(request_head)
        connection.sendall(body + head("GET", "/health"))
        got, headers, answer = read_answer(connection, buffer)
        assert got == status
        check_error_body(json.loads(answer))
        if headers.get("connection") == "close":
            assert connection.recv(100) == b""
        else:
            assert read_answer(connection, buffer)[0] == 200


def test_c066_the_connection_is_good_for_more_after_429() -> None:
    with serve_script([Pause(30)], admission=Admission(max_running=1, max_waiting=0)) as served:
        with httpx2.stream(
            "POST", served.url + COMPLETIONS, json=body_for(served, COMPLETIONS, stream=True), verify=NO_TLS
        ):
            assert num_running(served) == 1
            with connected(served) as connection:
                buffer = bytearray()
                data = json.dumps(body_for(served, COMPLETIONS, prompt="x" * 3000)).encode()
                connection.sendall(head("POST", COMPLETIONS, f"Content-Length: {len(data)}") + data)
                connection.sendall(head("GET", "/health"))
                assert read_answer(connection, buffer)[0] == 429
                assert read_answer(connection, buffer)[0] == 200
        assert eventually(lambda: is_idle(served))


def test_c066_expect_100_continue_is_answered_with_the_refusal_alone(locked: Served) -> None:
    with connected(locked) as connection:
        connection.sendall(head("POST", COMPLETIONS, "Expect: 100-continue", "Content-Length: 5000"))
        buffer = bytearray()
        assert read_answer(connection, buffer)[0] == 401
        assert connection.recv(100) == b""
        assert buffer == b""


def test_expect_100_continue_is_granted_when_the_body_is_wanted(open_server: Served) -> None:
    data = json.dumps(body_for(open_server, COMPLETIONS)).encode()
    with connected(open_server) as connection:
        connection.sendall(head("POST", COMPLETIONS, "Expect: 100-continue", f"Content-Length: {len(data)}"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(data)
        status, _, body = read_answer(connection, bytearray())
        assert (status, text_of(json.loads(body))) == (200, "ok")


# ---------------------------------------------------------------------------------------------------------------------
# Keys


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer caf\xe9",
        b"Bearer \xff",
        "Bearer 🦊".encode(),
        b"Bearer " + b"x" * 100_000,
        b"Basic c2VzYW1l",
        b"sesame",
        b"Bearer sesame2",
        b"Bearer SESAME",
        "Bearer ключ".encode("koi8-r"),
    ],
)
def test_c067_a_wrong_key_is_401_whatever_its_bytes(
    locked: Served, value: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = [] if value is None else [b"Authorization: " + value]
    for path in (COMPLETIONS, CHAT, "/v1/models"):
        method = "GET" if path == "/v1/models" else "POST"
        with connected(locked) as connection:
            connection.sendall(head(method, path, *headers, b"Content-Length: 2") + b"{}")
            status, answer, body = read_answer(connection, bytearray())
            assert status == 401
            assert answer["www-authenticate"] == "Bearer"
            error = check_error_body(json.loads(body))
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "sesame" not in error["message"]
    logged = caplog.text
    assert "401" in logged
    assert "Traceback" not in logged
    assert not any(secret in logged for secret in ("sesame", "SESAME", "caf\xe9", "xxx"))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_c067_a_key_is_compared_as_bytes(locked: Served, key: str, scheme: str) -> None:
    data = json.dumps(body_for(locked, COMPLETIONS)).encode()
    with connected(locked) as connection:
        value = f"Authorization: {scheme} {key}".encode()
        connection.sendall(head("POST", COMPLETIONS, value, f"Content-Length: {len(data)}") + data)
        assert read_answer(connection, bytearray())[0] == 200


def test_health_needs_no_key_and_the_rest_does(locked: Served) -> None:
    assert locked.get("/health").status_code == 200
    check_error(locked.get("/v1/models"), 401)


def test_a_page_elsewhere_cannot_reach_us_through_its_own_name(open_server: Served) -> None:
    for path in ("/health", "/v1/models"):
        error = check_error(open_server.get(path, headers={"host": "evil.example:80"}), 403)
        assert error["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in open_server.get(path, headers={"origin": "http://evil"}).headers
        for host in ("localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080"):
            assert open_server.get(path, headers={"host": host}).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# Methods and paths


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/models/m", "/v1/models/none", "/nope"])
def test_c072_head_is_get_without_a_body(open_server: Served, path: str) -> None:
    with connected(open_server) as connection:
        buffer = bytearray()
        connection.sendall(head("HEAD", path) + head("GET", path))
        first, headers, _ = read_answer(connection, buffer, "HEAD")
        second, others, body = read_answer(connection, buffer)
        assert first == second == (404 if "no" in path else 200)
        assert headers["content-length"] == others["content-length"] == str(len(body))
        assert buffer == b""


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("HEAD", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("PUT", "/v1/models", 405),
        ("POST", "/health", 405),
        ("POST", f"{COMPLETIONS}/", 404),
        ("POST", "/v1//completions", 404),
        ("POST", "/completions", 404),
        ("POST", "/v1/messages", 404),
        ("GET", "/nope", 404),
        ("GET", "/", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/%ff%0a<script>", 404),
    ],
)
def test_c072_wrong_methods_and_paths_are_json_errors(open_server: Served, method: str, path: str, status: int) -> None:
    answer = httpx2.request(method, open_server.url + path, verify=NO_TLS)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    if status == 405:
        allowed = {"GET", "HEAD"} if path in ("/health", "/v1/models") else {"POST"}
        assert set(answer.headers["allow"].split(", ")) == allowed
    if method == "HEAD":
        assert answer.content == b""
    else:
        check_error(answer, status)


def test_every_answer_has_an_id_of_its_own(open_server: Served) -> None:
    answers = [open_server.get(path) for path in ("/health", "/health", "/nope")]
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3


def test_an_answer_on_a_kept_connection_is_not_held_back(open_server: Served) -> None:
    """Small writes that wait for the client's acknowledgement would cost 40 ms each."""
    with httpx2.Client(base_url=open_server.url, verify=NO_TLS) as client:
        times = []
        for _ in range(15):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
    assert sorted(times)[7] < 0.03


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [1, 100, 10_000])
def test_a_wish_for_another_protocol_is_declined(open_server: Served, protocol: str, chunked: bool, size: int) -> None:
    """Java's client, and what is built on it, asks for HTTP/2 with every request; the body arrives as it likes."""
    body = json.dumps(body_for(open_server, COMPLETIONS)).encode()
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    wish = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    request = head("POST", COMPLETIONS, "Content-Type: application/json", length, *wish) + sent
    buffer = bytearray()
    with connected(open_server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for at in range(0, len(request), size):
                connection.sendall(request[at : at + size])
            status, _, answer = read_answer(connection, buffer)
            assert status == 200, answer
            assert text_of(json.loads(answer))
        connection.sendall(head("GET", "/health") * 2)
        assert [read_answer(connection, buffer)[0] for _ in range(2)] == [200, 200]


def test_a_wish_for_another_protocol_with_connect(open_server: Served) -> None:
    with connected(open_server) as connection:
        connection.sendall(head("CONNECT", "localhost:80", "Connection: Upgrade", "Upgrade: h2c"))
        assert read_answer(connection, bytearray())[0] in (400, 404, 405)
    assert open_server.get("/health").status_code == 200
