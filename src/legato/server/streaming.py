"""Sending an answer while watching the client.

It receives frames as they are made and puts them on the wire at once. When the client goes away, in whatever phase,
the frames' iterator is closed, which cancels the work behind it. It knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Send

from legato.errors import LegatoError
from legato.system.supervisor import beside
from legato.system.threads import Threads

__all__ = ["ClientGone", "run_aside", "send_body", "send_stream", "while_connected"]

KEEP_ALIVE_S = 10.0

_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work`, and cancel it if the client goes away.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    async with beside(watch()):
        try:
            return await work
        except asyncio.CancelledError:
            if is_gone and not task.uncancel():
                raise ClientGone from None
            raise


async def run_aside(receive: Receive, threads: Threads | None, work: Callable[[], _Result]) -> _Result:
    """Run `work`, in threads if there are any for it.

    Raises:
        ClientGone: the client went away meanwhile.
        Overloaded: too much of its kind is waiting.
    """
    return work() if threads is None else await while_connected(receive, threads.run(work))


async def send_stream(
    send: Send,
    frames: AsyncGenerator[bytes, None],
    failure: Callable[[LegatoError], Iterable[bytes]],
    headers: Mapping[str, str],
    keep_alive: bytes,
) -> None:
    """Send frames as they come, and `keep_alive` after each `KEEP_ALIVE_S` of silence.

    The response begins with the first frame, also an empty one, with the first `keep_alive`, or with the end. An error
    before that is raised, so that it can have its own status; a later one is sent as the frames of `failure`.
    """
    clock = asyncio.get_running_loop().time
    has_begun = False
    written_at = clock()
    lock = asyncio.Lock()

    async def write(data: bytes) -> None:
        nonlocal has_begun, written_at
        async with lock:
            if not has_begun:
                has_begun = True
                await _start(send, 200, {**headers, "cache-control": "no-store", "x-accel-buffering": "no"})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            written_at = clock()

    async def fill_silence() -> None:
        while True:
            silent_s = clock() - written_at
            if silent_s >= KEEP_ALIVE_S:
                await write(keep_alive)
            else:
                await asyncio.sleep(KEEP_ALIVE_S - silent_s)

    async with beside(fill_silence()):
        try:
            async with aclosing(frames):
                async for frame in frames:
                    await write(frame)
        except LegatoError as error:
            if not has_begun:
                raise
            for frame in failure(error):
                await write(frame)
    if not has_begun:
        await write(b"")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_body(
    send: Send,
    body: bytes,
    *,
    status: int,
    headers: Mapping[str, str],
    kind: str = "application/json",
    drain: Coroutine[Any, Any, None] | None = None,
) -> None:
    """Send a whole body. `drain` runs after the client has all of it and before the response ends."""
    await _start(send, status, {**headers, "content-type": kind, "content-length": str(len(body))})
    if drain is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await drain
        body = b""
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
