"""Routes of resumable generations: show, follow, continue, delete.

They receive ids and send what `Generations` returns. They know no fields but their own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from legato.errors import InvalidField
from legato.server.generations import Generations
from legato.server.generations.live import Live
from legato.server.generations.replay import failure_frames
from legato.server.middleware import Endpoint, Gate, header
from legato.server.queries import report_headers
from legato.server.streaming import send_body, send_stream, while_connected
from legato.wire import EVENTS, KEEP_ALIVE, encode_json, parse_body

__all__ = ["generation_routes", "send_live"]


async def send_live(generations: Generations, live: Live, receive: Receive, send: Send) -> None:
    """Send the answer of a generation that this process started, streamed or whole as its request says."""
    headers = report_headers(live.run.report)
    if live.run.request.output.stream:
        await _send_events(generations.follow(live.record, 0, live), headers, receive, send)
    else:
        await send_body(send, await while_connected(receive, generations.whole(live)), status=200, headers=headers)


async def _send_events(
    frames: AsyncGenerator[bytes, None], headers: Mapping[str, str], receive: Receive, send: Send
) -> None:
    """Send events while the client is connected. The generation runs on when the client leaves."""
    async with aclosing(frames):
        stream = send_stream(send, frames, failure_frames, {**headers, "content-type": EVENTS}, KEEP_ALIVE[EVENTS])
        await while_connected(receive, stream)


def generation_routes(generations: Generations, gate: Gate) -> Mapping[str, Mapping[str, Endpoint]]:
    """Return the endpoints by path and method."""

    async def show(scope: Scope, receive: Receive, send: Send) -> None:
        record = await generations.find(scope["path_params"]["id"], scope["key"])
        shown = {
            "id": record.id,
            "object": "generation",
            "created": record.created_at,
            "model": record.body["model"],
            "status": record.state,
            "num_events": record.num_entries,
            "answer": None if record.answer is None else json.loads(record.answer),
        }
        await send_body(send, encode_json(shown), status=200, headers={})

    async def follow(scope: Scope, receive: Receive, send: Send) -> None:
        record = await generations.find(scope["path_params"]["id"], scope["key"])
        await _send_events(_at_once(generations.follow(record, _after(scope))), {}, receive, send)

    async def go_on(scope: Scope, receive: Receive, send: Send) -> None:
        given = parse_body(await gate.read_body(scope, receive))
        record = await generations.find(scope["path_params"]["id"], scope["key"])
        live = await generations.go_on(record, given, scope["key"])
        await send_live(generations, live, receive, send)

    async def delete(scope: Scope, receive: Receive, send: Send) -> None:
        record = await generations.find(scope["path_params"]["id"], scope["key"])
        await generations.delete(record)
        await send_body(send, encode_json({"id": record.id, "deleted": True}), status=200, headers={})

    return {
        "/v1/generations/{id}": {"GET": show, "DELETE": delete},
        "/v1/generations/{id}/events": {"GET": follow},
        "/v1/generations/{id}/continue": {"POST": go_on},
    }


def _after(scope: Scope) -> int:
    """Return the number of the last event that the client has: `after`, or the header that browsers send."""
    given = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
    for name in given:
        if name != "after":
            raise InvalidField(f"`{name}` is no parameter of this path; `after` is one", param=name)
    text = given.get("after", (header(scope, b"last-event-id") or b"0").decode("latin-1"))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidField(f"`after` must be the number of an event, got {text[:80]!r}", param="after")
    return int(text)


async def _at_once(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Begin the response at once, before the first frame."""
    yield b""
    async with aclosing(frames):
        async for frame in frames:
            yield frame
