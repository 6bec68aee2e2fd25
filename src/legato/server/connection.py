"""A connection that does not wait for its client for ever, keeps no endless headers, and stays with HTTP/1.1.

It receives what a socket reports and cuts off a client that takes nothing for a while: whatever runs for it then finds
it gone. It knows nothing of what is asked; uvicorn reads and writes HTTP.
"""

from __future__ import annotations

import asyncio
import sys

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["connections"]

_MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request before its body, unless they come in one read, which asyncio bounds."""


def connections(write_timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, with an end to waiting for a client that does not read, and without upgrades."""

    class Connection(HttpToolsProtocol):
        _watch: asyncio.TimerHandle | None = None
        _data = b""
        _num_head_bytes: int | None = 0
        """So much of a head has come; None after its end, while the body comes."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Report every byte that the system does not take at once: nothing more is written until it has."""
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop watching."""
            self._unwatch()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            """Keep what is read, for a request that has to be read again; refuse a head that does not end.

            Nobody has checked a key yet, and every byte of a head is kept.
            """
            self._data = data
            if self._num_head_bytes is not None:
                self._num_head_bytes += len(data)
            super().data_received(data)
            if self._num_head_bytes is not None and self._num_head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(f"The headers must have at most {_MAX_HEAD_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            """Stop counting."""
            self._num_head_bytes = None
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            """Count anew: another request may follow."""
            self._num_head_bytes = 0
            super().on_message_complete()

        def _should_upgrade(self) -> bool:
            """Whether another protocol is asked for. If so, uvicorn calls the next method instead of the application.

            Java's client asks every server for HTTP/2. The parser then stops after the head, and takes the body for
            a request that is not one.
            """
            return any(name == b"upgrade" for name, _ in self.headers)

        def handle_websocket_upgrade(self) -> None:
            """Decline, which is to answer as if nothing had been asked: read the request again, without the wish."""
            stopped = sys.exception()
            assert isinstance(stopped, httptools.HttpParserUpgrade)
            version = self.parser.get_http_version()
            lines = [f"{self.scope['method']} {self.url.decode('latin-1')} HTTP/{version}".encode("latin-1")]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            body = self._data[stopped.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"\r\n".join([*lines, b"", body]))

        def pause_writing(self) -> None:
            """Watch what is left to be sent."""
            super().pause_writing()
            self._check(None)

        def resume_writing(self) -> None:
            """Stop watching: all is sent."""
            self._unwatch()
            super().resume_writing()

        def _check(self, before: int | None) -> None:
            """Cut the client off if it has taken nothing since there were `before` bytes left."""
            left = self.transport.get_write_buffer_size()
            if before is not None and left >= before:
                self.transport.abort()
            else:
                self._watch = self.loop.call_later(write_timeout_s, self._check, left)

        def _unwatch(self) -> None:
            if self._watch is not None:
                self._watch.cancel()

    return Connection
