"""Answers that were written not long ago: who types what the last one has foretold is answered from it.

It receives Jobs that have ended, with their tokens, and finds the tokens that the engine would write again for a new
Job. It does no I/O and knows no model.

By the second law, what the model chooses freely depends on the text before it, the sampling and the seed alone. So the
tokens of an answer are those of any Job whose kept tokens end among them, if the model was free to choose what comes
next: replaying its heal bytes would give these tokens. The tokens that cover an answer's own heal bytes may have been
forced by these bytes. They serve no other Job: one with fewer heal bytes would not have been forced, and one with more
would have been forced to something else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate

from legato.types import FinishReason, Job, Prompt, Step, Token

__all__ = ["Recall"]

_MAX_ANSWERS = 64
_NO_PROMPT = Prompt((), (), b"", 0, 0, "")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A Job that has ended, as far as it came."""

    settings: str
    ids: bytes
    """Of its prompt and its tokens."""
    num_kept: int
    """Ids of its prompt."""
    heal: bytes
    tokens: tuple[Token, ...]
    offsets: tuple[int, ...]
    """Where in the text its tokens begin, in bytes, and where the last one ends."""
    is_whole: bool
    """Whether the model ended it."""

    def answer(self, job: Job) -> tuple[tuple[Token, ...], FinishReason | None] | None:
        """Return what a Job like it writes (`Recall.find`); its kept ids must be the first of `ids`."""
        first = len(job.prompt.ids) - self.num_kept
        if first < 0 or not self._begins(job.prompt, first, min_tokens=job.min_tokens):
            return None
        seam = job.prompt.origin + len(job.prompt.heal)
        new = bisect_right(self.offsets, seam) - 1  # The first token that goes beyond the seam.
        if self.offsets[-1] < seam or not _data(self.tokens[first : new + 1]).startswith(job.prompt.heal):
            return None
        tokens = self.tokens[first : new + job.max_tokens]
        num_new = first + len(tokens) - new
        if num_new == job.max_tokens:
            return tokens, "length"
        if self.is_whole:
            return tokens, "stop"
        return (tokens, None) if num_new else None

    def _begins(self, prompt: Prompt, first: int, *, min_tokens: int) -> bool:
        """Whether the model chooses the tokens from the `first` on again, if `prompt` ends before them."""
        if self.offsets[first] != prompt.origin:
            return False
        if first == 0 and prompt.heal == self.heal:
            return True
        is_free = self.offsets[first] >= self.offsets[0] + len(self.heal)
        # `min_tokens` rules out ends from each Job's own seam on.
        return is_free and not min_tokens


class Recall:
    """Remembers the last answers of Jobs that say `is_typed`."""

    def __init__(self) -> None:
        self._answers: deque[_Answer] = deque(maxlen=_MAX_ANSWERS)

    async def steps(self, job: Job, write: Callable[[Job], AsyncGenerator[Step, None]]) -> AsyncGenerator[Step, None]:
        """Yield the Steps of a Job: those that `write` gives, but for the tokens that are remembered.

        Where an answer goes on from the kept tokens and its next ones may have been forced, only the first token behind
        the seam is written: what follows it may be remembered after all.
        """
        tokens: list[Token] = []
        finish: FinishReason | None = None
        is_accepted = is_new = False
        try:
            while finish is None:
                rest = job.resumed(tokens)
                found = self.find(rest)
                if found is not None:
                    known, finish = found
                    if not is_accepted:
                        is_accepted = True
                        yield Step(num_cached=len(job.prompt.ids))
                    tokens += known
                    yield Step(known, finish=finish)
                    continue
                is_new = True
                asked = replace(rest, max_tokens=1) if self._may_join(rest) else rest
                async with aclosing(write(asked)) as steps:
                    async for step in steps:
                        tokens += step.tokens
                        if asked is not rest and step.finish == "length":
                            step = replace(step, finish=None)
                        finish = step.finish
                        if step.tokens or step.prompt or finish is not None or not is_accepted:
                            yield step
                        is_accepted = True
        finally:
            if is_new:
                self.keep(job, tokens, finish)

    def keep(self, job: Job, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        """Remember what a Job has written; `finish` is None if it was cancelled."""
        if not job.is_typed or not (tokens or finish == "stop"):
            return
        answer = _Answer(
            _settings(job),
            _packed(job.prompt.ids) + _packed(token.id for token in tokens),
            len(job.prompt.ids),
            job.prompt.heal,
            tuple(tokens),
            tuple(accumulate((len(token.data) for token in tokens), initial=job.prompt.origin)),
            finish == "stop",
        )
        self._answers.appendleft(answer)

    def find(self, job: Job) -> tuple[tuple[Token, ...], FinishReason | None] | None:
        """Return the first tokens of a Job, heal bytes included, and how it ends if it is known.

        None: nothing is known of it.
        """
        if job.max_tokens == 0:
            return None
        return next((found for answer in self._through(job) if (found := answer.answer(job))), None)

    def _may_join(self, job: Job) -> bool:
        """Whether what a Job writes behind its first new token may be remembered."""
        return bool(job.prompt.heal) and job.max_tokens > 1 and any(self._through(job))

    def _through(self, job: Job) -> Iterator[_Answer]:
        """Yield the answers that have a Job's kept ids, the newest first."""
        if not job.is_typed:
            return iter(())
        settings, ids = _settings(job), _packed(job.prompt.ids)
        return (answer for answer in self._answers if answer.settings == settings and answer.ids.startswith(ids))


def _settings(job: Job) -> str:
    """Return all that a Job's text depends on, but for the text that it continues and its length."""
    prompt = replace(_NO_PROMPT, floor=job.prompt.floor, turn=job.prompt.turn, is_opened=job.prompt.is_opened)
    return repr(replace(job, id="", prompt=prompt, max_tokens=0, max_round_tokens=None, reference=(), num_resumed=0))


def _packed(ids: Iterable[int]) -> bytes:
    """Return ids as bytes, which are compared at once."""
    return array("q", ids).tobytes()


def _data(tokens: Iterable[Token]) -> bytes:
    return b"".join(token.data for token in tokens)
