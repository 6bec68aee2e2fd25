"""Operations on resumable generations: start, find, follow, continue, delete.

It receives `Run`s and keeps them running: without a client for a while, and after the death of the process, here or in
another one that shares the store. It knows dialects, but no fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from legato.config import StoreSettings
from legato.dialects.base import Dialect
from legato.errors import (
    EngineUnavailable,
    GenerationNotFound,
    GenerationRunning,
    InvalidField,
    StoreUnavailable,
    UnsupportedFeature,
)
from legato.run.models import Models
from legato.run.run import Run
from legato.server.generations.driver import Driver
from legato.server.generations.leases import Adoption, Leases
from legato.server.generations.live import REFUSED, Live
from legato.server.generations.pace import Pace
from legato.server.generations.replay import Replay
from legato.server.generations.writer import Writer
from legato.server.ledger import Ledger
from legato.server.telemetry import Telemetry
from legato.storage.journal import Journal
from legato.storage.keys import Key
from legato.storage.records import End, Entry, Record, Written, new_id
from legato.storage.store import Store
from legato.system.clock import Clock
from legato.system.supervisor import Supervisor
from legato.types import Handle

__all__ = ["Generations"]


class Generations:
    """The resumable generations of one server. `dialects` are those that they may come from, by path."""

    def __init__(
        self,
        store: Store,
        settings: StoreSettings,
        models: Models,
        dialects: Mapping[str, Dialect],
        ledger: Ledger,
        telemetry: Telemetry,
        supervisor: Supervisor,
        *,
        clock: Clock = Clock(),  # noqa: B008 - it is frozen
        pace: Pace = Pace(),  # noqa: B008 - it is frozen
    ) -> None:
        self._journal = Journal(store, settings, clock)
        self._models = models
        self._dialects = dialects
        self._ledger = ledger
        self._telemetry = telemetry
        self._supervisor = supervisor
        self._clock = clock
        self._pace = pace
        self._lives: dict[str, Live] = {}
        """The generations of this process, until the journal has their ends."""
        self._replay = Replay(models, dialects)
        self._writer = Writer(self._journal, self._lives, pace, clock)
        self._leases = Leases(self._journal, self._lives, self._writer.note, settings, pace, clock)
        self._adoption = Adoption(self._journal, self._lives, self._replay, self._resume, settings, pace, clock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run generations while the context is open. Those that run at its end are released to the next server."""
        keepers = [
            self._supervisor.start("journal", self._writer.run, on_failure=self._writer.fail),
            self._supervisor.start("leases", self._leases.run),
            self._supervisor.start("adoption", self._adoption.run),
        ]
        try:
            yield
        finally:
            await _cancel(keepers)
            await _cancel([live.task for live in self._lives.values() if live.task is not None])
            with suppress(StoreUnavailable):
                if await self._writer.flush():
                    await self._journal.writes.run(self._journal.release)
            while self._lives:
                self._lives.popitem()[1].lose()

    # For requests

    async def start(
        self, key: Key, path: str, body: Mapping[str, Any], run: Run, before: Written | None = None
    ) -> Live:
        """Start a request that runs on without its client.

        Raises:
            UnsupportedFeature: it has more than one choice, or scores its prompt.
            JournalFull, StoreUnavailable: it cannot be journaled.
        """
        if len(run.jobs) != 1 or run.jobs[0].score_prompt:
            raise UnsupportedFeature(
                "`resumable` takes one prompt and one choice, and no `echo` with `logprobs`", param="resumable"
            )
        if self._writer.is_away:
            raise StoreUnavailable(reason="the journal could not be written")
        handle = run.request.handle or Handle(new_id(), int(self._clock.wall()))
        run = replace(run, request=replace(run.request, handle=handle), tokens=[])
        record = Record(
            id=handle.id,
            key=key.name,
            path=path,
            body=body,
            before=before or Written(),
            job=run.jobs[0].to_json(),
            created_at=handle.created,
        )
        live = self._live(record, run)
        try:
            await self._journal.writes.run(self._journal.create, record)
        except BaseException:
            # The record may have been written without an acknowledgement, so the writer removes it.
            live.finish(REFUSED)
            self._writer.note(live)
            raise
        return self._drive(live, key)

    async def find(self, id: str, key: Key) -> Record:
        """Return a generation of a key.

        Raises:
            GenerationNotFound: it has none of this id.
        """
        record = await self._journal.reads.run(self._journal.find, id, key.name)
        if record is None:
            raise GenerationNotFound(f"there is no generation `{id}`, or it is too old, or another key's")
        return record

    async def follow(self, record: Record, after: int, live: Live | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the frames after number `after`, each with its number, whichever server writes them.

        Raises:
            LegatoError: there is no answer, or the journal cannot be read.
        """
        visited_at: float | None = None
        read_at = self._clock.steady()
        while True:
            live = live or self._lives.get(record.id)
            if live is not None:
                async with aclosing(live.follow(after)) as frames:
                    async for num, frame in frames:
                        after = num
                        yield _numbered(num, frame)
                if not live.is_lost:
                    return
                live = None
            now = self._clock.steady()
            try:
                state, entries = await self._journal.reads.run(self._journal.read, record.id, after)
                read_at = now
                if state == "running" and (visited_at is None or now - visited_at > self._pace.beat_s):
                    visited_at = now
                    await self._journal.writes.run(self._journal.visit, record.id)
            except StoreUnavailable:
                if now - read_at > self._pace.lease_s:
                    raise
                await asyncio.sleep(self._pace.poll_s)
                continue
            for entry in entries:
                after += 1
                yield _numbered(after, entry.frame)
            if state != "running":
                return
            if not entries:
                await asyncio.sleep(self._pace.poll_s)

    async def whole(self, live: Live) -> bytes:
        """Return the answer of a generation that this process started, as one body.

        Raises:
            LegatoError: it ended without an answer.
        """
        async with aclosing(self.follow(live.record, 0, live)) as frames:
            async for _ in frames:
                pass
        ended: End | Record | None = live.end
        if live.is_lost:
            ended = await self._journal.reads.run(self._journal.find, live.record.id, live.record.key)
        if ended is None or ended.answer is None:
            raise live.error or EngineUnavailable("the generation was ended before its answer was done")
        return ended.answer

    async def go_on(self, record: Record, given: Mapping[str, Any], key: Key) -> Live:
        """Start a generation that continues a finished one. `given` replaces fields of its request.

        Raises:
            GenerationRunning: it has not ended yet.
            InvalidField: a field cannot be replaced.
        """
        if record.written is None:
            raise GenerationRunning(
                f"the generation `{record.id}` is {record.state}, and only one that is done goes on"
            )
        for name in ("model", "prompt", "messages", "suffix", "resumable"):
            if name in given:
                raise InvalidField(f"`{name}` is that of the generation, and cannot be given here", param=name)
        before = record.before + record.written
        run = await self._replay.plan(record, given, before, key, self._models.only(key.models))
        return await self.start(key, record.path, {**record.body, **given}, run, before)

    async def delete(self, record: Record) -> None:
        """End a generation if it runs, and remove its journal.

        Raises:
            StoreUnavailable: the journal may not have been removed; the generation has ended in any case.
        """
        live = self._lives.get(record.id)
        if live is not None:
            live.finish(End("cancelled"))
            live.stop()
            self._writer.note(live)
        taken = None if live is None else live.taken()
        await self._journal.writes.run(self._journal.delete, record.id, record.key, taken)
        if live is not None and self._lives.get(record.id) is live:
            del self._lives[record.id]
            live.show()  # Its usage is counted: readers may see the end.

    # How they run

    def _live(self, record: Record, run: Run, known: Sequence[Entry] = ()) -> Live:
        """Register a generation. This comes before its record is journaled: an unregistered one would be adopted."""
        live = Live(record, run, partial(self._replay.failure, record), self._clock, known)
        self._lives[record.id] = live
        return live

    def _resume(self, record: Record, run: Run, known: Sequence[Entry]) -> None:
        self._drive(self._live(record, run, known), Key(record.key))

    def _drive(self, live: Live, key: Key) -> Live:
        encoder = self._dialects[live.record.path].encoder(live.run.request)
        driver = Driver(live, encoder, key, self._ledger, self._telemetry, self._writer.note)
        live.task = self._supervisor.once(f"generation {live.record.id}", self._drive_and_release(live, driver))
        return live

    async def _drive_and_release(self, live: Live, driver: Driver) -> None:
        try:
            await driver.drive()
        finally:
            if live.end is None and self._lives.get(live.record.id) is live:
                # It was interrupted without a request to end it: the server that adopts it continues.
                del self._lives[live.record.id]
                live.lose()


async def _cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _numbered(num: int, frame: bytes) -> bytes:
    """Return a server-sent event with its number as `id`."""
    return b"id: %d\n%b" % (num, frame)
