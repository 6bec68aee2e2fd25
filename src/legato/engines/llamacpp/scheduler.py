"""Continuous batching over one model: each step is one decode of a token for every running Job, filled up with prompt
chunks.

It receives Jobs and cancellations and returns Steps. It runs in the worker, single-threaded, and knows neither
processes nor sockets.

A Job's life, as the states of its `RunningJob`:

    waiting    it has no slot yet
    reading    its prompt is fed, in chunks, behind the longest head that another one already has in the cells (`cells`)
    healing    the heal bytes are written again (`healing`); their canonical spelling was fed together with the prompt,
               so that the usual case costs no decode of its own
    scoring    part of healing: inner paths that the spelling does not contain are fed on copies of the slot
    writing    a token is chosen per step

`batching` says what a call holds. What a slot holds is asked of `cells`: a Job's `tokens` are what it should hold, and
whatever changes their tail cuts the slot to what is still true. So preemption, when cells run out, is no more than
taking the slot away.

Rounding. The same token must get the same logits whoever else is there, or the text would depend on it: a difference in
the last bit grows, through the quantised activations, to tenths of a logit. llama.cpp rounds by the shape of the call,
unless it is asked for the kernels that do not (`Model.decode`), which read long prompts slower by half and more. So
tokens that streams write go in exact calls, as do short prompts; a long prompt is read in calls of its own, where
attention rounds by the cells that it lies in. What was once written is never read: after a crash it is fed in exact
calls again. Deterministic Jobs read long prompts in exact calls too. Whoever reads exactly takes exact entries only;
Jobs that score their prompt take none at all.

Rows left over in a call hold drafts (`drafts`), checked with the sampler's own choices: they never change the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import numpy as np
from numpy.typing import NDArray

from legato.decoding.choice import Choosing
from legato.decoding.grammar import Compiler, TooComplex
from legato.decoding.sampling import Row
from legato.decoding.seam import Seam
from legato.engines.llamacpp.batching import Part, Turn
from legato.engines.llamacpp.binding import Model
from legato.engines.llamacpp.cache import RowCache, Tokens, shared_head
from legato.engines.llamacpp.cells import Cells
from legato.engines.llamacpp.guide import Guide
from legato.engines.llamacpp.healing import Branch, Healing
from legato.engines.llamacpp.running import RunningJob
from legato.engines.llamacpp.spill import Spill
from legato.engines.llamacpp.thinking import Budget
from legato.errors import GenerationFailed, InvalidField, LegatoError
from legato.types import FinishReason, Job, Step, Token

__all__ = ["Scheduler"]

_WORTH_WAITING = 16
"""A prompt waits for another one that is being read if it can then copy at least so many tokens more."""
_KEPT_ROWS = 6
"""Rows that are remembered of an answer's end, where the next round begins: a boundary backs up by four tokens."""
_MAX_ROW_BYTES = 64 * 2**20
_POLL_S = 0.005
"""How long a step waits for a constraint that is compiled while nothing else is to be done."""


