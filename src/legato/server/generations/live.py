"""A generation that runs in this process: its frames, how many of them readers may have, and its end.

The driver adds frames; the writer reports how many are journaled. A `Live` runs nothing and does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from legato.errors import LegatoError
from legato.run.run import Run
from legato.storage.records import End, Entry, News, Record
from legato.storage.usage import UsageRow
from legato.system.clock import Clock

__all__ = ["REFUSED", "Failure", "Live"]

Failure = Callable[[LegatoError], Iterable[bytes]]
"""Encodes an error as the last frames of a stream."""
REFUSED = End("refused")


class Live:
    """A running generation. `known` are the entries that the journal has; `failure` encodes an error as frames."""

    def __init__(self, record: Record, run: Run, failure: Failure, clock: Clock, known: Iterable[Entry] = ()) -> None:
        self.record = record
        self.run = run
        self.entries = [*known]
        self.num_saved = self.num_shown = len(self.entries)
        """How many entries the journal has, and how many readers may have."""
        self.end: End | None = None
        """How it ended. After that no entry is added."""
        self.ended_at: float | None = None
        self.error: LegatoError | None = None
        """Why it failed."""
        self.is_over = False
        """Whether readers get nothing more from this process."""
        self.is_lost = False
        """Whether it is over here without an end: deleted, or continued by another process."""
        self.task: asyncio.Task[None] | None = None
        """The task that drives it. None until the journal has the record."""
        self.num_readers = 0
        self.num_visits = 0
        """The last known number of visits by readers at other servers."""
        self.seen_at = clock.steady()
        """When the last reader left."""
        self._failure = failure
        self._clock = clock
        self._changed = asyncio.Event()

    # By the driver

    def add(self, entry: Entry) -> None:
        """Add an entry, unless the generation has ended."""
        if self.end is None and not self.is_over:
            self.entries.append(entry)

    def finish(self, end: End) -> None:
        """End, and let the writer journal it. Only the first end counts."""
        if self.end is None and not self.is_over:
            self.end = end
            self.ended_at = self._clock.steady()

    def fail(self, error: LegatoError) -> None:
        """End with an error: as the answer's status if there is no frame yet, else as its last frames."""
        if self.end is not None or self.is_over:
            return
        self.error = error
        for frame in self._failure(error) if self.entries else ():
            self.add(Entry(frame))
        self.finish(End("failed") if self.entries else REFUSED)

    def stop(self) -> None:
        """Cancel the task that drives it."""
        if self.task is not None:
            self.task.cancel()

    # By the writer

    @property
    def has_news(self) -> bool:
        """Whether the journal lacks an entry or the end."""
        return self.num_saved < len(self.entries) or self.end is not None

    def news(self) -> News:
        """Return the entries and the end that the journal lacks."""
        return News(self.num_saved + 1, self.entries[self.num_saved :], self.end, self.taken())

    def taken(self) -> UsageRow:
        """Return its whole usage so far."""
        taken = self.run.taken()
        return UsageRow(
            self._clock.day(),
            self.record.key,
            self.run.model.name,
            requests=int(bool(self.run.usages)),
            prompt_tokens=taken.prompt_tokens,
            # After an adoption, the first process has counted the prompt's cached tokens.
            cached_tokens=0 if self.run.written else taken.cached_tokens,
            completion_tokens=taken.completion_tokens,
        )

    def save(self, news: News) -> None:
        """Note that the journal has these entries, and show them to readers."""
        self.num_saved = max(self.num_saved, news.first - 1 + len(news.entries))
        self.num_shown = max(self.num_shown, self.num_saved)
        if news.end is not None:
            self.is_over = True
        self._notify()

    def show(self) -> None:
        """Show readers all entries and the end, whether or not the journal has them."""
        self.num_shown = len(self.entries)
        self.is_over = self.is_over or self.end is not None
        self._notify()

    def drop(self, error: LegatoError) -> None:
        """Fail, and discard the entries that no reader has seen."""
        del self.entries[self.num_shown :]
        self.fail(error)
        self.stop()

    def lose(self) -> None:
        """Be over here: it was deleted, or another process continues it."""
        self.is_lost = not self.is_over
        self.is_over = True
        self.stop()
        self._notify()

    # By readers

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the frames after number `after` as they may be shown, each with its number.

        Raises:
            LegatoError: it failed before its first frame.
        """
        self.num_readers += 1
        try:
            while True:
                changed = self._changed
                while after < self.num_shown:
                    after += 1
                    yield after, self.entries[after - 1].frame
                if self.is_over:
                    break
                await changed.wait()
            if self.error is not None and not self.entries:
                raise self.error
        finally:
            self.num_readers -= 1
            self.seen_at = self._clock.steady()

    def _notify(self) -> None:
        """Wake the readers."""
        self._changed.set()
        self._changed = asyncio.Event()
