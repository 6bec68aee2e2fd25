"""All connections of a server: how many there are, which of them must go when there are too many, and how they end.

When the limit is reached, the connection that has waited longest for its client is closed for a new one. If all are
busy, a few more are accepted: they get 503, or the answer of `/health` and `/ready`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress

from starlette.types import ASGIApp

from legato.config import LimitSettings
from legato.server.http.connection import Connection
from legato.server.http.exchange import Exchange
from legato.system.supervisor import Supervisor

__all__ = ["Connections"]

_log = logging.getLogger("legato.server")

_NUM_SPARE = 8
"""Connections beyond the limit that are accepted."""
_NUM_AT_ONCE = 8
"""Connections that are accepted before the event loop goes on."""
_PAUSE_S = 0.1
_CANCEL_S = 5.0
"""How long requests that are cancelled may take to end."""


class Connections:
    """Takes connections from a listening socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: LimitSettings, supervisor: Supervisor) -> None:
        """Begin without connections. `limits.max_connections` is the highest number there may be."""
        self.limits = limits
        self._app = app
        self._listener = listener
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Connections that wait for their clients, the longest wait first."""
        self._is_listening = False
        self._is_short = False
        """Whether the last connection could not be accepted, for lack of descriptors or memory."""
        self._is_closing = False
        self._running: set[asyncio.Task[None]] = set()
        self._emptied = asyncio.Event()

    def listen(self) -> None:
        """Accept connections from now on."""
        if not self._is_listening and not self._is_closing:
            self._is_listening = True
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

    async def aclose(self) -> None:
        """Accept no more, wait `limits.grace_s` for requests that run, and cancel the rest."""
        self._is_closing = True
        self._pause()
        self._listener.close()
        for connection in [*self._open]:
            connection.stop()
        if not await self._is_empty(self.limits.grace_s):
            num = sum(task.cancel() for task in [*self._running])
            if num:
                _log.warning("requests cut off, as they had not ended in %d s: %d", self.limits.grace_s, num)
                await self._is_empty(_CANCEL_S)
            for connection in [*self._open]:
                connection.abort()
            await self._is_empty(1)

    # What connections call

    def run(self, exchange: Exchange) -> None:
        """Let the application answer."""
        task = self._supervisor.once("a request", exchange.run(self._app))
        self._running.add(task)
        task.add_done_callback(self._ended)

    def waits(self, connection: Connection) -> None:
        """Note that a connection waits for its client."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        self.listen()

    def works(self, connection: Connection) -> None:
        """Note that a connection no longer waits for its client."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Note that a connection is closed; another one may come."""
        self._open.discard(connection)
        self._check_empty()
        self.listen()

    # The rest

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._check_empty()

    def _check_empty(self) -> None:
        if not self._open and not self._running:
            self._emptied.set()

    def _accept(self) -> None:
        for _ in range(_NUM_AT_ONCE):
            if len(self._open) >= self.limits.max_connections + _NUM_SPARE:
                self._make_room()
                self._pause()  # Until one is closed, or waits for its client and can be.
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # This client has left already.
                if not self._is_short:
                    _log.warning("no connection can be taken now: %s", error.strerror)
                self._is_short = True
                self._make_room()
                self._pause()
                self._loop.call_later(_PAUSE_S, self.listen)
                return
            self._is_short = False
            is_surplus = len(self._open) >= self.limits.max_connections and not self._make_room()
            connection = Connection(self, is_surplus=is_surplus)
            self._open.add(connection)
            self._supervisor.once("a connection", self._connect(connection, client))

    async def _connect(self, connection: Connection, client: socket.socket) -> None:
        client.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError:
            client.close()
            self.closed(connection)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; return whether there was one."""
        connection = next(iter(self._waiting), None)
        if connection is None:
            return False
        del self._waiting[connection]
        connection.make_room()
        return True

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._listener)

    async def _is_empty(self, timeout_s: float) -> bool:
        """Wait for the end of all connections and requests; return whether it came in time."""
        self._emptied.clear()
        self._check_empty()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        return self._emptied.is_set()
