"""What goes into the calls of one step: a token for everyone who writes, drafts, and some of the prompts.

It receives the Jobs that run and returns `Part`s. It decides by how many tokens wait, and changes nothing that a text
depends on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from legato.engines.llamacpp.cells import Feed
from legato.engines.llamacpp.drafts import Drafter
from legato.engines.llamacpp.healing import Branch
from legato.engines.llamacpp.running import BLOCK, RunningJob

__all__ = ["Part", "Turn"]

_MAX_ROWS = 63
"""Of an exact call for streams: without a choice of kernels, more would round in another way."""
_SHORT = 8
"""Tokens that a Job may have to be served in every step, like one that writes."""
_CALL_COST = 3
"""What a call costs whatever it holds, in rows: so much is saved by a draft that is right."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a call holds of one Job or branch."""

    item: RunningJob | Branch
    feed: Feed
    draft: Sequence[int]
    """The last ids of the feed, if they are only a guess."""


class Turn:
    """Whom one step serves, call by call. Everyone who waits for few tokens is served once."""

    def __init__(self, running: Sequence[RunningJob], max_feed: int) -> None:
        self._running = running
        self._max_feed = max_feed
        self._unserved: deque[RunningJob | Branch] = deque()
        for job in running:
            if job.num_waiting <= _SHORT:
                self._unserved.extend((job.healing and job.healing.branches) or [job])
        long = (job for job in running if job.num_waiting > _SHORT)
        self._reading = sorted(long, key=lambda job: job.num_chunks)
        """Those that have a part of their prompt read in this step if there is room."""

    def exact_call(self) -> list[Part]:
        """Take those that wait for few tokens and were not served in this step, and then parts of prompts."""
        chosen: list[tuple[RunningJob | Branch, int]] = []
        num_rows = 0
        while self._unserved and (not chosen or num_rows + self._unserved[0].num_waiting <= _MAX_ROWS):
            item = self._unserved.popleft()
            if item.num_waiting:
                chosen.append((item, min(item.num_waiting, _MAX_ROWS)))
                num_rows += chosen[-1][1]
        drafts = _drafts([item for item, _ in chosen if isinstance(item, RunningJob)], _MAX_ROWS - num_rows)
        room = BLOCK if chosen else self._max_feed
        while self._reading and not self._unserved:
            job = self._reading.pop(0)
            num = min(job.num_waiting, room)
            if num > 0:
                job.num_chunks += 1
                chosen.append((job, num))
                room -= num
        return [_part(item, num, drafts.get(id(item), ())) for item, num in chosen]

    def chunk_call(self) -> list[Part]:
        """Take a chunk of one prompt, for the fast kernel: of those that are being read, the one that had the fewest so
        far.
        """
        reading = [job for job in self._running if job.is_reading]
        if not reading:
            return []
        job = min(reading, key=lambda job: job.num_chunks)
        job.num_chunks += 1
        num = job.read_end - job.num_fed
        if num >= 2 * BLOCK:
            num = min(num - BLOCK, self._max_feed if len(reading) == len(self._running) else BLOCK)
        return [_part(job, num, ())]

    def put_back(self, parts: Sequence[Part]) -> None:
        """Serve these first in the next call: they were not fed."""
        self._unserved.extendleft(part.item for part in reversed(parts))


def _part(item: RunningJob | Branch, num: int, draft: Sequence[int]) -> Part:
    if isinstance(item, Branch):
        return Part(item, Feed(item.slot, item.ids[item.num_shared :], num), ())
    assert item.slot is not None
    end = item.num_fed + num
    num_rows = max(0, min(num, end - item.first_row)) + len(draft)
    return Part(item, Feed(item.slot, [*item.tokens[item.num_fed : end], *draft], num_rows), draft)


def _drafts(jobs: Sequence[RunningJob], room: int) -> dict[int, list[int]]:
    """Return drafts, by `id` of the Job that writes, the likeliest tokens first, as far as each is worth its row."""
    least = len(jobs) / (len(jobs) + _CALL_COST)
    likeliest: list[tuple[float, int, RunningJob, int]] = []
    for index, job in enumerate(jobs):
        if not job.is_read or job.healing is not None or job.pending > _SHORT:
            continue
        if job.drafter is None:
            job.drafter = Drafter(job.job.reference, job.tokens)
        job.guess = job.drafter.propose(max(1, min(job.room, room)))
        chance = 1.0
        for token in job.guess:
            chance *= job.drafter.chance
            if chance < least or job.room < 1:
                break
            likeliest.append((-chance, index, job, token))
    drafts: dict[int, list[int]] = {}
    for _, _, job, token in sorted(likeliest, key=lambda entry: entry[:2])[: max(0, room)]:
        drafts.setdefault(id(job), []).append(token)
    return drafts
