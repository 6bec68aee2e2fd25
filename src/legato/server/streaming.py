"""Sending an answer while watching the client.

It receives frames as they are made and puts them on the wire at once. When the client goes away, in whatever phase,
the frames' iterator is closed, which cancels the work behind it. It knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Send

from legato.wire import KEEP_ALIVE

__all__ = ["ClientGone", "send_body", "send_stream", "while_connected"]

KEEP_ALIVE_S = 10.0

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work`, and cancel it if the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_stream(
    send: Send, frames: AsyncGenerator[bytes, None], *, status: int, headers: Mapping[str, str]
) -> None:
    """Send frames as they come, with a comment after each `KEEP_ALIVE_S` of silence."""
    await _start(send, status, {**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
    async with aclosing(frames) as source:
        step = asyncio.ensure_future(anext(source, None))
        try:
            while True:
                done, _ = await asyncio.wait({step}, timeout=KEEP_ALIVE_S)
                if not done:
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                    continue
                frame = step.result()
                if frame is None:
                    break
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                step = asyncio.ensure_future(anext(source, None))
        finally:
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_body(
    send: Send, body: bytes, *, status: int, headers: Mapping[str, str], drain: Coroutine[Any, Any, None] | None = None
) -> None:
    """Send a whole JSON body. `drain`, if given, runs after the client has it all and before the response ends."""
    await _start(send, status, {**headers, "content-type": "application/json", "content-length": str(len(body))})
    if drain is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await drain
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
