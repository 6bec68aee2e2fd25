"""A connection: requests out of what a socket reports, one after the other, within times and sizes.

It reads HTTP/1.1 and 1.0, and hands each request on as an `Exchange`. Bytes that are not
HTTP, or ambiguous, are refused. It knows no routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

import httptools

from legato.config import LimitSettings
from legato.server.http.exchange import Exchange, Refusal
from legato.server.http.head import Head

__all__ = ["Connection", "Owner"]

_log = logging.getLogger("legato.server")

_MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request before its body, or between two pieces of it, unless they come in one read, which asyncio
bounds.
"""
_MAX_BUFFERED = 64 * 1024
"""Bytes of a body that are read ahead."""
_MAX_QUEUED = 64
"""Requests that are read before the first of them is answered; the connection is closed behind them."""


class Owner(Protocol):
    """What a connection needs of `Connections`."""

    limits: LimitSettings

    def run(self, exchange: Exchange) -> None:
        """Let the application answer."""

    def waits(self, connection: Connection) -> None:
        """Note that it waits for its client."""

    def works(self, connection: Connection) -> None:
        """Note that it no longer waits."""

    def closed(self, connection: Connection) -> None:
        """Note that it is closed."""


class Connection(asyncio.Protocol):
    """A client's connection. `is_surplus`: it is beyond the limit, so only `/health` and `/ready` are answered."""

    def __init__(self, owner: Owner, *, is_surplus: bool = False) -> None:
        self._owner = owner
        self._limits = owner.limits
        self._is_surplus = is_surplus
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._head: Head | None = None
        """The head that is being read."""
        self._timed: Head | None = None
        """The last head whose arrival has a time limit."""
        self._incoming: Exchange | None = None
        """The request whose body is being read."""
        self._exchanges: deque[Exchange] = deque()
        """Requests that are not answered yet. The first of them is being answered."""
        self._is_deaf = False
        """Whether further bytes are ignored."""
        self._num_extra = 0
        """Bytes that were read since the head began, or since the last piece of the body."""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.writable = asyncio.Event()
        """Set while the write buffer is empty, or the client has left."""
        self.writable.set()

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for a request. With a limit of 0, asyncio reports every byte that the system does not take at once."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        if self._is_deaf:
            self._close()
        else:
            self._wait(self._limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchanges that the client has left."""
        self._stop_waiting()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._is_deaf = True
        self.writable.set()
        for exchange in self._exchanges:
            exchange.leave()
        self._owner.closed(self)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if self._is_deaf:
            return
        self._num_extra += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            self._decline(data[wish.args[0] :])
        except httptools.HttpParserCallbackError:
            _log.exception("a request cannot be taken")
            self.abort()
        except httptools.HttpParserError as error:
            self._refuse(Refusal(400, "Invalid HTTP request received.", reason=str(error)))
        if self._num_extra > _MAX_HEAD_BYTES and (self._head or self._incoming):
            self._refuse(Refusal(431, f"A request must have at most {_MAX_HEAD_BYTES} bytes beside its body."))
        if self._head is not self._timed and self._head is not None:  # It did not come as a whole.
            self._timed = self._head
            self._wait(self._limits.head_timeout_s)
        self._steer()

    def pause_writing(self) -> None:
        """Write no more until all is sent, and watch whether the client takes it."""
        self.writable.clear()
        self._check_writing(None)

    def resume_writing(self) -> None:
        """Write on."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self.writable.set()

    # What the parser calls

    def on_message_begin(self) -> None:
        """Begin with a head."""
        self._head = Head()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the address."""
        assert self._head is not None
        self._head.method = self._parser.get_method()
        self._head.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Those behind a body are dropped: they must not pass for what stood before it."""
        if self._head is not None:
            self._head.add(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request on."""
        head = self._head
        if head is None or self._is_deaf or (self._parser.should_upgrade() and head.method != b"CONNECT"):
            return  # In the last case it is read again, without the wish for another protocol.
        self._stop_waiting()
        try:
            assert self._transport is not None
            scope = head.scope(self._parser.get_http_version(), self._transport)
            if self._is_surplus and scope["path"] not in ("/health", "/ready"):
                raise _too_many()
        except Refusal as refusal:
            self._refuse(refusal)
            return
        self._head = None
        self._num_extra = 0
        keep_alive = self._parser.should_keep_alive() and not self._is_surplus
        expects_continue = head.expects_continue and scope["http_version"] == "1.1"
        self._incoming = Exchange(scope, self, keep_alive=keep_alive, expects_continue=expects_continue)
        self._take(self._incoming)

    def on_body(self, body: bytes) -> None:
        """Hand on a piece of a body."""
        self._num_extra = 0
        if self._incoming is not None:
            self._incoming.feed(body)

    def on_chunk_complete(self) -> None:
        """Note progress of the body."""
        self._num_extra = 0

    def on_message_complete(self) -> None:
        """End a request. Another one may follow, if the client did not say that it is the last."""
        exchange, self._incoming = self._incoming, None
        self._num_extra = 0
        if exchange is None:
            return
        exchange.end_body()
        if not exchange.keep_alive or len(self._exchanges) >= _MAX_QUEUED:
            exchange.keep_alive = False
            self._is_deaf = True
        elif not self._exchanges:  # It was answered before its end.
            self._wait(self._limits.idle_timeout_s)

    # What an exchange calls

    @property
    def idle_timeout_s(self) -> float:
        """How long the connection is kept for another request."""
        return self._limits.idle_timeout_s

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self._transport is not None
        self._transport.write(data)

    def want(self) -> None:
        """Resume reading, if it was paused because the application had not read the body."""
        self._steer()

    def done(self, exchange: Exchange) -> None:
        """Go on to the next request, or close: this one is answered, or given up."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._exchanges.popleft()
        if not exchange.keep_alive:
            self._close()
        elif self._exchanges:
            self._owner.run(self._exchanges[0])
        elif self._head is not None:  # It has begun, with its time.
            self._owner.waits(self)
        else:  # The rest of a body that was not wanted has the time of a head.
            self._wait(self._limits.head_timeout_s if exchange.has_more else self._limits.idle_timeout_s)
        self._steer()

    # What its owner calls

    def make_room(self) -> None:
        """Close, for another connection: this one waits for its client."""
        if self._head is not None:
            self._refuse(_too_many())
        else:
            self._close()

    def stop(self) -> None:
        """Close, as soon as what runs is answered."""
        self._is_deaf = True
        for exchange in self._exchanges:
            exchange.keep_alive = False
        if not self._exchanges:
            self._close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # The rest

    def _take(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._owner.run(exchange)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with a refusal, after the requests before it, and close the connection after that."""
        if self._is_deaf:
            return
        self._is_deaf = True
        self._stop_waiting()
        incoming, self._incoming = self._incoming, None
        head, self._head = self._head, None
        if incoming is None:
            assert self._transport is not None
            refused = Exchange((head or Head()).refused_scope(self._transport), self, keep_alive=False)
            refused.refuse(refusal)
            self._take(refused)
        elif incoming.is_answered:
            self._close()
        else:
            incoming.refuse(refusal)

    def _decline(self, rest: bytes) -> None:
        """Answer as if no other protocol had been asked for: read the head again, without the wish.

        Java's client asks every server for HTTP/2. The parser stops behind the head, and would take the body for a
        request. `rest` is what was read behind the head.
        """
        if self._is_deaf or self._head is None:
            return
        again = self._head.without_upgrade(self._parser.get_http_version())
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(again + rest)

    def _wait(self, timeout_s: float) -> None:
        """Wait for the client, for `timeout_s` at most."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(timeout_s, self._give_up)
        if not self._exchanges:
            self._owner.waits(self)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._owner.works(self)

    def _give_up(self) -> None:
        if self._head is not None:
            self._refuse(Refusal(408, f"The request did not arrive within {self._limits.head_timeout_s:g} s."))
        else:
            self._close()

    def _steer(self) -> None:
        """Pause reading while enough is buffered."""
        assert self._transport is not None
        if len(self._exchanges) > 1 or any(exchange.num_buffered > _MAX_BUFFERED for exchange in self._exchanges):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _check_writing(self, before: int | None) -> None:
        """Cut the client off if it has taken nothing since there were `before` bytes left."""
        assert self._transport is not None
        left = self._transport.get_write_buffer_size()
        if before is not None and left >= before:
            self._transport.abort()
        else:
            self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self._check_writing, left)

    def _close(self) -> None:
        self._is_deaf = True
        self._stop_waiting()
        if self._transport is not None:
            self._transport.close()


def _too_many() -> Refusal:
    return Refusal(503, "There are too many connections; try again.", retry_after_s=1)
