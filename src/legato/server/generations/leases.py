"""Leases: a process renews those of its generations, ends abandoned ones, and adopts those of dead processes.

A process is alive as long as its beat changes, as another process sees it by its own clock. It drives and writes
no generation itself.
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
    """Renews the leases of `lives`, and ends generations without a client. `note` is called for those that it ends."""

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
        """Renew leases every `beat_s`, until cancelled."""
        while True:
            try:
                await self.renew()
                self._outage.end()
            except StoreUnavailable as error:
                self._outage.begin(error)
            await asyncio.sleep(self._pace.beat_s)

    async def renew(self) -> None:
        """Renew the leases, and end generations that had no client for `store.resume_window_s`.

        Raises:
            StoreUnavailable: the leases cannot be written.
        """
        held = {id: live for id, live in self._lives.items() if self._is_held(live)}
        if not held:
            return
        visits = await self._journal.writes.run(self._journal.renew, [*held])
        for id, live in held.items():
            if self._lives.get(id) is not live or live.end is not None:
                continue  # It has ended; the writer journals that.
            if id not in visits:
                del self._lives[id]
                live.lose()
            elif self._is_unwanted(live, visits[id]):
                live.finish(End("cancelled"))
                live.stop()
                self._note(live)

    def _is_held(self, live: Live) -> bool:
        """Whether to renew a lease. One whose end cannot be written is released after `keep_s`."""
        is_late = live.ended_at is not None and self._clock.steady() - live.ended_at > self._pace.keep_s
        return live.task is not None and not is_late

    def _is_unwanted(self, live: Live, num_visits: int) -> bool:
        now = self._clock.steady()
        if live.num_readers or num_visits != live.num_visits:
            live.num_visits, live.seen_at = num_visits, now
        return now - live.seen_at > self._window_s


@dataclass(slots=True)
class _Sighting:
    """Another process's lease, and when this process first saw it as it is."""

    lease: Lease
    at: float
    error: LegatoError | None = None
    """Why this server cannot continue it."""


class Adoption:
    """Finds generations whose process no longer renews their lease, adopts them, and calls `resume` to drive them.

    Another server may continue what this one cannot. If none adopts a generation within `store.resume_window_s`, it
    fails.
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
        """Generations that this process is about to fail, with the reason."""
        self._swept_at: float | None = None
        self._outage = Outage("resumable answers of other servers cannot be taken over")

    async def run(self) -> None:
        """Look for orphans every `beat_s`, until cancelled."""
        while True:
            try:
                await self.listen()
                await self._sweep()
                self._outage.end()
            except StoreUnavailable as error:
                self._outage.begin(error)
            await asyncio.sleep(self._pace.beat_s)

    async def listen(self) -> None:
        """Read all leases, and adopt orphans.

        Raises:
            StoreUnavailable: the leases cannot be read.
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
        """Whether no process runs a generation. A lease of this process for a generation that is not in `lives` was
        released, or its adoption was not acknowledged.
        """
        return not lease.beat or lease.owner == self._journal.owner or silent_s > self._pace.lease_s

    async def _take(self, sighting: _Sighting, now: float) -> None:
        """Adopt an orphan and continue it, or fail it; leave it if neither is possible now."""
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
        """Return the run of an orphan; None, with the reason noted, if it cannot run here now, or on any server."""
        try:
            return await self._replay.run(record)
        except CapacityError:
            pass  # This server is too busy: it is tried again.
        except ModelNotFound as error:
            sighting.error = error
        except Exception as error:  # noqa: BLE001 - a valid request may be invalid for another version or model
            _log.exception("generation %s cannot go on", record.id)
            bug = LegatoError("something went wrong in the server; its log has the reason")
            self._doomed[record.id] = error if isinstance(error, LegatoError) else bug
        return None

    async def _end(self, record: Record, entries: Sequence[Entry], error: LegatoError) -> None:
        """Journal the failure of a generation, for its readers."""
        _log.warning("generation %s has failed: %s", record.id, error.message)
        frames = [Entry(frame) for frame in self._replay.failure(record, error)]
        news = News(len(entries) + 1, frames, End("failed"))
        await self._journal.writes.run(self._journal.append, {record.id: news})

    async def _sweep(self) -> None:
        """Remove old journals, every `sweep_s`."""
        now = self._clock.steady()
        if self._swept_at is None or now - self._swept_at > self._pace.sweep_s:
            while not await self._journal.writes.run(self._journal.sweep):
                pass  # Each call is short, so other writers get their turn.
            self._swept_at = now
