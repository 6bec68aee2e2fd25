"""Journals the news of all generations in one transaction, and then shows them to readers.

Only the writer writes entries and ends. If the journal cannot be written, readers get the news without it, and the
write is repeated until it succeeds: writing the same news twice changes nothing. It drives nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from legato.errors import JournalFull, LegatoError, StoreUnavailable
from legato.server.generations.live import Live
from legato.server.generations.pace import Pace
from legato.server.outage import Outage
from legato.storage.journal import Journal
from legato.storage.records import News, Verdict
from legato.system.clock import Clock

__all__ = ["Writer"]

_log = logging.getLogger("legato.server")

_FIRST_PAUSE_S = 0.05


class Writer:
    """Writes for the generations in `lives`, and removes those that are over."""

    def __init__(self, journal: Journal, lives: dict[str, Live], pace: Pace, clock: Clock) -> None:
        self._journal = journal
        self._lives = lives
        self._pace = pace
        self._clock = clock
        self._has_news = asyncio.Event()
        self._writing = asyncio.Lock()
        self._outage = Outage("resumable answers go on without a journal")
        self.is_away = False
        """Whether the last write failed or was slow."""

    def note(self, live: Live) -> None:
        """Note that a generation has news."""
        if self.is_away:
            live.show()
        self._has_news.set()

    async def run(self) -> None:
        """Write news as they come, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if await self.flush():
                pause_s = _FIRST_PAUSE_S
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pace.retry_s)
            self._has_news.set()

    def fail(self, error: Exception) -> None:
        """Let readers go on without the journal: the writer's task has failed."""
        self._go_away()
        self._has_news.set()

    async def flush(self) -> bool:
        """Write all news now, and return whether that succeeded."""
        async with self._writing:
            lives = [live for live in self._lives.values() if live.has_news]
            try:
                await self._write(lives)
            except StoreUnavailable as error:
                self._outage.begin(error)
                self._go_away()
                return False
            self._outage.end()
            self.is_away = False
            return True

    async def _write(self, lives: Sequence[Live]) -> None:
        """Write the news of some generations; if that fails by a fault of ours, one by one, to find the faulty one."""
        news = {live.record.id: live.news() for live in lives}
        # Readers do not wait longer than this for the journal.
        timer = asyncio.get_running_loop().call_later(self._pace.patience_s, self._go_away)
        try:
            verdict = await self._journal.writes.run(self._journal.append, news) if news else Verdict()
        except StoreUnavailable:
            raise
        except Exception:  # noqa: BLE001 - logged in `_abandon`, with the generation's id
            if len(lives) > 1:
                for live in lives:
                    await self._write([live])
            else:
                self._abandon(*lives)
            return
        finally:
            timer.cancel()
        for live in lives:
            if self._lives.get(live.record.id) is live:
                self._settle(live, news[live.record.id], verdict)

    def _settle(self, live: Live, news: News, verdict: Verdict) -> None:
        """Apply the journal's verdict to a generation."""
        id = live.record.id
        if id in verdict.full:
            live.drop(
                JournalFull(
                    "there is no more room for resumable answers that run (`store.journal_bytes`); what was written "
                    "so far can be sent again, and goes on, without `resumable`",
                    retry_after_s=60,
                )
            )
            self._has_news.set()
        elif id in verdict.lost:
            del self._lives[id]
            live.lose()
        else:
            live.save(news)
            if news.end is not None:
                del self._lives[id]

    def _abandon(self, live: Live) -> None:
        """Fail a generation whose news cannot be written; if its end cannot be written either, drop it."""
        _log.exception("generation %s cannot be journaled", live.record.id)
        if live.end is None:
            live.drop(LegatoError("something went wrong in the server; its log has the reason"))
            self._has_news.set()
        elif self._lives.pop(live.record.id, None) is not None:
            live.lose()

    def _go_away(self) -> None:
        """Let readers go on without the journal."""
        self.is_away = True
        for live in self._lives.values():
            live.show()
