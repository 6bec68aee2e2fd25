"""Writing the heal bytes of one Job again: the seam's two steps, replay and condition (`seam`), on rows of logits.

It receives rows as they become known and returns the path of tokens that covers the heal bytes. What it needs fed
before it can say so is in the Job's `tokens` (the path that is tried) or in `branches` (copies of its slot, on which
inner paths are scored); whoever forms batches looks there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from legato.decoding.sampling import Row
from legato.decoding.seam import ScoredInner, Seam, best_cover
from legato.engines.llamacpp.cache import RowCache
from legato.engines.llamacpp.cells import Cells, Slot
from legato.engines.llamacpp.running import RunningJob
from legato.types import Job

__all__ = ["Branch", "Healing"]

_MAX_BRANCHES = 6
"""Inner paths of one Job that are scored at once, the most promising ones; then it is seen whether others could win."""

Path = tuple[int, ...]
"""Tokens behind the kept ones."""


@dataclass(slots=True, eq=False)
class Branch:
    """A copy of a Job's slot, on which one inner path is scored."""

    owner: RunningJob
    slot: Slot
    ids: Path
    """The inner path."""
    num_shared: int
    """Ids at its beginning that came with the copy: their rows are known."""

    @property
    def num_waiting(self) -> int:
        """Tokens that wait for an exact call."""
        return len(self.ids) - self.num_shared if self.slot.is_open else 0


class Healing:
    """The heal bytes of one Job, until they are written."""

    def __init__(self, job: Job, seam: Seam, pieces: Sequence[bytes], cells: Cells, known: RowCache) -> None:
        self._prompt = job.prompt
        self._seam = seam
        self._pieces = pieces
        self._cells = cells
        self._known = known
        self.spelling: list[int] = seam.encode_after(job.prompt.ids, job.prompt.floor, job.prompt.heal)
        """The canonical tokens of the heal bytes: they are fed with the prompt, since they are usually the path."""
        self._rows: dict[Path, Row] = {}
        """Logits behind the kept tokens and a path."""
        self._path: Path = ()
        """What the model has chosen so far, in agreement with the heal bytes."""
        self._has_replayed = False
        """Whether the model has chosen another text, so that the prefix is not its own."""
        self.branches: list[Branch] = []

    # -- rows ---------------------------------------------------------------------------------------------------------

    def learn(self, path: Sequence[int], row: Row) -> None:
        """Take the row behind a path."""
        self._rows[tuple(path)] = row

    def row(self, running: RunningJob, path: Path) -> Row | None:
        """Return the row behind a path, if it is known."""
        row = self._rows.get(path)
        if row is None:
            job = running.job
            row = self._known.get([*self._prompt.ids, *path], job.cache_salt, is_exact=running.is_exact)
            if row is not None:
                self._rows[path] = row
        return row

    def learn_branch(self, branch: Branch, rows: NDArray[np.float32]) -> None:
        """Take the rows of a branch that has been fed, and give its slot back."""
        salt, is_exact = branch.slot.salt, branch.slot.is_exact
        for num, row in enumerate(rows, branch.num_shared + 1):
            path = branch.ids[:num]
            self._rows[path] = self._known.put([*self._prompt.ids, *path], row, salt, is_exact=is_exact)
        self.branches.remove(branch)
        self._cells.close(branch.slot)

    def close(self) -> None:
        """Give the branches' slots back; if healing goes on, they are made again."""
        for branch in self.branches:
            self._cells.close(branch.slot)
        self.branches = []

    # -- the two steps ------------------------------------------------------------------------------------------------

    def find_path(self, running: RunningJob) -> Path | None:
        """Return the path that is written; None: what is in `running.tokens`, or in the branches, has to be fed; or, if
        nothing is there, no slot was free for a branch, and it has to be asked again.
        """
        return self._condition(running) if self._has_replayed else self._replay(running)

    def _replay(self, running: RunningJob) -> Path | None:
        """Choose freely for as long as the choices agree with the heal bytes; condition where they do not."""
        heal, kept = self._prompt.heal, self._prompt.ids
        while (row := self.row(running, self._path)) is not None:
            done = self._bytes(self._path)
            token, *_ = running.choose(
                row,
                [*kept, *self._path],
                running.guide_behind(self._path),
                offset=self._prompt.origin + len(done),
                counts=running.counts_with(self._path),
            )
            data = done + self._pieces[token]
            if token in running.choosing.model_ends or not (heal.startswith(data) or data.startswith(heal)):
                self._has_replayed = True
                return self._condition(running)
            self._path = (*self._path, token)
            if len(data) >= len(heal):
                return self._path
        running.tokens = [*kept, *self._path]
        return None

    def _condition(self, running: RunningJob) -> Path | None:
        """Take the best cover of the heal bytes; first have the inner paths fed that could hold it and are unknown.

        Which rows are known by chance makes no difference to the cover: an inner path is left out only if the noise of
        its own last tokens cannot lift it above a cover that is found already.
        """
        prompt, sampler = self._prompt, running.choosing.sampler
        is_greedy = not running.job.sampling.temperature
        logprobs: dict[Path, NDArray[np.float64]] = {}

        def after(head: Path) -> NDArray[np.float64]:
            """Return the log-probabilities of what follows a path whose row is known."""
            if head not in logprobs:
                guide = running.guide_behind(head)
                allowed = None if guide is None else guide.allowed()
                logprobs[head] = sampler.cover_logprobs(self._rows[head], running.counts_with(head), allowed)
            return logprobs[head]

        known: list[ScoredInner] = []
        unknown: list[tuple[float, Path]] = []
        for inner in self._seam.inners(prompt.ids, prompt.floor, prompt.heal, self.spelling):
            noise = partial(sampler.cover_noise, prompt.origin + len(prompt.heal) - len(inner.rest))
            num_known = self._num_known(running, inner.ids)
            bound = sum(float(after(inner.ids[:num])[inner.ids[num]]) for num in range(min(num_known, len(inner.ids))))
            if num_known > len(inner.ids):
                known.append(ScoredInner(inner, bound, after(inner.ids), None if is_greedy else noise))
            else:
                lift = 0.0 if is_greedy else float(noise(self._seam.candidates(inner.rest)).max())
                unknown.append((bound + lift, inner.ids))
        cover, score = best_cover(self._seam, prompt.ids, prompt.floor, known, self.spelling)
        worth = sorted((entry for entry in unknown if entry[0] > score), key=lambda entry: -entry[0])
        if not worth:
            return cover
        self._branch(running, [ids for _, ids in worth[:_MAX_BRANCHES]])
        return None

    def _num_known(self, running: RunningJob, ids: Path) -> int:
        """Return behind how many of its heads, the empty one first, the row is known."""
        num = 0
        while num <= len(ids) and self.row(running, ids[:num]) is not None:
            num += 1
        return num

    def _branch(self, running: RunningJob, inners: Iterable[Path]) -> None:
        """Make a copy of the Job's slot for each inner path, as far as slots go."""
        if running.slot is None or running.num_fed < running.num_kept:
            return  # All rows so far were known without its cells: the prompt is fed first.
        fed = running.tokens[running.num_kept : running.num_fed]
        for ids in inners:
            most = min(len(fed), len(ids) - 1, self._num_known(running, ids) - 1)
            num_shared = 0
            while num_shared < most and fed[num_shared] == ids[num_shared]:
                num_shared += 1
            slot = self._cells.fork(running.slot, running.num_kept + num_shared)
            if slot is None:
                return
            self.branches.append(Branch(running, slot, ids, num_shared))

    def _bytes(self, path: Path) -> bytes:
        return b"".join(self._pieces[id] for id in path)
