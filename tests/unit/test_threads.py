"""Threads for blocking work: bounded in number, in waiting, and in time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from legato.errors import Overloaded
from legato.system.supervisor import together
from legato.system.threads import Threads


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop of its own; none takes long."""
    asyncio.run(asyncio.wait_for(test(), 10))


@contextmanager
def some(num: int, *, max_waiting: int = 8, max_wait_s: float = 5) -> Iterator[Threads]:
    """Threads, and an end to them."""
    threads = Threads(
        "test", num, max_waiting=max_waiting, max_wait_s=max_wait_s, busy=lambda: Overloaded("busy", retry_after_s=5)
    )
    try:
        yield threads
    finally:
        threads.close()


def test_a_call_returns_or_raises_as_it_does() -> None:
    async def test() -> None:
        with some(1) as threads:
            assert await threads.run(divmod, 7, 2) == (3, 1)
            assert await threads.run(threading.get_ident) != threading.get_ident()
            with pytest.raises(ZeroDivisionError):
                await threads.run(divmod, 7, 0)

    run(test)


@pytest.mark.alone
def test_who_cannot_begin_in_time_is_refused_and_never_begins() -> None:
    async def test() -> None:
        gate = threading.Event()
        begun: list[int] = []
        with some(2, max_wait_s=0.2) as threads:

            def block(num: int) -> int:
                begun.append(num)
                gate.wait(5)
                return num

            async def ask(num: int) -> int | str:
                asked = time.monotonic()
                try:
                    return await threads.run(block, num)
                except Overloaded as error:
                    assert 0.1 < time.monotonic() - asked < 1
                    asyncio.get_running_loop().call_later(0.05, gate.set)
                    return error.message

            assert await together(*map(ask, range(5))) == [0, 1, "busy", "busy", "busy"]
            assert begun == [0, 1]
            assert await threads.run(divmod, 7, 2) == (3, 1)

    run(test)


def test_too_many_are_refused_at_once() -> None:
    async def test() -> None:
        gate = threading.Event()
        with some(1, max_waiting=2) as threads:

            async def ask() -> str:
                try:
                    await threads.run(gate.wait, 5)
                except Overloaded:
                    gate.set()  # Nothing ends before one was refused.
                    return "refused"
                return "ran"

            assert await together(*(ask() for _ in range(5))) == ["ran"] * 3 + ["refused"] * 2
            assert await threads.run(divmod, 7, 2) == (3, 1)  # All have left.

    run(test)


def test_a_cancelled_call_never_begins_or_is_waited_for() -> None:
    async def test() -> None:
        gate = threading.Event()
        ended: list[str] = []

        def block(name: str) -> None:
            gate.wait(5)
            ended.append(name)
            if name == "fails":
                raise ValueError

        with some(2) as threads:
            loop = asyncio.get_running_loop()
            names = ("runs", "fails", "waits")
            runs, fails, waits = tasks = [loop.create_task(threads.run(block, name)) for name in names]
            await asyncio.sleep(0.05)
            for _ in range(2):  # Once is enough, and twice is no more.
                for task in tasks:
                    task.cancel()
                await asyncio.sleep(0.05)
            assert waits.cancelled()
            assert not runs.done()
            assert not fails.done()
            gate.set()
            await asyncio.wait(tasks)
            assert runs.cancelled()
            assert fails.cancelled()
            assert sorted(ended) == ["fails", "runs"]

    run(test)


def test_servers_in_several_loops_share_them() -> None:
    with some(2, max_waiting=24) as threads:
        sums: list[int] = []

        async def add() -> None:
            sums.append(sum(await together(*(threads.run(int, str(num)) for num in range(6)))))

        servers = [threading.Thread(target=asyncio.run, args=(add(),)) for _ in range(4)]
        for server in servers:
            server.start()
        for server in servers:
            server.join(10)
        assert sums == [15] * 4
