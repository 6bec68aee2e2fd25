"""Servers of resumable answers, each as a process of its own sees its store, and clients that do not give up."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from legato.config import StoreSettings
from legato.dialects import openai
from legato.engines.scripted import Pause, Script, ScriptedEngine
from legato.errors import CapacityError, GenerationNotFound, LegatoError
from legato.run.admission import Admission
from legato.run.models import Model, Models
from legato.run.plan import plan
from legato.server.generations import Generations
from legato.server.generations.live import Live
from legato.server.generations.pace import Pace
from legato.server.ledger import Ledger
from legato.server.telemetry import Telemetry
from legato.storage.keys import ANYONE
from legato.system.clock import Clock
from legato.system.supervisor import Supervisor
from legato.types import Job
from tests.faults.doubles import DEATHS, Fault, FaultyStore

__all__ = ["LONG", "PACE", "TEXT", "Reading", "World", "script"]

PACE = Pace(lease_s=0.4, beat_s=0.15, sweep_s=0.2, poll_s=0.1, patience_s=0.2, retry_s=0.1, keep_s=0.3)
DYING = replace(PACE, patience_s=60)
"""Who is dead shows nothing, however long it takes until that is noticed."""
PATH = "/v1/completions"
TEXT = "one zwö 三"
LONG = f"{TEXT} " * 10

_Result = TypeVar("_Result")


def script(job: Job) -> Script:
    """The text, word by word, from where it was interrupted; `quick` gives it at once, `late` begins late."""
    is_long = "long" in job.prompt.prefix
    rest = (LONG if is_long else TEXT).encode()[job.num_resumed :]
    if "quick" in job.prompt.prefix:
        return [rest]
    pause = [Pause(0.05 if is_long else 0.02)]
    parts = [part for word in re.findall(rb"\S+\s*|\s+", rest) for part in (word, *pause)]
    return [*pause * 3, *parts] if "late" in job.prompt.prefix else parts


class Process:
    """A server, until it dies."""

    def __init__(
        self, file: Path, fault: Fault | None, settings: StoreSettings, clock: Clock, models: tuple[str, ...]
    ) -> None:
        self.store = FaultyStore.at(file)
        self.store.fault = fault
        self.is_reaped = False
        self.engine = ScriptedEngine(script)
        self.models = Models({name: Model(name, self.engine, Admission()) for name in models}, {})
        self.supervisor = Supervisor()
        telemetry = Telemetry(self.models, self.store, self.supervisor, traces_url="")
        dialects = {PATH: openai.CompletionsDialect()}
        self.generations = Generations(
            self.store,
            settings,
            self.models,
            dialects,
            Ledger(self.store, self.supervisor),
            telemetry,
            self.supervisor,
            clock=clock,
            pace=DYING if fault is not None and fault.kind in DEATHS else PACE,
        )

    async def die(self) -> None:
        """End as a process that is killed: nothing is put in order."""
        self.store.is_dead = self.is_reaped = True
        for task in self.supervisor._tasks:
            task.cancel()
        self.store.released.set()
        await self.supervisor.aclose()
        while self.generations._lives:  # Whose readers' connections end.
            self.generations._lives.popitem()[1].lose()


@dataclass
class Reading:
    """What a client has seen of one answer."""

    id: str = ""
    frames: list[bytes] = field(default_factory=list)
    num_errors: int = 0
    """How often it had to come back."""

    def take(self, frame: bytes) -> None:
        """See a frame: it is the next one."""
        head, _, data = frame.partition(b"\n")
        assert head == b"id: %d" % (len(self.frames) + 1), (head, len(self.frames))
        self.frames.append(data)

    @property
    def text(self) -> str:
        """The text so far."""
        parts = [json.loads(frame[6:]) for frame in self.frames if frame.startswith(b"data: {")]
        return "".join(part["choices"][0]["text"] for part in parts if part.get("choices"))

    @property
    def is_whole(self) -> bool:
        """Whether the stream has come to its end."""
        return bool(self.frames) and self.frames[-1].startswith(b"data: [DONE]")


class World:
    """A database file, and the servers and clients that use it."""

    def __init__(self, file: Path, fault: Fault | None = None, clock: Clock = Clock()) -> None:  # noqa: B008 - frozen
        self.file = file
        self.fault = fault
        self.settings = StoreSettings()
        self._clock = clock
        self._kept: dict[Process, AsyncExitStack] = {}
        self._processes: list[Process] = []
        self._is_reaping = False
        self._looking = sqlite3.connect(file, isolation_level=None)

    @property
    def process(self) -> Process:
        """The newest server."""
        return self._processes[-1]

    @property
    def generations(self) -> Generations:
        """What it has of generations."""
        return self.process.generations

    @property
    def first(self) -> Process:
        """The oldest server that has the model and has not died, or one that has."""
        able = [process for process in self._processes if "m" in process.models.served]
        return next((process for process in able if not process.store.is_dead), able[-1])

    async def reap(self) -> None:
        """Start another server in the place of each that a fault kills."""
        while True:
            await asyncio.sleep(0.005)
            for process in [*self._processes]:
                if process.store.is_dead and not process.is_reaped:
                    self._is_reaping = True
                    await process.die()
                    await self.serve(*process.models.served)
                    self._is_reaping = False

    async def serve(self, *models: str) -> Process:
        """Start a server."""
        process = await asyncio.to_thread(Process, self.file, self.fault, self.settings, self._clock, models or ("m",))
        self._processes.append(process)
        self._kept[process] = stack = AsyncExitStack()
        await stack.enter_async_context(process.generations.running())
        return process

    async def stop(self, process: Process) -> None:
        """Stop a server in good order."""
        await self._kept[process].aclose()
        await process.die()

    async def aclose(self) -> None:
        """Stop everything."""
        for process, stack in self._kept.items():
            process.store.released.set()
            await stack.aclose()
            await process.supervisor.aclose()
            await asyncio.to_thread(process.store.close)
        self._looking.close()

    # Clients

    async def begin(self, **fields: Any) -> Live:
        """Ask the oldest server for an answer, again if that is refused for now."""
        body = {"model": "m", "prompt": "go", "max_tokens": 500, "stream": True, "resumable": True, **fields}

        async def ask() -> Live:
            process = self.first
            run = plan(openai.CompletionsDialect().parse(dict(body)), process.models.resolve("m"))
            return await process.generations.start(ANYONE, PATH, body, run)

        return await again(ask)

    async def read(self, reading: Reading, most: int | None = None) -> Reading:
        """Read an answer from the newest server, to its end, or so many frames more; come back whenever something goes
        wrong. One that is deleted, or ended without words, ends here too.
        """
        stop = None if most is None else len(reading.frames) + most
        while not reading.is_whole and (stop is None or len(reading.frames) < stop):
            try:
                record = await self.generations.find(reading.id, ANYONE)
                async with aclosing(self.generations.follow(record, len(reading.frames))) as frames:
                    async for frame in frames:
                        reading.take(frame)
                        if stop is not None and len(reading.frames) >= stop:
                            break
                if record.state != "running":
                    break
            except CapacityError:
                reading.num_errors += 1
            except GenerationNotFound:
                break
            await asyncio.sleep(0.03)
        return reading

    async def ask(self, **fields: Any) -> Reading:
        """Ask for an answer and read it to its end; if its server dies before the first frame, ask again."""
        while True:
            live = await self.begin(**fields)
            reading = Reading(live.record.id)
            try:
                async with aclosing(self.first.generations.follow(live.record, 0, live)) as frames:
                    async for frame in frames:
                        reading.take(frame)
            except CapacityError:
                pass
            if reading.frames:
                return await self.read(reading)

    async def whole(self, **fields: Any) -> tuple[str, bytes]:
        """Ask for an answer that is not streamed, again if that does not succeed."""
        while True:
            live = await self.begin(stream=False, **fields)
            try:
                return live.record.id, await self.first.generations.whole(live)
            except LegatoError:
                await asyncio.sleep(0.02)

    async def go_on(self, id: str, **given: Any) -> Live:
        """Let an answer go on behind its end."""

        async def ask() -> Live:
            record = await self.generations.find(id, ANYONE)
            return await self.generations.go_on(record, given, ANYONE)

        return await again(ask)

    async def delete(self, id: str) -> None:
        """Delete an answer, which may be gone then already."""

        async def ask() -> None:
            await self.generations.delete(await self.generations.find(id, ANYONE))

        with suppress(GenerationNotFound):
            await again(ask)

    async def next(self) -> None:
        """See that a server answers as ever."""
        if "m" not in self.process.models.served:
            await self.serve()
        reading = await self.ask()
        await self.settle()
        self.check_kept(reading)

    # What is so in the end

    async def settle(self) -> None:
        """Wait until nothing runs, and nothing is left to be written."""
        while not self._is_settled():  # noqa: ASYNC110 - a row of a table tells nobody
            await asyncio.sleep(0.02)

    def _is_settled(self) -> bool:
        if self._is_reaping or any(process.store.is_dead and not process.is_reaped for process in self._processes):
            return False
        alive = (process for process in self._processes if not process.store.is_dead)
        if any(process.generations._lives for process in alive):
            return False
        return not self.look("SELECT id FROM generations WHERE state = 'running'")

    def look(self, asked: str, **values: Any) -> list[Any]:
        """Ask the database."""
        return self._looking.execute(asked, values).fetchall()

    def check_kept(self, reading: Reading, text: str = TEXT) -> None:
        """Check that an answer is whole, for its reader and in the store."""
        assert reading.text == text
        assert reading.is_whole
        rows = self.look("SELECT num, frame FROM entries WHERE generation = :id ORDER BY num", id=reading.id)
        assert rows == [*enumerate(reading.frames, 1)]
        ((state, num, answer),) = self.look(
            "SELECT state, num_entries, answer FROM generations JOIN texts ON id = generation WHERE id = :id",
            id=reading.id,
        )
        assert (state, num) == ("done", len(rows))
        assert json.loads(answer)["choices"][0]["text"] == text

    def usage(self) -> tuple[int, int]:
        """Return the requests and the tokens of answers that were counted."""
        (row,) = self.look("SELECT coalesce(sum(requests), 0), coalesce(sum(completion_tokens), 0) FROM usage")
        return int(row[0]), int(row[1])

    def kept(self) -> tuple[int, int]:
        """Return how many answers the journal has, and how many tokens are in them."""
        rows = self.look("SELECT tokens FROM entries")
        ((num,),) = self.look("SELECT count(*) FROM generations")
        return num, sum(len(json.loads(tokens)) for (tokens,) in rows)

    def check_room(self) -> None:
        """Check that all bytes are counted."""
        ((together, apart),) = self.look(
            "SELECT num_bytes, (SELECT coalesce(sum(num_bytes), 0) FROM generations) FROM room"
        )
        assert together == apart

    def check_engines(self) -> None:
        """Check that no engine works for nobody."""
        assert [process.engine.counters()["running"] for process in self._processes] == [0] * len(self._processes)


async def again(ask: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return what a call returns, made again as long as the server cannot take it."""
    while True:
        try:
            return await ask()
        except CapacityError:
            await asyncio.sleep(0.02)
