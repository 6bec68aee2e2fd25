"""Connections: how long a client may say nothing, how many there may be, and how they end with the server."""

from __future__ import annotations

import errno
import json
import logging
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from legato.config import LimitSettings
from legato.engines.scripted import Pause
from legato.errors import ConfigError
from legato.server.run import max_connections
from tests.conformance.reading import COMPLETIONS, body_for, eventually, num_running, stays_alive
from tests.conformance.test_cases_http import connected, head, read_answer
from tests.conformance.test_logs import serving, stop
from tests.conftest import NO_TLS, Served, serve_script

HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def until_closed(connection: socket.socket) -> tuple[float, bytes]:
    """Read until the connection is closed; return how long that took, and what came."""
    began, data = time.monotonic(), b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            data += piece
    return time.monotonic() - began, data


def is_well(served: Served) -> bool:
    """Whether the server says so, on a new connection, at once."""
    return httpx2.get(served.url + "/health", timeout=3, verify=NO_TLS).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# Time


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that waits for nobody."""
    limits = LimitSettings(head_timeout_s=0.6, idle_timeout_s=1.5, body_timeout_s=2)
    with serve_script([b"ok"], limits=limits) as served:
        yield served


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n"])
def test_a_client_that_says_nothing_is_left(hasty: Served, data: bytes) -> None:
    with stays_alive(hasty), connected(hasty) as connection:
        connection.sendall(data)
        took, answer = until_closed(connection)
        assert 0.3 < took < 4
        assert answer == b""


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("data", [b"G", b"GET /health", HALF, head("POST", COMPLETIONS)[:-1]])
def test_a_head_has_its_time(hasty: Served, data: bytes, is_kept: bool) -> None:
    with stays_alive(hasty), connected(hasty) as connection:
        if is_kept:
            connection.sendall(head("GET", "/health"))
            assert read_answer(connection, bytearray())[0] == 200
        connection.sendall(data)
        took, answer = until_closed(connection)
        assert 0.3 < took < 4
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer


def test_a_head_that_trickles_has_no_more_time(hasty: Served) -> None:
    with stays_alive(hasty), connected(hasty) as connection:
        began = time.monotonic()
        connection.sendall(HALF)
        with suppress(ConnectionError):
            while time.monotonic() - began < 10:
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 4


def test_a_head_within_its_time_is_taken(hasty: Served) -> None:
    data = head("GET", "/health")
    with connected(hasty) as connection:
        for at in range(0, len(data), 10):
            connection.sendall(data[at : at + 10])
            time.sleep(0.02)
        assert read_answer(connection, bytearray())[0] == 200


def test_a_kept_connection_is_good_for_as_long_as_was_said(hasty: Served) -> None:
    with connected(hasty) as connection:
        buffer = bytearray()
        for _ in range(3):
            connection.sendall(head("GET", "/health"))
            status, headers, _ = read_answer(connection, buffer)
            assert (status, headers["keep-alive"]) == (200, "timeout=1")
            time.sleep(1)
        connection.sendall(head("GET", "/health"))
        assert read_answer(connection, buffer)[0] == 200
        took, answer = until_closed(connection)
        assert 1.2 < took < 5
        assert answer == b""


def test_connections_are_kept_longer_than_proxies_do() -> None:
    """nginx keeps those to the servers behind it for 60 s, as do the balancers of large clouds."""
    with serve_script([b"ok"]) as served, connected(served) as connection:
        buffer = bytearray()
        data = json.dumps(body_for(served, COMPLETIONS)).encode()
        connection.sendall(head("POST", COMPLETIONS, f"Content-Length: {len(data)}") + data)
        assert read_answer(connection, buffer)[1]["keep-alive"] == "timeout=75"
        time.sleep(6)
        connection.sendall(head("GET", "/health", "Connection: close"))
        status, headers, _ = read_answer(connection, buffer)
        assert (status, headers["connection"]) == (200, "close")
        assert "keep-alive" not in headers


@pytest.mark.parametrize("trickle", [False, True])
def test_a_body_that_nobody_wants_has_its_time(hasty: Served, trickle: bool) -> None:
    """It is answered before its end, which may never come."""
    with stays_alive(hasty), connected(hasty) as connection:
        began = time.monotonic()
        connection.sendall(head("GET", "/health", "Content-Length: 100000"))
        assert read_answer(connection, bytearray())[0] == 200
        with suppress(ConnectionError):
            while trickle and time.monotonic() - began < 10:
                connection.sendall(b"x")
                time.sleep(0.05)
        until_closed(connection)
        assert time.monotonic() - began < 4


def test_a_body_that_nobody_wanted_is_no_request(hasty: Served) -> None:
    with connected(hasty) as connection:
        buffer = bytearray()
        hidden = head("GET", "/hidden")
        connection.sendall(head("GET", "/health", f"Content-Length: {len(hidden)}"))
        assert read_answer(connection, buffer)[0] == 200
        connection.sendall(hidden + head("GET", "/health"))
        assert read_answer(connection, buffer)[0] == 200


# ---------------------------------------------------------------------------------------------------------------------
# Number


def test_those_that_wait_longest_make_room() -> None:
    limits = LimitSettings(max_connections=5)
    with serve_script([b"ok"], limits=limits) as served, ExitStack() as stack:
        idle = stack.enter_context(connected(served))
        idle.sendall(head("GET", "/health"))
        assert read_answer(idle, bytearray())[0] == 200
        halves = []
        for _ in range(40):
            connection = stack.enter_context(connected(served))
            connection.sendall(HALF)
            halves.append(connection)
            assert is_well(served)
        assert until_closed(idle)[1] == b""
        assert b" 503 " in until_closed(halves[0])[1]
        connection.sendall(b"\r\n\r\n")
        assert read_answer(connection, bytearray())[0] == 200


def test_where_all_are_at_work_others_are_told_so() -> None:
    limits = LimitSettings(max_connections=3)
    with serve_script([b"a", Pause(30)], limits=limits) as served, ExitStack() as stack:
        data = json.dumps(body_for(served, COMPLETIONS, stream=True)).encode()
        request = head("POST", COMPLETIONS, f"Content-Length: {len(data)}") + data
        streams = [stack.enter_context(connected(served)) for _ in range(3)]
        for stream in streams:
            stream.sendall(request)
        assert eventually(lambda: num_running(served) == 3)
        for _ in range(20):
            with connected(served) as connection:
                connection.sendall(request)
                status, headers, body = read_answer(connection, bytearray())
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
                assert b"too many connections" in body
            assert is_well(served)
            assert httpx2.get(served.url + "/ready", timeout=3, verify=NO_TLS).status_code == 200
        streams[0].close()
        assert eventually(lambda: num_running(served) == 2)
        with connected(served) as connection:
            connection.sendall(head("GET", "/v1/models"))
            assert read_answer(connection, bytearray())[0] == 200


def test_a_crowd_that_comes_at_once_does_not_end_listening() -> None:
    limits = LimitSettings(max_connections=4, head_timeout_s=1)
    with serve_script([b"ok"], limits=limits) as served, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connected(served)).sendall(HALF)
        for _ in range(5):
            assert is_well(served)


def few_files() -> None:
    """Allow a process 96 descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))


