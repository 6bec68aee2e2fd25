"""Resumable answers, under a fault of the store, of a clock or of the process at every call that a scenario makes.

Each scenario is run once for every call that it makes of what fails, until it has no further call. Whatever happens:
nothing hangs, what readers have seen is the text, each frame once and in order, the store agrees with it, usage is
counted once, no row is left that nobody writes, and the next request works.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from legato.config import StoreSettings
from legato.storage.store import Store
from legato.system.clock import Clock
from legato.system.supervisor import beside
from tests.faults import HANGS_AFTER_S
from tests.faults.doubles import CLOCKS, Fault, FaultyClock, Kind
from tests.faults.servers import LONG, TEXT, Reading, World

NUM_TOKENS = len(TEXT.encode())
NUM_AT_ONCE = 24
"""How many faults are tried side by side."""

Scenario = Callable[[World], Awaitable[None]]


async def streams(world: World) -> None:
    """An answer is streamed, and read again."""
    await world.serve()
    reading = await world.ask()
    again = await world.read(Reading(reading.id))
    await world.settle()
    world.check_kept(reading)
    world.check_kept(again)
    assert world.usage() == world.kept()


async def answers(world: World) -> None:
    """An answer is sent as a whole."""
    await world.serve()
    id, body = await world.whole()
    await world.settle()
    assert json.loads(body)["choices"][0]["text"] == TEXT
    world.check_kept(await world.read(Reading(id)))
    assert world.usage() == world.kept()


async def continues(world: World) -> None:
    """An answer goes on behind its end."""
    await world.serve()
    first = await world.ask()
    await world.settle()
    second = Reading()
    while not second.frames:  # Or its server has died before anybody knew of it.
        second = await world.read(Reading((await world.go_on(first.id)).record.id))
    await world.settle()
    world.check_kept(first)
    world.check_kept(second)
    assert world.usage() == world.kept()


def deletes(prompt: str, num_frames: int | None) -> Scenario:
    """An answer is deleted after so many frames, under a reader; None: behind its end."""

    async def scenario(world: World) -> None:
        await world.serve()
        live = await world.begin(prompt=prompt)
        reading = Reading(live.record.id)
        await world.read(reading, num_frames)
        async with beside(world.read(reading)) as reader:
            await world.delete(reading.id)
            await reader
        await world.settle()
        for column in ("generations.id", "texts.generation", "entries.generation"):
            asked = f"SELECT * FROM {column.partition('.')[0]} WHERE {column} = :id"
            assert world.look(asked, id=reading.id) == []
        assert TEXT.startswith(reading.text)
        num_requests, num_tokens = world.usage()
        others = world.kept()  # Whose server died before it could say that they are there.
        assert num_requests - others[0] <= 1
        assert len(reading.text.encode()) <= num_tokens - others[1] <= NUM_TOKENS

    scenario.__name__ = f"deletes_{prompt}_{num_frames}"
    return scenario


async def adopts(world: World) -> None:
    """A server dies under an answer, and another goes on with it."""
    server = await world.serve()
    live = await world.begin()
    reading = await world.read(Reading(live.record.id), 5)
    await server.die()
    await world.serve()
    await world.read(reading)
    await world.settle()
    if reading.frames:
        world.check_kept(reading)
    assert world.usage() == world.kept()


async def hands_over(world: World) -> None:
    """A server stops under an answer, and another goes on with it."""
    server = await world.serve()
    live = await world.begin()
    reading = await world.read(Reading(live.record.id), 5)
    await world.stop(server)
    await world.serve()
    await world.read(reading)
    await world.settle()
    if reading.frames:
        world.check_kept(reading)
    assert world.usage() == world.kept()


async def reads_elsewhere(world: World) -> None:
    """Another server is asked for what one writes."""
    await world.serve()
    await world.serve()
    live = await world.begin()
    reading = await world.read(Reading(live.record.id))
    await world.settle()
    if reading.frames:
        world.check_kept(reading)
    assert world.usage() == world.kept()


async def leaves(world: World) -> None:
    """A client leaves, and does not come back."""
    world.settings = StoreSettings(resume_window_s=0.25)
    await world.serve()
    live = await world.begin(prompt="long")
    await world.settle()
    rows = world.look("SELECT state FROM generations WHERE id = :id", id=live.record.id)
    assert rows in ([], [("cancelled",)])
    num_requests, num_tokens = world.usage()
    assert num_requests == len(world.look("SELECT id FROM generations"))
    assert world.kept()[1] <= num_tokens < len(LONG.encode())


async def loses_its_model(world: World) -> None:
    """A server dies under an answer, and the next one does not have its model."""
    world.settings = StoreSettings(resume_window_s=1.0)
    server = await world.serve()
    live = await world.begin(prompt="long")
    reading = await world.read(Reading(live.record.id), 5)
    await server.die()
    await world.serve("other")
    await world.read(reading)
    await world.settle()
    state = world.look("SELECT state FROM generations WHERE id = :id", id=reading.id)
    if state == [("done",)]:
        world.check_kept(reading, LONG)  # The server that has it was started again, after a fault.
    elif state == [("cancelled",)]:  # A slow machine kept its reader away for longer than the window.
        told = world.look("SELECT frame FROM entries WHERE generation = :id ORDER BY num", id=reading.id)
        num = min(len(told), len(reading.frames))
        assert [frame for (frame,) in told[:num]] == reading.frames[:num]
    elif reading.frames:
        told = world.look("SELECT frame FROM entries WHERE generation = :id ORDER BY num", id=reading.id)
        assert json.loads(told[-2][0][6:])["error"]["code"] == "model_not_found"
        # A reader may have had more than the journal, which was away when the server died.
        assert reading.is_whole or len(reading.frames) >= len(told)
        assert [frame for (frame,) in told[:-2]] == reading.frames[: len(told) - 2]
    # A server that dies before it has written anything has counted nothing.
    assert world.usage()[1] == world.kept()[1]


SCENARIOS: list[Scenario] = [
    streams,
    answers,
    continues,
    deletes("late", 0),
    deletes("go", 5),
    deletes("quick", 0),
    deletes("go", None),
    adopts,
    hands_over,
    reads_elsewhere,
    leaves,
    loses_its_model,
]
TIMED = (streams, adopts)
"""What is tried with faulty clocks, too."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for many small databases, in memory where there is such a place."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        yield Path(name)


