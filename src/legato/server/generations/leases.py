"""Which generations are this process's: it keeps its own, ends those that nobody wants, and adopts those of the dead.

A process is alive as long as its beat changes, as another process sees it by its own clock. It drives and writes
nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from legato.config import StoreSettings
from legato.errors import CapacityError, LegatoError, ModelNotFound, StoreUnavailable
from legato.run.run import Run
from legato.server.generations.live import Live
from legato.server.generations.pace import Pace
from legato.server.generations.replay import Replay
from legato.server.outage import Outage
from legato.storage.journal import Journal
from legato.storage.records import End, Entry, Lease, News, Record
from legato.system.clock import Clock

__all__ = ["Adoption", "Leases"]

_log = logging.getLogger("legato.server")


class Leases:
    """Keeps the generations in `lives`, as long as somebody wants them. `note` is called for those that it ends."""

    def __init__(
        self,
        journal: Journal,
        lives: dict[str, Live],
        note: Callable[[Live], None],
        settings: StoreSettings,
        pace: Pace,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._lives = lives
        self._note = note
        self._window_s = settings.resume_window_s
        self._pace = pace
        self._clock = clock
        self._outage = Outage("resumable answers cannot be held")

    async def run(self) -> None:
        """Keep them, for good."""
        while True:
            try:
                await self.renew()
                self._outage.end()
            except StoreUnavailable as error:
                self._outage.begin(error)
            await asyncio.sleep(self._pace.beat_s)

    async def renew(self) -> None:
        """Let it be heard that they are alive; end those that no client has visited for long.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        held = {id: live for id, live in self._lives.items() if self._is_held(live)}
        if not held:
            return
        visits = await self._journal.writes.run(self._journal.renew, [*held])
        for id, live in held.items():
            if self._lives.get(id) is not live or live.end is not None:
                continue  # The writer has come to its end, or is about to.
            if id not in visits:
                del self._lives[id]
                live.lose()
            elif self._is_unwanted(live, visits[id]):
                live.finish(End("cancelled"))
                live.stop()
                self._note(live)

    def _is_held(self, live: Live) -> bool:
        """Whether a generation is kept from others. While its end cannot be written, it is not for ever."""
        is_late = live.ended_at is not None and self._clock.steady() - live.ended_at > self._pace.keep_s
        return live.task is not None and not is_late

    def _is_unwanted(self, live: Live, num_visits: int) -> bool:
        now = self._clock.steady()
        if live.num_readers or num_visits != live.num_visits:
            live.num_visits, live.seen_at = num_visits, now
        return now - live.seen_at > self._window_s


@dataclass(slots=True)
class _Sighting:
    """A generation that is not this process's, as it was when something was last heard of it."""

    lease: Lease
    at: float
    error: LegatoError | None = None
    """Why it cannot go on here."""


class Adoption:
    """Listens for generations that nobody keeps any more, and lets them go on: `resume` is given what is to be driven.

    What cannot go on here may be another server's. If none takes it for as long as an answer waits for its client, it
    has failed.
    """

    def __init__(
        self,
        journal: Journal,
        lives: dict[str, Live],
        replay: Replay,
        resume: Callable[[Record, Run, Sequence[Entry]], None],
        settings: StoreSettings,
        pace: Pace,
        clock: Clock,
    ) -> None:
        self._journal = journal
        self._lives = lives
        self._replay = replay
        self._resume = resume
        self._wait_s = min(settings.resume_window_s, settings.retention_s)
        self._pace = pace
        self._clock = clock
        self._sightings: dict[str, _Sighting] = {}
        self._doomed: dict[str, LegatoError] = {}
        """What is being ended here, and why."""
        self._swept_at: float | None = None
        self._outage = Outage("resumable answers of other servers cannot be taken over")

    async def run(self) -> None:
        """Listen, for good."""
        while True:
            try:
                await self.listen()
                await self._sweep()
                self._outage.end()
            except StoreUnavailable as error:
                self._outage.begin(error)
            await asyncio.sleep(self._pace.beat_s)

    async def listen(self) -> None:
        """Hear who is alive, and adopt what has nobody.

        Raises:
            StoreUnavailable: it cannot be read.
        """
        leases = await self._journal.reads.run(self._journal.leases)
        now = self._clock.steady()
        before, self._sightings = self._sightings, {}
        for lease in leases:
            if lease.id not in self._lives:
                known = before.get(lease.id)
                self._sightings[lease.id] = known if known and known.lease == lease else _Sighting(lease, now)
        self._doomed = {id: error for id, error in self._doomed.items() if id in self._sightings}
        for sighting in [*self._sightings.values()]:
            if self._is_orphan(sighting.lease, now - sighting.at):
                await self._take(sighting, now)

    def _is_orphan(self, lease: Lease, silent_s: float) -> bool:
        """Whether nobody keeps a generation. What is ours without being among our own was left, or its adoption was
        not acknowledged.
        """
        return not lease.beat or lease.owner == self._journal.owner or silent_s > self._pace.lease_s

    async def _take(self, sighting: _Sighting, now: float) -> None:
        """Let an orphan go on here, or end it, if either can be."""
        id = sighting.lease.id
        if sighting.error is not None and now - sighting.at > self._wait_s:
            self._doomed.setdefault(id, sighting.error)
        if sighting.error is not None and id not in self._doomed:
            return
        record = await self._journal.reads.run(self._journal.find, id, sighting.lease.key)
        if record is None:
            return
        run = None if id in self._doomed else await self._plan_orphan(record, sighting)
        if run is None and id not in self._doomed:
            return
        entries = await self._journal.writes.run(self._journal.adopt, sighting.lease)
        if entries is None:
            return
        if run is None:
            await self._end(record, entries, self._doomed[id])
            return
        written = tuple(token for entry in entries for token in entry.tokens)
        _log.info("generation %s goes on behind %d tokens", id, len(written))
        self._resume(record, replace(run, written=written), entries)

    async def _plan_orphan(self, record: Record, sighting: _Sighting) -> Run | None:
        """Return the run of an orphan. Note if there cannot be one here, or nowhere."""
        try:
            return await self._replay.run(record)
        except CapacityError:
            pass  # There is too much to do just now.
        except ModelNotFound as error:
            sighting.error = error
        except Exception as error:  # noqa: BLE001 - what was right once may be wrong for another version or model
            _log.exception("generation %s cannot go on", record.id)
            bug = LegatoError("something went wrong in the server; its log has the reason")
            self._doomed[record.id] = error if isinstance(error, LegatoError) else bug
        return None

    async def _end(self, record: Record, entries: Sequence[Entry], error: LegatoError) -> None:
        """Tell the readers of a generation that it has failed."""
        _log.warning("generation %s has failed: %s", record.id, error.message)
        frames = [Entry(frame) for frame in self._replay.failure(record, error)]
        news = News(len(entries) + 1, frames, End("failed"))
        await self._journal.writes.run(self._journal.append, {record.id: news})

    async def _sweep(self) -> None:
        """Remove what is old, now and then."""
        now = self._clock.steady()
        if self._swept_at is None or now - self._swept_at > self._pace.sweep_s:
            while not await self._journal.writes.run(self._journal.sweep):
                pass  # Others get their turn meanwhile.
            self._swept_at = now
