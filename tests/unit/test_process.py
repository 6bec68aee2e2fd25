"""When a worker that says nothing is held to be hung (`legato.engines.llamacpp.process`)."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from legato.engines.llamacpp.process import Child, Worker
from legato.engines.llamacpp.worker import WorkerSettings, pack
from legato.errors import EngineUnavailable
from tests.clock import run_leaping


class Silent(Child):
    """A process that says nothing, unless it answers pings; `work` gives what it has done at each look."""

    def __init__(self, work: Iterator[int], *, answers: bool = False) -> None:
        self.pid = 1
        self._work = work
        self._answers = answers
        self._said = asyncio.StreamReader()
        self.num_pings = 0

    def write(self, data: bytes) -> None:
        if pickle.loads(data[4:]) == ("ping",):
            self.num_pings += 1
            if self._answers:
                self._said.feed_data(pack(("pong", None)))

    async def read(self, num: int) -> bytes:
        return await self._said.readexactly(num)

    def work_done(self) -> tuple[int, ...]:
        return (next(self._work),)


async def seconds_until_hung(
    child: Silent, *, at_most: float = 1000, is_awaited: Callable[[], bool] | None = None
) -> float:
    """Watch a worker that runs; return when it is held to be hung."""
    clock = asyncio.get_running_loop().time
    worker = Worker(child, WorkerSettings(Path("x.gguf"), 0, 0, 1))
    worker._is_loaded = True
    loop = asyncio.get_running_loop()
    watching = loop.create_task(worker.needed(worker.watch()))
    try:
        async with asyncio.timeout(at_most):
            await worker.run(lambda event, value: None, is_awaited or (lambda: True))
    except EngineUnavailable:
        return clock()
    except TimeoutError:
        return at_most
    finally:
        watching.cancel()
    raise AssertionError("it ends only so")


def hung_after(work: Iterator[int], **options: bool) -> float:
    """Return after how many seconds such a worker is held to be hung."""

    async def test() -> float:
        return await seconds_until_hung(Silent(work, **options))

    return run_leaping(test())


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (itertools.repeat(7), 6),  # It is stopped: the first look only shows what there is.
        (itertools.chain(range(20), itertools.repeat(20)), 26),  # It computes for 20 seconds, and stops.
        (itertools.count(), 61),  # It computes without end.
        ((num // 4 for num in itertools.count()), 61),  # It hardly gets to.
    ],
)
def test_who_is_silent_is_held_to_be_hung(work: Iterator[int], seconds: float) -> None:
    assert hung_after(work) == pytest.approx(seconds, abs=1)


def test_who_answers_between_steps_is_not() -> None:
    assert hung_after(itertools.repeat(7), answers=True) == 1000


def test_who_is_not_waited_for_is_not() -> None:
    async def test() -> None:
        child = Silent(itertools.repeat(7))
        assert await seconds_until_hung(child, is_awaited=lambda: False) == 1000
        assert not child.num_pings

    run_leaping(test())


def test_who_cannot_be_looked_at_may_be_at_work() -> None:
    class Hidden(Silent):
        def work_done(self) -> tuple[int, ...]:
            raise PermissionError

    async def test() -> None:
        assert await seconds_until_hung(Hidden(iter(()))) == pytest.approx(61, abs=1)

    run_leaping(test())


def test_a_step_may_take_as_long_as_the_machine_is_slow() -> None:
    """Where a full batch takes 10 s, a worker may be silent for 200."""

    async def test() -> None:
        child = Silent(itertools.count())
        child._said.feed_data(pack(("loaded", 64)) + pack(("ready", 10.0)))
        worker = Worker(child, WorkerSettings(Path("x.gguf"), 0, 0, 1))

        async def nothing(context_length: int) -> None:
            assert context_length == 64

        watching = asyncio.get_running_loop().create_task(worker.needed(worker.watch()))
        await worker.load(nothing)
        with pytest.raises(EngineUnavailable):
            await worker.run(lambda event, value: None, lambda: True)
        assert asyncio.get_running_loop().time() == pytest.approx(201, abs=2)
        watching.cancel()

    run_leaping(test())


def test_loading_ends_too() -> None:
    async def test(work: Iterator[int], seconds: float) -> None:
        worker = Worker(Silent(work), WorkerSettings(Path("x.gguf"), 0, 0, 1))

        async def nothing(context_length: int) -> None:
            raise AssertionError

        watching = asyncio.get_running_loop().create_task(worker.needed(worker.watch()))
        with pytest.raises(EngineUnavailable):
            await worker.load(nothing)
        assert asyncio.get_running_loop().time() == pytest.approx(seconds, abs=2)
        watching.cancel()

    run_leaping(test(itertools.repeat(7), 31))
    run_leaping(test(itertools.count(), 300))
