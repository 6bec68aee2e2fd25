"""What happens around every request: host and key are checked, the body is read, a failure becomes an answer.

It receives ASGI requests and hands bodies on. A failure before the body was read is answered at once; then the rest of
the body is discarded within bounds and the connection closed, so that its bytes are never read as another request.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.config import LimitSettings, ServerSettings, is_loopback
from legato.errors import (
    BodyTimeout,
    BodyTooLarge,
    EngineUnavailable,
    HostNotAllowed,
    KeyMissing,
    LegatoError,
    UnsupportedMediaType,
)
from legato.server.access import Access
from legato.server.http.exchange import REFUSAL, Refusal
from legato.server.streaming import ClientGone, send_body
from legato.server.telemetry import Telemetry
from legato.storage.keys import ANYONE, Key

__all__ = ["Endpoint", "Gate", "GatedEndpoint", "PathError", "Reply", "TelemetryMiddleware", "header"]

_log = logging.getLogger("legato.server")

_DRAIN_S = 2.0
_LOOPBACK_NAMES = frozenset([b"localhost", b"127.0.0.1", b"[::1]"])

Reply = Callable[[LegatoError], tuple[int, bytes]]
"""Returns an error's status and body, as the path's dialect has them."""
Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of a request header; of several, the first."""
    return next((value for key, value in scope["headers"] if key == name), None)


class Gate:
    """Checks a request's host and key, and reads its body."""

    def __init__(self, server: ServerSettings, limits: LimitSettings, access: Access) -> None:
        self._access = access
        self._limits = limits
        names = {name.encode().lower() for name in server.allowed_hosts}
        if not names and is_loopback(server.host):
            names = {*_LOOPBACK_NAMES, server.host.encode().lower()}
        self._hosts = names

    def check_host(self, scope: Scope) -> None:
        """Refuse unknown Host headers: another site may have pointed its own name at this machine (DNS rebinding).

        Raises:
            HostNotAllowed: the server does not answer for this host.
        """
        host = header(scope, b"host")
        if not self._hosts or host is None:  # Only HTTP/1.0 clients send none, and no browser is one.
            return
        value = host.lower()
        name = value[: value.index(b"]") + 1] if value.startswith(b"[") and b"]" in value else value.split(b":")[0]
        if name not in self._hosts:
            shown = name.decode("latin-1")
            raise HostNotAllowed(f"this server does not answer for host `{shown}`; see `server.allowed_hosts`")

    async def check_key(self, scope: Scope, *, takes_x_api_key: bool = False) -> Key:
        """Return the key that the caller presents. Where `X-Api-Key` is taken, it counts if there is no bearer token.

        Raises:
            NotAuthenticated: it is missing or wrong, and this server has keys.
            StoreUnavailable: the key cannot be looked up.
        """
        if await self._access.is_open():
            return ANYONE
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else b""
        if not key and takes_x_api_key:
            key = (header(scope, b"x-api-key") or b"").strip()
        if not key:
            also = " or `X-Api-Key: KEY`" if takes_x_api_key else ""
            raise KeyMissing(f"no key was given: send `Authorization: Bearer KEY`{also}")
        return await self._access.find(key)

    async def read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Read a JSON body.

        Raises:
            UnsupportedMediaType: it is declared as something else, or as compressed.
            BodyTooLarge: it is over the limit.
            BodyTimeout: it did not arrive in time.
            ClientGone: the client left.
        """
        kind = (header(scope, b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            raise UnsupportedMediaType(
                f"the body must be JSON (`application/json`), got content type `{kind.decode('latin-1')}`"
            )
        coding = (header(scope, b"content-encoding") or b"identity").strip().lower()
        if coding != b"identity":
            raise UnsupportedMediaType(
                f"the body must be sent as it is, without `Content-Encoding`, got `{coding.decode('latin-1')}`"
            )
        limit = self._limits.max_body_bytes
        too_large = BodyTooLarge(f"the body may have at most {limit} bytes")
        length = header(scope, b"content-length") or b"0"
        if not length.isdigit() or int(length[:20]) > limit:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    data += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(data) > limit:
                        raise too_large
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {self._limits.body_timeout_s:g} s") from None
        return bytes(data)


class TelemetryMiddleware:
    """Gives each request an id, a line in the log and a count.

    The application adds notes to `scope["notes"]`: the `route`, if there is one, and the tokens. A request that the
    connection refused is answered here.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._telemetry.request(scope["method"], header(scope, b"traceparent")) as notes:
            notes |= {"request": secrets.token_hex(8), "path": scope["raw_path"].decode("latin-1")}

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    notes["status"] = message["status"]
                    id = (b"x-request-id", str(notes["request"]).encode())
                    message = {**message, "headers": [*message["headers"], id]}
                await send(message)

            try:
                if (refused := scope["extensions"].get(REFUSAL)) is not None:
                    raise refused
                await self._app({**scope, "notes": notes}, receive, send_with_id)
            except Refusal as refusal:
                notes["reason"] = refusal.reason
                if "status" in notes:  # Its answer has begun; only later bytes are not HTTP.
                    return
                headers = {"connection": "close"}
                if refusal.retry_after_s is not None:
                    headers["retry-after"] = str(refusal.retry_after_s)
                kind = "text/plain; charset=utf-8"
                with suppress(OSError):
                    await send_body(
                        send_with_id, refusal.text.encode(), status=refusal.status, headers=headers, kind=kind
                    )


