"""Resumable generations: they run apart from the requests that asked for them, and every frame is journaled before a
client gets it.

It receives `Run`s and keeps them running: without a client for a while, and after the death of the process, here or in
another one that shares the store. It knows dialects, but no fields.

After a death the answer is written anew from the journal's tokens: they are what an engine would write again, so the
same frames come out, and those that the journal has already are passed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from legato.config import StoreSettings
from legato.dialects.base import Dialect, Facts
from legato.errors import (
    EngineUnavailable,
    GenerationNotFound,
    GenerationRunning,
    InvalidField,
    LegatoError,
    ModelNotFound,
    StoreUnavailable,
    UnsupportedFeature,
)
from legato.journal import Entry, Journal, Record, Written, new_id
from legato.models import Models
from legato.pipeline import Event, Run, collect, plan, total_usage
from legato.server.ledger import Ledger
from legato.server.watch import Watch
from legato.store import Key, Store
from legato.types import Chat, CompletionRequest, Handle, Infill, Job, Mark, Source, Text, Usage

__all__ = ["Generations", "Live", "facts"]

_log = logging.getLogger("legato.server")

_TEND_S = 1.0
_SWEEP_S = 60.0
_POLL_S = 0.1
"""How often the journal of a generation that runs elsewhere is looked at."""


class Live:
    """A generation that runs in this process, or has just ended in it."""

    def __init__(self, record: Record, run: Run, known: Iterable[Entry] = ()) -> None:
        self.record = record
        self.run = run
        self.entries = [*known]
        self.num_saved = self.num_shown = len(self.entries)
        """How many entries the journal has, and how many clients may have."""
        self.num_tokens = len(run.written)
        """Of the run's tokens: how many are in entries."""
        self.is_over = False
        """Whether no entry follows those that are there."""
        self.answer: bytes | None = None
        self.error: LegatoError | None = None
        """Why there is no answer."""
        self.num_readers = 0
        self.seen_at = time.time()
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the frames behind the first `after` as they are journaled, each with its number.

        Raises:
            LegatoError: there is no answer.
        """
        self.num_readers += 1
        try:
            while True:
                changed = self._changed
                while after < self.num_shown:
                    after += 1
                    yield _numbered(after, self.entries[after - 1].frame)
                if self.is_over:
                    break
                await changed.wait()
            if self.error is not None and not self.entries:
                raise self.error
        finally:
            self.num_readers -= 1
            self.seen_at = time.time()

    async def whole(self) -> bytes:
        """Return the answer as one body.

        Raises:
            LegatoError: there is none.
        """
        async with aclosing(self.follow(0)) as frames:
            async for _ in frames:
                pass
        if self.answer is None:
            raise self.error or EngineUnavailable("the generation was cancelled, or another server goes on with it")
        return self.answer


class Generations:
    """The resumable generations of one server. `dialects` are those that they may come from, by path."""

    def __init__(
        self,
        store: Store,
        settings: StoreSettings,
        models: Models,
        dialects: Mapping[str, Dialect],
        ledger: Ledger,
        watch: Watch,
    ) -> None:
        self._journal = Journal(store, settings)
        self._settings = settings
        self._models = models
        self._dialects = dialects
        self._ledger = ledger
        self._watch = watch
        self._live: dict[str, Live] = {}
        self._dirty = asyncio.Event()
        self._saving = asyncio.Lock()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Keep generations running; what runs at the end is left to the next server."""
        keepers = [asyncio.create_task(self._save()), asyncio.create_task(self._tend())]
        try:
            yield
        finally:
            tasks = [*keepers, *(live.task for live in self._live.values() if live.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(StoreUnavailable):
                await asyncio.to_thread(self._journal.release)

    # What requests ask for

    async def start(
        self, key: Key, path: str, body: Mapping[str, Any], run: Run, before: Written | None = None
    ) -> Live:
        """Run a request apart from the client that made it.

        Raises:
            UnsupportedFeature: it has more than one choice, or scores its prompt.
            JournalFull, StoreUnavailable: it cannot be journaled.
        """
        if len(run.jobs) != 1 or run.jobs[0].score_prompt:
            raise UnsupportedFeature(
                "`resumable` takes one prompt and one choice, and no `echo` with `logprobs`", param="resumable"
            )
        handle = run.request.handle or Handle(new_id(), int(time.time()))
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
        await asyncio.to_thread(self._journal.create, record)
        return self._run(Live(record, run), key)

    async def find(self, id: str, key: Key) -> Record:
        """Return a generation of a key.

        Raises:
            GenerationNotFound: it has none of this id.
        """
        record = await asyncio.to_thread(self._journal.find, id, key.name)
        if record is None:
            raise GenerationNotFound(f"there is no generation `{id}`, or it is too old, or another key's")
        return record

    async def num_events(self, record: Record) -> int:
        """Return how many events there are."""
        return await asyncio.to_thread(self._journal.num_entries, record.id)

    async def follow(self, record: Record, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the frames behind the first `after`, wherever they are written; before them an empty one, at once."""
        yield b""
        touched_at = 0.0
        while True:
            live = self._live.get(record.id)
            if live is not None:
                async with aclosing(live.follow(after)) as frames:
                    async for frame in frames:
                        yield frame
                return
            entries = await asyncio.to_thread(self._journal.entries, record.id, after)
            for entry in entries:
                after += 1
                yield _numbered(after, entry.frame)
            if entries:
                continue
            found = await asyncio.to_thread(self._journal.find, record.id, record.key)
            if found is None or found.state != "running":
                if not await asyncio.to_thread(self._journal.entries, record.id, after):
                    return
                continue
            if time.monotonic() - touched_at > _TEND_S:
                touched_at = time.monotonic()
                await asyncio.to_thread(self._journal.touch, record.id)
            await asyncio.sleep(_POLL_S)

    async def go_on(self, record: Record, given: Mapping[str, Any], key: Key) -> Live:
        """Start a generation behind the end of one. `given` replaces fields of its request.

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
        body = {**record.body, **given}
        before = record.before + record.written
        request = self._request(record, body, before, key)
        model = self._models.only(key.models).resolve(request.model)
        run = await asyncio.to_thread(plan, request, model)
        return await self.start(key, record.path, body, run, before)

    async def delete(self, record: Record) -> None:
        """End a generation if it runs, and remove its journal."""
        await asyncio.to_thread(self._journal.delete, record.id, record.key)
        live = self._live.get(record.id)
        if live is not None and live.task is not None:
            live.task.cancel()

    # How they run

    def _request(self, record: Record, body: Mapping[str, Any], before: Written, key: Key) -> CompletionRequest:
        """Return the request of a record, or one like it, behind what was written, with the seed that it had."""
        request = self._dialects[record.path].parse(dict(body))
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=Job.from_json(record.job).sampling.seed)
        source = _behind(request.source, before)
        return replace(request, source=source, sampling=sampling, caller=key.name, control_tokens=key.control_tokens)

    def _run(self, live: Live, key: Key) -> Live:
        self._live[live.record.id] = live
        live.task = asyncio.create_task(self._drive(live, key))
        return live

    async def _drive(self, live: Live, key: Key) -> None:
        """Run a generation to its end."""
        record, run = live.record, live.run
        encoder = self._dialects[record.path].encoder(run.request)
        state = "cancelled"
        written = None
        try:
            events: list[Event] = []
            async with self._ledger.account(key, run):
                with self._watch.run(run, {}):
                    num = 0
                    opening = encoder.start()
                    async with aclosing(self._watch.events(run)) as news:
                        async for event in news:
                            events.append(event)
                            for frame in (*opening, *encoder.event(event)):
                                num += 1
                                self._add(live, num, frame)
                            await asyncio.sleep(0)
            (answer,) = await collect(_again(events))
            usage = total_usage([answer.usage], 1)
            for frame in encoder.end(usage, facts(run, usage)):
                num += 1
                self._add(live, num, frame)
            live.answer = encoder.whole((answer,), usage, facts(run, usage))
            prefix = run.jobs[0].prompt.prefix if run.request.output.echo else ""
            written = Written(answer.text.removeprefix(prefix), answer.reasoning)
            state = "done"
        except LegatoError as error:
            state = "failed"
            self._fail(live, error, encoder.failure(error))
        except Exception:  # noqa: BLE001 - logged here; nobody waits for this task
            _log.exception("generation %s failed", record.id)
            state = "failed"
            bug = LegatoError("something went wrong in the server; its log has the reason")
            self._fail(live, bug, encoder.failure(bug))
        finally:
            if state != "cancelled":
                await self._end(live, state, written)
                live.num_shown = len(live.entries)
            live.is_over = True
            live.notify()
            del self._live[record.id]

    def _add(self, live: Live, num: int, frame: bytes) -> None:
        """Take a frame, unless it is known from before a death."""
        if num > len(live.entries):
            tokens = live.run.tokens or []
            live.entries.append(Entry(frame, tuple(tokens[live.num_tokens :])))
            live.num_tokens = len(tokens)
            self._dirty.set()

    def _fail(self, live: Live, error: LegatoError, frames: Iterable[bytes]) -> None:
        """Tell an error as an answer's status while nothing has been told, else as its end."""
        live.error = error
        for frame in frames if live.entries else ():
            self._add(live, len(live.entries) + 1, frame)

    async def _end(self, live: Live, state: str, written: Written | None) -> None:
        """Save the rest, and the state. What was refused leaves nothing behind."""
        try:
            if live.error is not None and not live.entries:
                await asyncio.to_thread(self._journal.delete, live.record.id, live.record.key)
            elif await self._save_now([live]):
                await asyncio.to_thread(self._journal.finish, live.record.id, state, live.answer, written)
        except StoreUnavailable as error:
            _log.error("generation %s has ended, which cannot be journaled: %s", live.record.id, error.message)

    async def _save(self) -> None:
        """Journal what is new, of all generations at once, and then let clients have it."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await self._save_now([*self._live.values()])

    async def _save_now(self, lives: Iterable[Live]) -> bool:
        """Return whether it was journaled. If it cannot be, clients get it all the same, and it is tried again."""
        async with self._saving:
            return await self._append(lives)

    async def _append(self, lives: Iterable[Live]) -> bool:
        news = {
            live.record.id: (live, live.num_saved, live.entries[live.num_saved :])
            for live in lives
            if live.num_saved < len(live.entries)
        }
        if not news:
            return True
        try:
            lost = await asyncio.to_thread(
                self._journal.append, {id: (first + 1, entries) for id, (_, first, entries) in news.items()}
            )
        except StoreUnavailable as error:
            _log.error("resumable answers go on without a journal: %s", error.message)
            lost = set()
            has_saved = False
        else:
            has_saved = True
        for id, (live, first, entries) in news.items():
            if id in lost:
                if live.task is not None and live.task is not asyncio.current_task():
                    live.task.cancel()
                continue
            live.num_shown = max(live.num_shown, first + len(entries))
            if has_saved:
                live.num_saved = first + len(entries)
            live.notify()
        return has_saved and not lost

    async def _tend(self) -> None:
        """Renew leases, cancel what nobody wants any more, adopt what runs nowhere."""
        swept_at = 0.0
        while True:
            try:
                await self._renew()
                await self._adopt()
                if time.monotonic() - swept_at > _SWEEP_S:
                    swept_at = time.monotonic()
                    await asyncio.to_thread(self._journal.sweep)
            except StoreUnavailable as error:
                _log.error("resumable answers cannot be tended: %s", error.message)
            self._dirty.set()  # What could not be journaled is tried again.
            await asyncio.sleep(_TEND_S)

    async def _renew(self) -> None:
        if not self._live:
            return
        read = [id for id, live in self._live.items() if live.num_readers]
        seen = await asyncio.to_thread(self._journal.renew, read)
        for id, live in [*self._live.items()]:
            if live.num_readers or id not in seen or live.task is None or live.is_over:
                continue
            if time.time() - max(live.seen_at, seen[id]) > self._settings.resume_window_s:
                await asyncio.to_thread(self._journal.finish, id, "cancelled")
                live.task.cancel()

    async def _adopt(self) -> None:
        for record in await asyncio.to_thread(self._journal.orphans):
            if record.id in self._live or record.path not in self._dialects:
                continue
            key = Key(record.key)
            try:
                run = await asyncio.to_thread(self._planned_again, record, key)
            except ModelNotFound:
                continue  # Another server may have it.
            except Exception:  # noqa: BLE001 - what was right once may be wrong for another version or model
                _log.exception("generation %s cannot go on", record.id)
                if await asyncio.to_thread(self._journal.adopt, record.id):
                    await asyncio.to_thread(self._journal.finish, record.id, "failed")
                continue
            if not await asyncio.to_thread(self._journal.adopt, record.id):
                continue
            entries = await asyncio.to_thread(self._journal.entries, record.id, 0)
            written = tuple(token for entry in entries for token in entry.tokens)
            _log.info("generation %s goes on behind %d tokens", record.id, len(written))
            self._run(Live(record, replace(run, written=written), entries), key)

    def _planned_again(self, record: Record, key: Key) -> Run:
        """Return the run of a generation that has lost its process, with the very Job that it had."""
        request = self._request(record, record.body, record.before, key)
        run = plan(request, self._models.resolve(request.model))
        handle = Handle(record.id, record.created_at)
        return replace(run, request=replace(run.request, handle=handle), jobs=(Job.from_json(record.job),), tokens=[])


def _behind(source: Source, before: Written) -> Source:
    """Return what goes on behind what was written after a source."""
    if before == Written():
        return source
    match source:
        case Text((str() as prompt,)):
            return replace(source, prompts=(prompt + before.text,))
        case Text((tuple() as prompt,)):
            return replace(source, prompts=((*prompt, before.text),))
        case Infill():
            return replace(source, middle=source.middle + before.text)
        case Chat():
            mark = source.mark or Mark("")
            whole = Written(mark.prefix, mark.reasoning) + before
            return replace(source, mark=replace(mark, prefix=whole.text, reasoning=whole.reasoning))
    raise AssertionError("only one prompt is resumable")


def _numbered(num: int, frame: bytes) -> bytes:
    """Return a server-sent event with its number."""
    return b"id: %d\n%b" % (num, frame)


async def _again(events: Iterable[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


def facts(run: Run, usage: Usage) -> Facts:
    """Return the `legato` block, if it was asked for."""
    if not run.request.output.report:
        return {}
    report = run.report
    return {
        "seed": report.seed,
        "healed_bytes": list(report.healed_bytes),
        "cached_tokens": usage.cached_tokens,
        "drafted_tokens": usage.drafted_tokens,
        "ignored": list(report.ignored),
        "clipped": list(report.clipped),
        "truncated": dict(report.truncated),
        "absent": list(report.absent),
        "rounds": usage.num_rounds,
    }
