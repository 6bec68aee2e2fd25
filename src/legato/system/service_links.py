"""Variables that a cluster sets beside those of the settings: where the Services are that run in it.

It receives a variable's name and value and says what it is. For a Service `legato-server`, Kubernetes (and, in part,
Docker's links) sets `LEGATO_SERVER_SERVICE_HOST`, `LEGATO_SERVER_PORT=tcp://10.0.0.1:8080` and more in every container.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

__all__ = ["is_service_link"]


def is_service_link(name: str, value: str) -> bool:
    """Whether a variable tells where a Service is. Its name alone does not say: `LEGATO_SERVER_PORT` is a setting."""
    return any(pattern.fullmatch(name) and has_form(value) for pattern, has_form in _FORMS)


def _is_address(value: str) -> bool:
    """Whether another machine could have this address: none has that of this one, or of all."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_loopback)


def _is_port(value: str) -> bool:
    return re.fullmatch("[0-9]{1,5}", value) is not None and 0 < int(value) < 65536


def _is_protocol(value: str) -> bool:
    return value in ("tcp", "udp", "sctp")


def _is_link(value: str) -> bool:
    protocol, _, place = value.partition("://")
    host, _, port = place.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return _is_protocol(protocol) and _is_address(bare) and _is_port(port)


_PORT = r".+_PORT_[0-9]{1,5}_(TCP|UDP|SCTP)"
_FORMS: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = (
    (re.compile(r".+_SERVICE_HOST"), _is_address),
    (re.compile(r".+_SERVICE_PORT(_[A-Z0-9_]+)?"), _is_port),
    (re.compile(r".+_PORT"), _is_link),
    (re.compile(_PORT), _is_link),
    (re.compile(_PORT + "_PROTO"), _is_protocol),
    (re.compile(_PORT + "_PORT"), _is_port),
    (re.compile(_PORT + "_ADDR"), _is_address),
)