def test_slow_clients_cannot_take_all_descriptors(tmp_path: Path) -> None:
    with serving(tmp_path, preexec_fn=few_files, stderr=subprocess.PIPE) as (process, url), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for number in range(160):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            connection.sendall(HALF if number % 2 else b"")
        for _ in range(10):
            assert httpx2.get(url + "/health", timeout=3, verify=NO_TLS).status_code == 200
            assert httpx2.get(url + "/ready", timeout=3, verify=NO_TLS).json() == {"status": "ready"}
            body = {"model": "demo", "prompt": "x"}
            assert httpx2.post(url + COMPLETIONS, json=body, timeout=10, verify=NO_TLS).status_code == 200
        assert len([*Path(f"/proc/{process.pid}/fd").iterdir()]) < 90
        assert stop(process) < 8
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


class Exhausted(socket.socket):
    """A listening socket for which there are no descriptors, now and then."""

    num_failures = 0

    def accept(self) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_listening_goes_on_when_descriptors_run_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many there are, others in the process may take them all."""
    monkeypatch.setattr("socket.socket", Exhausted)
    with serve_script([b"ok"]) as served:
        assert is_well(served)
        with connected(served) as idle:
            idle.sendall(head("GET", "/health"))
            assert read_answer(idle, bytearray())[0] == 200
            monkeypatch.setattr(Exhausted, "num_failures", 3)
            assert is_well(served)
            assert until_closed(idle)[1] == b"", "it made room"
        assert is_well(served)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["no connection can be taken now: Too many open files"]


def test_how_many_there_may_be_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in ((96, 32), (256, 192), (1024, 768), (20_000, 4096), (1 << 20, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert max_connections(LimitSettings()) == expected
        assert max_connections(LimitSettings(max_connections=30)) == 30
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(ConfigError, match=r"`limits.max_connections` must be at most 192 where .* 256 files"):
        max_connections(LimitSettings(max_connections=193))
    for files in (64, 60):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        with pytest.raises(ConfigError, match=f"may open {files} files"):
            max_connections(LimitSettings())


# ---------------------------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("num_streams", [1, 3])
def test_what_does_not_end_in_time_is_told_in_one_line(caplog: pytest.LogCaptureFixture, num_streams: int) -> None:
    with ExitStack() as stack:
        with serve_script([b"a", Pause(60)], limits=LimitSettings(grace_s=1)) as served, connected(served) as idle:
            idle.sendall(head("GET", "/health"))
            assert read_answer(idle, bytearray())[0] == 200
            client = stack.enter_context(served.client())
            streams = [
                stack.enter_context(client.completions.create(model="m", prompt="x", stream=True))
                for _ in range(num_streams)
            ]
            for stream in streams:
                next(iter(stream))
            began = time.monotonic()
        assert 0.9 < time.monotonic() - began < 5
        for stream in streams:
            with pytest.raises(openai.APIConnectionError):
                next(iter(stream))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [f"requests cut off, as they had not ended in 1 s: {num_streams}"]


def test_who_waits_for_an_answer_at_the_end_gets_an_error() -> None:
    answers: list[httpx2.Response] = []
    with serve_script([b"a", Pause(60)], limits=LimitSettings(grace_s=0)) as served:
        body = body_for(served, COMPLETIONS)
        asking = threading.Thread(target=lambda: answers.append(served.post(COMPLETIONS, body)))
        asking.start()
        assert eventually(lambda: num_running(served) == 1)
    asking.join(10)
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server is shutting down"


def test_a_server_says_nothing_else_at_its_end(tmp_path: Path) -> None:
    file = tmp_path / "legato.toml"
    file.write_text(f"data_dir = '{tmp_path}'\n[limits]\ngrace_s = 1\n")
    with serving(tmp_path, "--config", str(file), stderr=subprocess.PIPE) as (process, url):
        body = {"model": "demo", "prompt": "x", "stream": True, "max_tokens": 100}
        with suppress(httpx2.TransportError), ExitStack() as stack:
            client = stack.enter_context(httpx2.Client(verify=NO_TLS))
            lines = [
                stack.enter_context(client.stream("POST", url + COMPLETIONS, json=body)).iter_lines() for _ in range(2)
            ]
            for line in lines:
                next(line)
            stop(process)
        assert process.stderr is not None
        said = process.stderr.read().decode().splitlines()
    assert said[0].startswith("Legato serves demo at ")
    assert all(" requests cut off, " in line for line in said[1:])
    assert len(said) <= 2