async def run(scenario: Scenario, file: Path, fault: Fault) -> None:
    """Run a scenario under a fault, and what has to be possible then."""
    is_clock = fault.kind in CLOCKS
    clock = FaultyClock(fault).clock if is_clock else Clock()
    world = World(file, None if is_clock else fault, clock)
    try:
        async with asyncio.timeout(HANGS_AFTER_S), beside(world.reap()):
            await scenario(world)
            fault.is_over = True
            await world.settle()  # Also from a fault at its last call.
            world.check_room()
            world.check_engines()
            before = world.usage()
            await world.next()
            assert world.usage() == (before[0] + 1, before[1] + NUM_TOKENS)
    except (TimeoutError, AssertionError) as error:
        raise AssertionError(f"{fault.kind.value} at call {fault.at}: {error!r}") from error
    finally:
        await world.aclose()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_fault_at_any_call_loses_and_doubles_nothing(scenario: Scenario, folder: Path) -> None:
    empty = folder / "empty.db"
    with closing(Store.open(f"sqlite:///{empty}")):
        pass
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def try_one(fault: Fault) -> None:
        async with places:
            file = folder / f"{fault.kind.name}-{fault.at}.db"
            shutil.copy(empty, file)
            await run(scenario, file, fault)

    async def try_all() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        kinds = [kind for kind in Kind if kind not in CLOCKS or scenario in TIMED]
        dry = [Fault(kind, 0) for kind in kinds]
        for fault in dry:  # Which tells how many calls there are.
            await try_one(fault)
        async with asyncio.TaskGroup() as group:
            for fault in dry:
                for at in range(1, fault.num_calls + 1):
                    group.create_task(try_one(Fault(fault.kind, at)))

    asyncio.run(try_all())
