"""The head of a request: from what the parser finds to what an application is told (an ASGI scope).

It refuses what the parser lets through although two readers could take it for two requests (RFC 9112), and what no
address is.
"""

from __future__ import annotations

import asyncio
import re
import urllib.parse

import httptools
from starlette.types import Scope

from legato.server.http.exchange import Refusal

__all__ = ["Head"]

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")


class Head:
    """Method, target and headers of a request, as far as they have come."""

    def __init__(self) -> None:
        self.method = b""
        """Empty until it is known."""
        self.target = b""
        self._headers: list[tuple[bytes, bytes]] = []

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a word before it sends the body."""
        return any(value.lower() == b"100-continue" for value in self._all(b"expect"))

    def add(self, name: bytes, value: bytes) -> None:
        """Add a header."""
        self._headers.append((name.lower(), value.strip(b" \t")))

    def scope(self, version: str, transport: asyncio.Transport) -> Scope:
        """Return what an application is told.

        Raises:
            Refusal: it is none of the requests that are taken.
        """
        self._check(version)
        try:
            url = httptools.parse_url(self.target)
            path = (url.path or b"/").decode("ascii")
        except (httptools.HttpParserError, UnicodeDecodeError):
            raise Refusal(400, "The address of the request is none.") from None
        if url.schema:  # Then the target says which host is meant, whatever the header says.
            authority = re.split(rb"[/?#]", self.target.partition(b"://")[2])[0]
            self._headers = [entry for entry in self._headers if entry[0] != b"host"] + [(b"host", authority)]
            _check_hosts([authority])
        return {
            **self._common(transport),
            "http_version": version,
            "path": urllib.parse.unquote(path),
            "raw_path": path.encode(),
            "query_string": url.query or b"",
            "headers": self._headers,
        }

    def refused_scope(self, transport: asyncio.Transport) -> Scope:
        """Return what an application is told of a request that is refused: what is known of it, for the log."""
        raw = self.target.partition(b"?")[0] or b"-"
        return {
            **self._common(transport),
            "method": self.method.decode("ascii") or "-",
            "http_version": "1.1",
            "path": raw.decode("latin-1"),
            "raw_path": raw,
            "query_string": b"",
            "headers": [],
        }

    def without_upgrade(self, version: str) -> bytes:
        """Return the head as it was sent, but without the wish for another protocol."""
        lines = [b"%s %s HTTP/%s" % (self.method, self.target, version.encode())]
        lines += [name + b": " + value for name, value in self._headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _common(self, transport: asyncio.Transport) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http",
            "method": self.method.decode("ascii"),
            "root_path": "",
            "client": transport.get_extra_info("peername")[:2],
            "server": transport.get_extra_info("sockname")[:2],
            "extensions": {},
        }

    def _all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._headers if key == name]

    def _check(self, version: str) -> None:
        if version not in ("1.0", "1.1"):
            raise Refusal(505, f"HTTP/1.1 and HTTP/1.0 are taken, got HTTP/{version}.")
        if self.method == b"CONNECT":
            raise Refusal(400, "This is no proxy: CONNECT is not taken.")
        hosts = self._all(b"host")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise Refusal(400, f"A request must have one Host header, got {len(hosts)}.")
        _check_hosts(hosts)
        codings = self._all(b"transfer-encoding")
        if codings and version == "1.0":
            raise Refusal(400, "HTTP/1.0 has no Transfer-Encoding.")
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
            raise Refusal(501, "The only Transfer-Encoding that is taken is `chunked`.")


def _check_hosts(hosts: list[bytes]) -> None:
    if not all(_HOST.fullmatch(host) for host in hosts):
        raise Refusal(400, "The Host header must be a name or an address, and a port.")
