"""A Job that runs: what it has read and written, and which token it chooses next.

It receives rows of logits and returns tokens. It knows its `Slot`, but neither other Jobs nor the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from legato.decoding.choice import Choosing
from legato.decoding.sampling import Row, log_softmax
from legato.engines.llamacpp.cache import RowCache
from legato.engines.llamacpp.cells import Slot
from legato.engines.llamacpp.drafts import Drafter
from legato.engines.llamacpp.guide import Guide
from legato.engines.llamacpp.thinking import Budget
from legato.types import FinishReason, Job, ScoredToken, Token

if TYPE_CHECKING:
    from legato.engines.llamacpp.healing import Healing

__all__ = ["BLOCK", "RunningJob", "Written"]

BLOCK = 64
"""The fewest tokens that the fast kernel takes, and the most of prompts that are read while others write."""
_EXACT_PROMPT = 128
"""Prompts of up to so many tokens are always read exactly: that hardly takes longer."""


@dataclass(slots=True)
class Written:
    """What a Job has written in one step."""

    tokens: list[Token] = field(default_factory=list)
    num_right: int = 0
    """Tokens of the draft that were what the Job chose."""
    finish: FinishReason | None = None


@dataclass(slots=True, eq=False)
class RunningJob:
    """A Job that waits, reads its prompt, heals or writes (see `scheduler`)."""

    job: Job
    choosing: Choosing
    budget: Budget
    pieces: Sequence[bytes]
    context_length: int
    tokens: list[int]
    """The text so far: what its slot will hold."""
    num_kept: int
    """Tokens before the heal bytes."""
    offset: int
    """Byte offset of the next token in the rendered text."""
    healing: Healing | None
    """Until the heal bytes are written."""
    slot: Slot | None = None
    """None while it waits."""
    compiling: Future[Guide] | None = None
    """The guide of a Job with a constraint, while it is made; it has no slot until then."""
    guide: Guide | None = None
    """Behind `tokens`; while healing, behind the kept ones."""
    first_wanted: int = 0
    """The first of `tokens` whose row is not known, while the prompt is read."""
    last_row: Row | None = None
    """The row behind the prompt, if it was known before it was read and nothing has to be healed."""
    is_accepted: bool = False
    is_read: bool = False
    """Whether a choice has been made: the prompt is behind it."""
    num_written: int = 0
    """Tokens written that have bytes after the seam."""
    counts: Counter[int] = field(default_factory=Counter)
    scores: list[Token] = field(default_factory=list)
    num_chunks: int = 0
    drafter: Drafter | None = None
    guess: list[int] = field(default_factory=list)
    """What the drafter proposed last."""

    # -- what is left to feed -----------------------------------------------------------------------------------------

    @property
    def num_fed(self) -> int:
        """Tokens that its slot holds: always the first ones of `tokens`."""
        return 0 if self.slot is None else self.slot.length

    @property
    def pending(self) -> int:
        """Tokens that have to be fed before the next choice."""
        return len(self.tokens) - self.num_fed

    @property
    def read_end(self) -> int:
        """The end of what may be read in chunks; what stands behind it is fed in exact calls.

        That is the seam's tail, which a later cut may feed again, and all that was written before a crash.
        """
        if self.job.score_prompt and not self.is_read:
            return len(self.tokens)
        return self.num_kept - 1 - self.job.num_resumed

    @property
    def is_exact(self) -> bool:
        """Whether all of the prompt is read in exact calls, and nothing is taken that was not."""
        return self.read_end <= _EXACT_PROMPT or self.job.deterministic or self.job.score_prompt

    @property
    def is_reading(self) -> bool:
        """Whether the next thing to feed is a chunk of the prompt, in a call of its own."""
        return not self.is_exact and self.read_end - self.num_fed >= BLOCK

    @property
    def num_waiting(self) -> int:
        """Tokens that wait for exact calls."""
        is_busy = self.slot is None or self.is_reading or (self.healing is not None and self.healing.branches)
        return 0 if is_busy else self.pending

    @property
    def lacks_branches(self) -> bool:
        """Whether it heals and found no free slot for a branch."""
        return self.is_read and self.healing is not None and not self.healing.branches and self.pending == 0

    @property
    def first_row(self) -> int:
        """The first of `tokens` whose logits are wanted when it is fed."""
        if self.job.score_prompt and not self.is_read:
            return 0
        return len(self.tokens) - 1 if self.is_read else min(self.first_wanted, len(self.tokens) - 1)

    @property
    def room(self) -> int:
        """Tokens that may be written behind the next one."""
        return min(self.job.max_tokens - self.num_written, self.context_length - len(self.tokens)) - 1

    # -- rows that are known ------------------------------------------------------------------------------------------

    def recall(self, known: RowCache) -> int:
        """Take the rows behind the prompt that are known; return the number of tokens before the first that is not."""
        if self.is_read or self.job.score_prompt:
            return self.first_row
        self.first_wanted = self.num_kept - 1
        while self.first_wanted < len(self.tokens):
            num = self.first_wanted + 1
            row = known.get(self.tokens[:num], self.job.cache_salt, is_exact=self.is_exact)
            if row is None:
                break
            if self.healing is not None:
                self.healing.learn(self.tokens[self.num_kept : num], row)
            else:
                self.last_row = row
            self.first_wanted = num
        return self.first_wanted

    def remember(self, known: RowCache, tokens: Sequence[int], row: Row) -> None:
        """Keep a row that was computed behind `tokens` in this Job's slot, for its own seam and for later Jobs."""
        assert self.slot is not None
        row = known.put(tokens, row, self.slot.salt, is_exact=self.slot.num_exact >= len(tokens))
        if self.healing is not None and len(tokens) >= self.num_kept:
            self.healing.learn(tokens[self.num_kept :], row)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(
        self, row: Row, tokens: Sequence[int], guide: Guide | None, *, offset: int, counts: Mapping[int, int]
    ) -> tuple[int, ...]:
        """Return the token that follows `tokens`: what must stand there, else what the model chooses by `row`. If that
        closes the thinking, return the whole tag.
        """
        forced = self.forced(tokens, guide)
        if forced:
            return (forced[0],)
        choose = partial(
            self.choosing.choose,
            row,
            tokens,
            offset=offset,
            num_written=self.num_written,
            is_healing=self.healing is not None,
            counts=counts,
        )
        if guide is None:
            token = choose()
        else:
            token = choose(allowed=guide.allowed(), accept=partial(self._accepts, guide, tokens))
        # Who has thought enough to end has not answered yet.
        closing = self.budget.closing(tokens) if token in self.choosing.model_ends else ()
        return closing or (token,)

    def _accepts(self, guide: Guide, tokens: Sequence[int], token: int) -> bool:
        """Whether the constraint lets a token stand that it does not mask."""
        if token in self.choosing.ends:
            return guide.is_complete or (token in self.choosing.model_ends and bool(self.budget.closing(tokens)))
        return guide.fits(tokens, token, canonical=self.job.canonical)

    def forced(self, tokens: Sequence[int], guide: Guide | None) -> list[int]:
        """Return tokens that must follow, if there are any."""
        closing = self.budget.forced(tokens)
        if closing is not None:
            return [closing]
        return [] if guide is None else guide.forced(tokens)

    def guide_behind(self, path: Sequence[int]) -> Guide | None:
        """Return the guide of a choice behind `path`, while healing."""
        return None if self.guide is None else self.guide.behind(path)

    def counts_with(self, path: Sequence[int]) -> Mapping[int, int]:
        """Return the counts that a choice behind `path` sees, while healing."""
        return self.counts + Counter(path) if path and self.choosing.sampler.has_penalties else self.counts

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, rows: Iterable[Row], draft: Sequence[int]) -> Written:
        """Choose the next token of the answer by the first of `rows`, and one more for each token of the draft that was
        right.
        """
        written = Written()
        for row, guess in zip(rows, [*draft, -1], strict=True):
            if self.guide is not None and self.guide.is_over:
                written.finish = "stop"
                break
            token, *tag = self.choose(row, self.tokens, self.guide, offset=self.offset, counts=self.counts)
            if token in self.choosing.ends:
                written.finish = "stop"
                break
            self._append(self.describe(row, token), written)
            for id in tag:  # At once, so that no crash can leave a part of it.
                if written.finish is None:
                    self._append(Token(id, self.pieces[id]), written)
            if written.finish is not None or tag or token != guess:
                break
            written.num_right += 1
        if written.finish is None and self.guide is not None and self.job.logprobs is None:
            for id in self.guide.forced(self.tokens):
                self._append(Token(id, self.pieces[id]), written)
                if written.finish is not None:
                    break
        if self.drafter is not None:
            ids = [token.id for token in written.tokens]
            self.drafter.learn(self.guess, ids)
            self.drafter.extend(ids)
        return written

    def _append(self, token: Token, written: Written) -> None:
        """Write a token, and see whether the answer ends behind it."""
        self.tokens.append(token.id)
        written.tokens.append(token)
        self.count(token, is_new=True)
        if self.guide is not None:
            self.guide.take(token.id)
        written.finish = self.end()

    def end(self) -> FinishReason | None:
        """Say whether the answer ends here, whatever the model wants."""
        if self.guide is not None and self.guide.is_over:
            return "stop"
        is_full = len(self.tokens) >= self.context_length
        return "length" if is_full or 0 < self.num_written >= self.job.max_tokens else None

    def count(self, token: Token, *, is_new: bool) -> None:
        """Take note of a token that the text has got; a new one counts against the limit."""
        self.num_written += is_new
        self.offset += len(token.data)
        if self.choosing.sampler.has_penalties:
            self.counts[token.id] += 1

    def describe(self, row: Row, token: int) -> Token:
        """Return a token as it is told, with its score if the Job wants scores."""
        num = self.job.logprobs
        if num is None:
            return Token(token, self.pieces[token])
        logprobs = log_softmax(row)
        best = np.argpartition(logprobs, -num)[-num:] if num else np.empty(0, np.int64)
        best = best[np.lexsort((best, -logprobs[best]))]
        top = tuple(ScoredToken(int(id), self.pieces[id], float(logprobs[id])) for id in best)
        return Token(token, self.pieces[token], float(logprobs[token]), top)
