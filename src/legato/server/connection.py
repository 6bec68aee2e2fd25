"""A connection that does not wait for its client for ever.

It receives what a socket reports and cuts off a client that takes nothing for a while: whatever runs for it then finds
it gone. It knows no requests; uvicorn reads and writes HTTP.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["connections"]


def connections(write_timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, with an end to waiting for a client that does not read."""

    class Connection(HttpToolsProtocol):
        _watch: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Report every byte that the system does not take at once: nothing more is written until it has."""
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop watching."""
            self._unwatch()
            super().connection_lost(exc)

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
