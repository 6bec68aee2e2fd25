"""Work beside requests: no end of it goes unseen, and it is started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from legato.errors import StoreUnavailable
from legato.system.supervisor import Supervisor, beside, together
from tests.clock import run_leaping


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop of its own; none takes long."""
    asyncio.run(asyncio.wait_for(test(), 10))


async def fails() -> None:
    """Fail."""
    raise ValueError("a bug")


async def refuses() -> None:
    """Fail as the store does."""
    raise StoreUnavailable("the store is away")


async def returns() -> None:
    """Return, which work for good must not."""


async def is_broken_off() -> None:
    """Wait for something that somebody else cancels."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        (fails, "ValueError: a bug"),
        (refuses, "the store is away"),
        (returns, "RuntimeError: it ended by itself"),
        (is_broken_off, "RuntimeError: it was cancelled"),
    ],
)
def test_every_end_is_told_counted_and_followed_by_a_new_start(
    work: Callable[[], Awaitable[None]], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        supervisor = Supervisor()
        errors: list[Exception] = []
        runs_well = asyncio.Event()

        async def once_wrong() -> None:
            if not errors:
                await work()
                return
            runs_well.set()
            await asyncio.Event().wait()

        supervisor.start("the writer", once_wrong, on_failure=errors.append)
        assert supervisor.restarts() == {"the writer": 0}
        await asyncio.sleep(0.01)
        assert supervisor.down() == {"the writer": cause}
        assert len(errors) == 1
        await runs_well.wait()
        assert supervisor.down() == {}
        assert supervisor.restarts() == {"the writer": 1}
        await supervisor.aclose()

    with caplog.at_level(logging.ERROR):
        run(test)
    (record,) = caplog.records
    assert f"the writer has ended: {cause}; it is started again in 0.1 s" in record.getMessage()
    assert bool(record.exc_info) == (work is not refuses)  # Where a fault of ours was is told.


def test_pauses_grow_until_it_has_run_well(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        supervisor = Supervisor()
        begun: list[float] = []
        enough = asyncio.Event()

        async def work() -> None:
            begun.append(clock())
            if len(begun) == 15:
                enough.set()
            await asyncio.sleep(60 if len(begun) == 12 else 0)

        def follows(error: Exception) -> None:
            raise KeyError  # It may fail too.

        supervisor.start("work", work, on_failure=follows)
        await enough.wait()
        await supervisor.aclose()
        pauses = [round(after - before, 1) for before, after in pairwise(begun)]
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30, 60.1, 0.2, 0.4]

    run_leaping(test())
    assert sum("what follows from the end of work has failed" in line for line in caplog.messages) == 14


def test_who_says_that_it_runs_well_has_recovered() -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        supervisor = Supervisor()
        begun: list[float] = []
        enough = asyncio.Event()

        async def work() -> None:
            begun.append(clock())
            if len(begun) == 3:
                supervisor.recovered("work")
            if len(begun) == 6:
                enough.set()

        supervisor.start("work", work)
        await enough.wait()
        await supervisor.aclose()
        assert [round(after - before, 1) for before, after in pairwise(begun)] == [0.1, 0.2, 0.1, 0.2, 0.4]

    run_leaping(test())


def test_an_end_that_was_asked_for_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        supervisor = Supervisor()
        ended = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        one = supervisor.start("one", work)
        supervisor.start("two", work)
        supervisor.once("three", work())
        await asyncio.sleep(0)
        one.cancel()
        await asyncio.wait([one])
        assert len(ended) == 1
        await supervisor.aclose()
        assert len(ended) == 3
        assert supervisor.down() == {}

    run(test)
    assert not caplog.records


def test_work_that_comes_to_an_end_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        supervisor = Supervisor()
        await supervisor.once("an answer", returns())
        await supervisor.once("an answer", fails())
        assert not supervisor.down()
        assert not supervisor.restarts()
        task = supervisor.once("what is called off before it begins", returns())
        task.cancel()
        await asyncio.wait([task])
        await supervisor.aclose()

    run(test)
    assert [record.getMessage() for record in caplog.records] == [
        "an answer has ended: ValueError: a bug; it is not started again"
    ]


def test_beside_a_block() -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def watch() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                ended.set()

        async with beside(watch()):
            await asyncio.sleep(0)
        assert ended.is_set()  # It was waited for.

        async def answer() -> int:
            return 42

        async with beside(answer()) as task:
            assert await task == 42

        with pytest.raises(ValueError, match="a bug"):
            async with beside(fails()):
                await asyncio.sleep(0.01)

        async def block() -> None:
            async with beside(fails()):
                await asyncio.sleep(0.01)
                raise KeyError

        with pytest.raises(KeyError):  # The block's own error counts.
            await block()

    run(test)


def test_a_cancelled_block_ends_what_runs_beside_it() -> None:
    async def test() -> None:
        ended = []

        async def slow_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.02)
                ended.append(True)

        async def block() -> None:
            async with beside(slow_end()):
                await asyncio.sleep(0)

        before = asyncio.all_tasks()
        task = asyncio.get_running_loop().create_task(block())
        await asyncio.sleep(0.01)  # It waits for the other's end.
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert len(ended) == 0  # Cancelled once more, it did not take its time,
        assert asyncio.all_tasks() == before  # but it has ended.

    run(test)


def test_together() -> None:
    async def test() -> None:
        async def wait(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return seconds

        assert await together() == []
        assert await together(wait(0.02), wait(0.01)) == [0.02, 0.01]
        ended = []

        async def lasting() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def wrong() -> None:
            await asyncio.sleep(0)
            raise ValueError("a bug")

        with pytest.raises(ValueError, match="a bug"):
            await together(lasting(), wrong(), lasting())
        assert len(ended) == 2

    run(test)
