"""The log of a server in a process of its own: one line for each request, and no request waits for who reads it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.conftest import NO_TLS


def free_port() -> int:
    """A port that nobody listens on."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(folder: Path, *arguments: str, **options: Any) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `legato serve --demo`, whatever becomes of its standard error; return the process and its URL."""
    port = free_port()
    command = [sys.executable, "-m", "legato", "serve", "--demo", "--port", str(port), *arguments]
    environment: Mapping[str, str] = {**os.environ, "LEGATO_DATA_DIR": str(folder)}
    with subprocess.Popen(command, env=environment, **options) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(300):
                with suppress(httpx2.TransportError):
                    httpx2.get(url + "/health", verify=NO_TLS, timeout=30)
                    break
                assert process.poll() is None
                time.sleep(0.1)
            yield process, url
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes]) -> float:
    """End a server as a service manager does; return how long it took."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    return time.monotonic() - began


def ask(url: str, num: int) -> None:
    """Make requests, each of which must be answered soon."""
    with httpx2.Client(verify=NO_TLS, timeout=5) as client:
        for number in range(num):
            assert client.get(f"{url}/v1/models/{'x' * 200}{number}").status_code == 404


@pytest.mark.parametrize("is_full", [False, True])
def test_a_pipe_that_nobody_reads_holds_up_no_request(tmp_path: Path, is_full: bool) -> None:
    """`is_full`: since before the server started, as when it is started again and again."""
    source, sink = os.pipe()
    if is_full:
        os.set_blocking(sink, False)
        with suppress(BlockingIOError):
            while True:
                os.write(sink, b"x" * 4096)
        os.set_blocking(sink, True)
    with serving(tmp_path, "--verbose", stderr=sink) as (process, url):
        ask(url, 1000)
        assert stop(process) < 10
    os.close(sink)
    os.close(source)


def test_what_was_dropped_is_told_when_somebody_reads_again(tmp_path: Path) -> None:
    with serving(tmp_path, "--verbose", stderr=subprocess.PIPE) as (process, url):
        ask(url, 5500)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
        assert process.wait(20) == 0
    num_requests = sum("/v1/models/xxx" in line for line in lines)
    (num_dropped,) = (int(line.split()[-1]) for line in lines if "dropped here" in line)
    assert num_requests + num_dropped >= 5500
    assert num_requests > 100


def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    source, sink = os.pipe()
    with serving(tmp_path, "--verbose", stderr=sink) as (process, url):
        os.close(sink)
        ask(url, 10)
        os.close(source)
        ask(url, 100)
        assert stop(process) < 5


def test_a_closed_standard_error_is_no_file_of_the_server(tmp_path: Path) -> None:
    """The next file that is opened gets the number of a closed one: the log would be written into it."""
    with serving(tmp_path, "--verbose", preexec_fn=lambda: os.close(2)) as (process, url):
        assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
        ask(url, 100)
        assert stop(process) < 5
    assert b"/v1/models/xxx" not in b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())


NASTY = (
    b"GET /v1/generations/x%0A2026-01-01%2000:00:00,000%20legato.server%20forged HTTP/1.1",
    b"GET /%1B[2J%1B]0;x%07 HTTP/1.1",
    b"GET /v1/models/%E2%80%A8%E2%80%A9%C2%85%ED%A0%80%FF HTTP/1.1",
    b"POST /v1/completions%0d%0a HTTP/1.1",
    b"\x1b[2J\x1b]0;x\x07 / HTTP/1.1",
    b"GET /\x1b[2J HTTP/1.1",
)


@pytest.mark.parametrize("form", ["text", "json"])
def test_whatever_is_asked_is_one_line(tmp_path: Path, form: str) -> None:
    (tmp_path / "legato.toml").write_text(f"[server]\nlog_format = '{form}'\napi_keys = ['x']")
    arguments = ("--config", str(tmp_path / "legato.toml"), "--verbose")
    with serving(tmp_path, *arguments, stderr=subprocess.PIPE) as (process, url):
        port = int(url.rpartition(":")[2])
        for first in NASTY:
            for other in (b"Host: localhost", b"Host: localhost\r\nAuthorization: Bearer x", b"Host: \xff\xed\xa0\x80"):
                with socket.create_connection(("127.0.0.1", port), 10) as connection:
                    connection.sendall(first + b"\r\n" + other + b"\r\nConnection: close\r\n\r\n")
                    while connection.recv(65536):
                        pass
        stop(process)
        assert process.stderr is not None
        lines = process.stderr.read().decode().split("\n")
    asked = [line for line in lines if re.search(r" (GET|POST|-) [/-]", line) and "/health" not in line]
    assert len(asked) == 3 * len(NASTY)
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026-01-01 00:00:00") for line in lines)
    if form == "json":
        assert all(json.loads(line)["request"] for line in asked)
