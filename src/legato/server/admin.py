"""Routes for administrators: the server's keys, and the usage of all of them. They need a key with the right `admin`.

They receive bodies and return what the store has. They start no generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import parse_qsl

from pydantic import Field
from starlette.types import Receive, Scope, Send

from legato.dialects.base import Body, read_body, unknown_fields
from legato.errors import InvalidField, NotPermitted
from legato.server.middleware import Endpoint, Gate
from legato.server.streaming import send_body
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.wire import encode_json, parse_body

__all__ = ["DAY", "KeyBody", "admin_routes", "check_admin"]

_Limit = Annotated[int, Field(ge=1, le=2**53)] | None
DAY = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
"""A regular expression for a day, as YYYY-MM-DD."""


class KeyBody(Body):
    """A key that is to be made."""

    name: str
    models: list[str] = Field(default_factory=list)
    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    tokens_per_month: _Limit = None
    control_tokens: bool = True
    admin: bool = False
    expires_at: _Limit = None


def check_admin(key: Key) -> None:
    """Refuse keys without the right `admin`.

    Raises:
        NotPermitted: the key lacks it.
    """
    if not key.admin:
        raise NotPermitted("this path wants a key with the right `admin`: `legato keys create NAME --admin`")


def admin_routes(store: Store, gate: Gate) -> Mapping[str, Mapping[str, Endpoint]]:
    """Return the endpoints by path and method."""

    async def answer(send: Send, value: Any, status: int = 200) -> None:
        await send_body(send, encode_json(value), status=status, headers={})

    async def list_keys(scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope["key"])
        keys = await store.reads.run(store.keys)
        await answer(send, {"object": "list", "data": [asdict(key) for key in keys]})

    async def create_key(scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope["key"])
        body = read_body(KeyBody, parse_body(await gate.read_body(scope, receive)))
        for name in unknown_fields(body):
            known = ", ".join(KeyBody.model_fields)
            raise InvalidField(f"`{name}` is nothing that a key has; known: {known}", param=name)
        key = Key(**{**body.model_dump(exclude=set(body.model_extra or {})), "models": tuple(body.models)})
        secret = await store.writes.run(store.create_key, key)
        await answer(send, {"name": key.name, "key": secret}, 201)

    async def revoke_key(scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope["key"])
        name = scope["path_params"]["name"]
        await store.writes.run(store.revoke_key, name)
        await answer(send, {"name": name, "revoked": True})

    async def rotate_key(scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope["key"])
        name = scope["path_params"]["name"]
        await answer(send, {"name": name, "key": await store.writes.run(store.rotate_key, name)})

    async def show_usage(scope: Scope, receive: Receive, send: Send) -> None:
        check_admin(scope["key"])
        days = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        for name, value in days.items():
            if name not in ("since", "until") or not re.fullmatch(DAY, value):
                raise InvalidField(f"`since` and `until` may be given, as YYYY-MM-DD, got `{name}={value}`", param=name)
        rows = await store.reads.run(lambda: store.usage(**days))
        await answer(send, {"object": "list", "data": [asdict(row) for row in rows]})

    return {
        "/admin/keys": {"GET": list_keys, "POST": create_key},
        "/admin/keys/{name}": {"DELETE": revoke_key},
        "/admin/keys/{name}/rotate": {"POST": rotate_key},
        "/admin/usage": {"GET": show_usage},
    }