class Scheduler:
    """Runs Jobs on one model."""

    def __init__(
        self,
        model: Model,
        seam: Seam,
        *,
        context_length: int,
        max_batch: int,
        max_sequences: int,
        spill: Spill,
    ) -> None:
        self._vocabulary = model.vocabulary
        self._seam = seam
        self._compiler = Compiler(self._vocabulary.pieces, self._vocabulary.control_ids, self._vocabulary.end_ids)
        self._compiling = ThreadPoolExecutor(max_workers=1)
        self._context_length = context_length
        self._cells = Cells(model, max_batch=max_batch, max_sequences=max_sequences, spill=spill)
        self._known = RowCache(_MAX_ROW_BYTES)
        self._waiting: deque[RunningJob] = deque()
        self._running: list[RunningJob] = []
        self._is_full = False
        """Cells ran out: whoever waits does so until somebody has ended."""
        self._out: list[tuple[str, Step | LegatoError]] = []
        self.num_steps = 0
        self.num_decoded = 0
        self.num_drafted = 0
        self.num_accepted = 0

    # -- commands -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Accept a Job; its first Step comes with the next `step`."""
        prompt, pieces = job.prompt, self._vocabulary.pieces
        choosing = Choosing(job, self._vocabulary, self._seam)
        healing = Healing(job, self._seam, pieces, self._cells, self._known) if prompt.heal else None
        running = RunningJob(
            job=job,
            choosing=choosing,
            budget=Budget(job, pieces, self._seam),
            pieces=pieces,
            context_length=self._context_length,
            tokens=[*prompt.ids, *(healing.spelling if healing else ())],
            num_kept=len(prompt.ids),
            offset=prompt.origin,
            healing=healing,
        )
        if choosing.sampler.has_penalties:
            running.counts.update(prompt.ids[prompt.floor :])
        if job.constraint is not None:
            guide = partial(Guide, job, self._compiler, pieces, self._seam, choosing.ends, prompt.ids)
            running.compiling = self._compiling.submit(guide)
        self._waiting.append(running)

    def cancel(self, job_id: str) -> None:
        """Drop a Job, wherever it is. Nothing more is said of it."""
        for jobs in (self._waiting, self._running):
            for running in jobs:
                if running.job.id == job_id:
                    jobs.remove(running)
                    self._drop(running)
                    return

    def close(self) -> None:
        """Spill what is retained, if that outlives this process."""
        self._cells.spill()

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self._waiting and not self._running

    def counters(self) -> Mapping[str, int]:
        """Return counts: Jobs, retained slots and their tokens now; steps and tokens since the start."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "retained": self._cells.num_retained,
            "retained_tokens": self._cells.num_retained_tokens,
            "spilled": self._cells.num_spilled,
            "steps": self.num_steps,
            "decoded_tokens": self.num_decoded,
            "drafted_tokens": self.num_drafted,
            "accepted_tokens": self.num_accepted,
        }

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[str, Step | LegatoError]]:
        """Decode a token for every Job that writes, and some of the prompts; return what came of it, by Job id.

        What can be said without a decode is returned before one is made.
        """
        self._out = []
        if not self._running and (compiling := [item.compiling for item in self._waiting if item.compiling]):
            wait(compiling, _POLL_S, "FIRST_COMPLETED")
        self._admit()
        for running in [*self._running]:
            if running.lacks_branches:
                self._guard(running, partial(self._decide, running, (), ()))
        if self._out:
            return self._out
        turn = Turn(self._running, self._cells.max_feed)
        while parts := turn.exact_call():
            if not self._decode(parts, exact=True):
                turn.put_back(parts)
        if parts := turn.chunk_call():
            self._decode(parts, exact=False)
        self._cells.tidy()
        return self._out

    def _decode(self, parts: Sequence[Part], *, exact: bool) -> bool:
        """Make one call, and act on the logits. False: there was no room; now there is."""
        rows = self._cells.decode([part.feed for part in parts], exact=exact)
        if rows is None:
            self._make_room()
            return False
        self.num_steps += 1
        self.num_decoded += sum(len(part.feed.ids) for part in parts)
        for part, own in zip(parts, rows, strict=True):
            if isinstance(part.item, Branch):
                self._guard(part.item.owner, partial(self._read_branch, part.item, own))
            else:
                self._guard(part.item, partial(self._read_rows, part.item, own, part.draft))
        return True

    def _guard(self, running: RunningJob, act: Callable[[], None]) -> None:
        """Act for one Job: what goes wrong there ends that Job alone."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the Job
            self._out.append((running.job.id, _failure(running, error)))
            if running in self._running:
                self._running.remove(running)
            if running.healing is not None:
                running.healing.close()
            if running.slot is not None:
                self._cells.close(running.slot)
                running.slot = None

    def _make_room(self) -> None:
        """Free cells: those that nobody uses, else those of the Job that began last, which goes on later."""
        if self._cells.make_room():
            return
        if len(self._running) < 2:
            raise RuntimeError("the KV cache has no room for a single sequence")
        running = self._running.pop()
        if running.healing is not None:
            running.healing.close()
        assert running.slot is not None
        self._cells.suspend(running.slot)
        running.slot = None
        self._waiting.appendleft(running)
        self._is_full = True

    # -- places -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting Jobs a slot, in order, as far as there are some."""
        held_back: list[RunningJob] = []
        while self._waiting and not (self._is_full and self._running):
            running = self._waiting.popleft()
            if running.compiling is not None:
                if not running.compiling.done():
                    held_back.append(running)
                else:
                    self._guard(running, partial(self._take_guide, running))
                continue
            wanted = np.asarray(running.tokens[: running.recall(self._known)], np.int32)
            if self._is_coming(running, wanted):
                held_back.append(running)
                continue
            running.slot = self._cells.open(running.job.cache_salt)
            if running.slot is None:
                self._waiting.appendleft(running)
                break
            num_cached = self._cells.take_head(running.slot, wanted, exact=running.is_exact)
            self._running.append(running)
            if not running.is_accepted:
                running.is_accepted = True
                self._out.append((running.job.id, Step(num_cached=num_cached)))
            if not running.is_read and running.first_wanted == len(running.tokens):
                rows = [] if running.last_row is None else [running.last_row]
                self._guard(running, partial(self._decide, running, rows, ()))
        self._waiting.extendleft(reversed(held_back))

    def _take_guide(self, running: RunningJob) -> None:
        assert running.compiling is not None
        running.guide, running.compiling = running.compiling.result(), None
        self._waiting.appendleft(running)

    def _is_coming(self, running: RunningJob, wanted: Tokens) -> bool:
        """Whether another Job reads so much more of `wanted` than there is that it is worth waiting for."""
        salt = running.job.cache_salt
        least = self._cells.longest(wanted, salt, exact=running.is_exact) + _WORTH_WAITING
        return any(
            other.pending >= _WORTH_WAITING
            and other.job.cache_salt == salt
            and (other.is_exact or not running.is_exact)
            and shared_head(np.asarray(other.tokens, np.int32), wanted) >= least
            for other in self._running
        )

    def _drop(self, running: RunningJob) -> None:
        """Give a Job's slot back; what it has in the cells is retained."""
        self._is_full = False
        if running.healing is not None:
            running.healing.close()
        if running.slot is not None:
            self._cells.retain(running.slot)
            running.slot = None

    # -- what the logits say ------------------------------------------------------------------------------------------

    def _read_rows(self, running: RunningJob, rows: NDArray[np.float32], draft: Sequence[int]) -> None:
        """Take note of the rows of the last tokens that were fed; choose, if nothing is left to feed."""
        if not running.is_read:
            for index, row in enumerate(rows, running.num_fed - len(rows)):
                if running.job.score_prompt and index == len(running.scores) and index + 1 < len(running.tokens):
                    running.scores.append(running.describe(row, running.tokens[index + 1]))
                if index >= running.num_kept - 1:
                    running.remember(self._known, running.tokens[: index + 1], row)
        if running.pending > 0:
            return
        last = list(rows[len(rows) - len(draft) - 1 :])
        num_left = running.job.max_tokens - running.num_written
        for num, row in enumerate(last):
            if running.healing is not None or num_left - num <= _KEPT_ROWS:
                running.remember(self._known, [*running.tokens, *draft[:num]], row)
        self._decide(running, last, draft)

    def _read_branch(self, branch: Branch, rows: NDArray[np.float32]) -> None:
        """Keep the rows of a branch; choose, if it was the last."""
        healing = branch.owner.healing
        assert healing is not None
        healing.learn_branch(branch, rows)
        if not healing.branches:
            self._heal(branch.owner, healing)

    def _decide(self, running: RunningJob, rows: Sequence[Row], draft: Sequence[int]) -> None:
        """Act when nothing is left to feed: `rows` follow the last token and each token of a draft."""
        if not running.is_read:
            running.is_read = True
            if running.job.score_prompt:
                unscored = Token(running.tokens[0], running.pieces[running.tokens[0]])
                self._out.append((running.job.id, Step(prompt=(unscored, *running.scores))))
                running.scores = []
            if running.job.max_tokens == 0:
                self._emit(running, (), "length")
                return
        if running.healing is not None:
            self._heal(running, running.healing)
        else:
            self._write(running, rows, draft)

    def _heal(self, running: RunningJob, healing: Healing) -> None:
        """Write the heal bytes, if it is known how; go on behind them."""
        path = healing.find_path(running)
        assert running.slot is not None
        if path is None:
            self._cells.cut_to(running.slot, running.tokens, running.num_kept)
            return
        pieces = running.pieces
        overhangs = sum(len(pieces[id]) for id in path) > len(running.job.prompt.heal)
        tokens = [Token(id, pieces[id]) for id in path]
        if overhangs and (before := healing.row(running, path[:-1])) is not None:
            tokens[-1] = running.describe(before, path[-1])
        row = healing.row(running, path)
        running.tokens = [*running.tokens[: running.num_kept], *path]
        self._cells.cut_to(running.slot, running.tokens, running.num_kept)
        running.guide = running.guide_behind(path)
        running.healing = None
        for token in tokens:
            running.count(token, is_new=overhangs and token is tokens[-1])
        self._emit(running, tuple(tokens), running.end())
        if row is not None and running in self._running:
            self._write(running, [row], ())

    def _write(self, running: RunningJob, rows: Sequence[Row], draft: Sequence[int]) -> None:
        """Write what the Job chooses, and give up what the slot holds of a draft that was wrong."""
        assert running.slot is not None
        start = len(running.tokens)
        written = running.write(rows, draft)
        if draft:
            self._cells.cut(running.slot, start + written.num_right)
            self.num_drafted += len(draft)
            self.num_accepted += written.num_right
        self._emit(running, tuple(written.tokens), written.finish, written.num_right)

    def _emit(
        self, running: RunningJob, tokens: tuple[Token, ...], reason: FinishReason | None, num_drafted: int = 0
    ) -> None:
        """Report tokens, and the end if there is a reason for it."""
        self._out.append((running.job.id, Step(tokens, num_drafted=num_drafted, finish=reason)))
        if reason is not None:
            self._running.remove(running)
            self._drop(running)


def _failure(running: RunningJob, error: Exception) -> LegatoError:
    constraint = running.job.constraint
    if constraint is not None and isinstance(error, TooComplex):
        return InvalidField(
            f"`{constraint.field}` became too complex after {running.num_written} tokens of the answer: {error}",
            param=constraint.field,
        )
    return GenerationFailed(f"the engine failed on this request: {type(error).__name__}: {error}")