class GatedEndpoint:
    """An ASGI endpoint with the gate before it and error handling around it.

    The endpoint finds the caller's key in `scope["key"]`; what it puts into `scope["notes"]` is logged.
    """

    def __init__(
        self,
        gate: Gate,
        path: str,
        reply: Reply,
        endpoint: Endpoint,
        *,
        is_public: bool = False,
        takes_x_api_key: bool = False,
    ) -> None:
        self._gate = gate
        self._path = path
        self._reply = reply
        self._endpoint = endpoint
        self._is_public = is_public
        self._takes_x_api_key = takes_x_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = _Exchange(scope, receive, send)
        notes = scope["notes"]
        notes["route"] = self._path
        try:
            self._gate.check_host(scope)
            key = ANYONE
            if not self._is_public:
                key = await self._gate.check_key(scope, takes_x_api_key=self._takes_x_api_key)
            notes["key"] = key.name
            await self._endpoint({**scope, "key": key}, exchange.receive, exchange.send)
        except ClientGone:
            notes["status"] = 499
        except asyncio.CancelledError:  # The server is closing, and `limits.grace_s` is over.
            notes["reason"] = "cut off by the stop of the server"
            await exchange.fail(EngineUnavailable("the server is shutting down"), self._reply)
        except LegatoError as error:
            await exchange.fail(error, self._reply)
        except Refusal:
            raise
        except Exception:  # noqa: BLE001 - the last resort: logged here, and nowhere else
            _log.exception("request %s failed", notes["request"])
            words = f"something went wrong in the server; its log has the reason under {notes['request']}"
            await exchange.fail(LegatoError(words), self._reply)


class _Exchange:
    """One request and its answer: how much of each has come."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._has_begun = False
        self._has_more = (
            header(scope, b"transfer-encoding") is not None or (header(scope, b"content-length") or b"0") != b"0"
        )

    async def receive(self) -> Message:
        """Receive, and note whether the body has ended."""
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._has_more = False
        return message

    async def send(self, message: Message) -> None:
        """Send, and note that the answer has begun."""
        self._has_begun = True
        await self._send(message)

    async def fail(self, error: LegatoError, reply: Reply, extra: Mapping[str, str] | None = None) -> None:
        """Answer with an error; once an answer has begun, do nothing."""
        if self._has_begun:
            return
        status, body = reply(error)
        headers = dict(extra or {})
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        drain = None
        if self._has_more:
            headers["connection"] = "close"
            drain = self._drain()
        with suppress(OSError):
            await send_body(self.send, body, status=status, headers=headers, drain=drain)

    async def _drain(self) -> None:
        """Discard the rest of the body for a while, so that the client reads the answer instead of a reset."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while self._has_more:
                    await self.receive()


class PathError:
    """An ASGI application that answers with one error, without reading the body: for an unknown path or method."""

    def __init__(self, error: LegatoError, reply: Reply, headers: Mapping[str, str]) -> None:
        self._error = error
        self._reply = reply
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await _Exchange(scope, receive, send).fail(self._error, self._reply, self._headers)
