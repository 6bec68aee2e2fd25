"""A server that fails as it is told, in front of a real one or of none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

from tests.conftest import NO_TLS

__all__ = ["Faulty", "Refusal", "chunk", "cut", "faulty", "sse"]


@dataclass(frozen=True)
class Refusal:
    """An answer that is an error."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


Script = Callable[[int, str, dict[str, Any]], "Refusal | bytes"]
"""Number, path and body of a request in; the bytes of a stream out, behind which the connection breaks off."""


@dataclass(frozen=True)
class Faulty:
    """Its address, and the bodies that it got."""

    url: str
    bodies: Sequence[dict[str, Any]]


def sse(*events: Any, end: str = "\n\n") -> bytes:
    """Write events; a text stands as it is."""
    return b"".join(
        f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}{end}".encode()
        for event in events
    )


def chunk(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """A part of a completion and of a chat at once."""
    return {"choices": [{"text": text, "delta": {"content": text}, "finish_reason": reason}], **more}


def cut(stream: bytes, num: int) -> bytes:
    """Return the first `num` events that have text, and half of the next."""
    events = stream.split(b"\n\n")
    kept: list[bytes] = []
    for event in events:
        if num == 0:
            return b"\n\n".join([*kept, event[: len(event) // 2]])
        kept.append(event)
        num -= bool(event) and any(key in event for key in (b'"text":"', b'content":"')) and b'":""' not in event
    return stream


@contextmanager
def faulty(script: Script) -> Iterator[Faulty]:
    """Answer each request as the script says, and close its connection."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            bodies.append(body)
            answer = script(len(bodies) - 1, self.path, body)
            self.close_connection = True
            if isinstance(answer, bytes):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("content-length", str(len(answer) + 1))  # Never fulfilled: the connection breaks off.
                self.end_headers()
                self.wfile.write(answer)
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(json.dumps(answer.body).encode())

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Faulty(f"http://127.0.0.1:{server.server_port}", bodies)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def forward(url: str) -> Callable[[str, dict[str, Any]], bytes]:
    """Return what asks a real server and gives back all of its stream."""

    def ask(path: str, body: dict[str, Any]) -> bytes:
        response = httpx2.post(url + path, json=body, timeout=60, verify=NO_TLS)
        assert response.status_code == 200, response.text
        return response.content

    return ask
