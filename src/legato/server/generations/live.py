"""A generation that runs in this process, as those see it who read it: frames that may be shown, and then an end.

It is told of frames by its driver, and by the writer how many of them are journaled. It runs nothing and does no I/O.
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
"""Returns the frames that tell an error behind others."""
REFUSED = End("refused")


class Live:
    """What readers follow. `known` is what the journal has already, and `failure` how an error is told."""

    def __init__(self, record: Record, run: Run, failure: Failure, clock: Clock, known: Iterable[Entry] = ()) -> None:
        self.record = record
        self.run = run
        self.entries = [*known]
        self.num_saved = self.num_shown = len(self.entries)
        """How many entries the journal has, and how many readers may have."""
        self.end: End | None = None
        """How it ended; nothing is added any more."""
        self.ended_at: float | None = None
        self.error: LegatoError | None = None
        """Why there is no answer."""
        self.is_over = False
        """Whether nothing follows here for readers."""
        self.is_lost = False
        """Whether it is over without an end."""
        self.task: asyncio.Task[None] | None = None
        """What drives it, from the time on when the journal has it."""
        self.num_readers = 0
        self.num_visits = 0
        """Of readers elsewhere, as far as they are known of."""
        self.seen_at = clock.steady()
        """When the last reader left."""
        self._failure = failure
        self._clock = clock
        self._changed = asyncio.Event()

    # By the driver

    def add(self, entry: Entry) -> None:
        """Add a frame, unless the end has come meanwhile."""
        if self.end is None and not self.is_over:
            self.entries.append(entry)

    def finish(self, end: End) -> None:
        """Come to an end, for the writer to write. The first one counts."""
        if self.end is None and not self.is_over:
            self.end = end
            self.ended_at = self._clock.steady()

    def fail(self, error: LegatoError) -> None:
        """Come to an end by an error: it is the answer's status while there is no frame, else its last frames."""
        if self.end is not None or self.is_over:
            return
        self.error = error
        for frame in self._failure(error) if self.entries else ():
            self.add(Entry(frame))
        self.finish(End("failed") if self.entries else REFUSED)

    def stop(self) -> None:
        """End what drives it, whatever comes of that."""
        if self.task is not None:
            self.task.cancel()

    # By the writer

    @property
    def has_news(self) -> bool:
        """Whether there is something that the journal does not have."""
        return self.num_saved < len(self.entries) or self.end is not None

    def news(self) -> News:
        """Return what the journal does not have."""
        return News(self.num_saved + 1, self.entries[self.num_saved :], self.end, self.taken())

    def taken(self) -> UsageRow:
        """Return what it has taken in all."""
        taken = self.run.taken()
        return UsageRow(
            self._clock.day(),
            self.record.key,
            self.run.model.name,
            requests=int(bool(self.run.usages)),
            prompt_tokens=taken.prompt_tokens,
            # Whoever read the prompt first has counted what it had of it in the cache.
            cached_tokens=0 if self.run.written else taken.cached_tokens,
            completion_tokens=taken.completion_tokens,
        )

    def save(self, news: News) -> None:
        """Note that the journal has this. Readers may have it now."""
        self.num_saved = max(self.num_saved, news.first - 1 + len(news.entries))
        self.num_shown = max(self.num_shown, self.num_saved)
        if news.end is not None:
            self.is_over = True
        self._notify()

    def show(self) -> None:
        """Let readers have everything, and the end, though the journal does not have it."""
        self.num_shown = len(self.entries)
        self.is_over = self.is_over or self.end is not None
        self._notify()

    def drop(self, error: LegatoError) -> None:
        """Fail without what nobody has seen, for which there is no room."""
        del self.entries[self.num_shown :]
        self.fail(error)
        self.stop()

    def lose(self) -> None:
        """Be over: it was deleted, or goes on elsewhere."""
        self.is_lost = not self.is_over
        self.is_over = True
        self.stop()
        self._notify()

    # By readers

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the frames behind the first `after` as they may be shown, each with its number.

        Raises:
            LegatoError: there is no answer, and never was a frame.
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
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
