"""Answers that were written not long ago: who types what the last one has foretold is answered from it.

It receives Jobs that have ended, with their tokens, and finds those that a new Job would write again. By the second law
these are its own: the same text before the gap's end, the same sampling, the same seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from legato.types import FinishReason, Job, Prompt, Token

__all__ = ["Recall"]

_MAX_ANSWERS = 64
_NO_PROMPT = Prompt((), (), b"", 0, 0, "")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A Job that has ended, as far as it came."""

    key: tuple[object, ...]
    ids: tuple[int, ...]
    """Of its prompt's text."""
    tokens: tuple[Token, ...]
    is_whole: bool
    """Whether the model ended it."""


class Recall:
    """Remembers the last answers of Jobs that say `is_typed`."""

    def __init__(self) -> None:
        self._answers: deque[_Answer] = deque(maxlen=_MAX_ANSWERS)

    def keep(self, job: Job, tokens: Sequence[Token], finish: FinishReason | None) -> None:
        """Remember what a Job has written; `finish` is None if it was cancelled."""
        if job.is_typed and (tokens or finish == "stop"):
            ids = job.prompt.ids[job.prompt.floor :]
            self._answers.appendleft(_Answer(_key(job), ids, tuple(tokens), finish == "stop"))

    def find(self, job: Job) -> tuple[tuple[Token, ...], FinishReason | None] | None:
        """Return the first tokens of a Job, heal bytes included, and how it ends if it is known.

        None: nothing is known of it.
        """
        if not job.is_typed or job.max_tokens == 0:
            return None
        key, ids = _key(job), job.prompt.ids[job.prompt.floor :]
        for answer in self._answers:
            known = (*answer.ids, *(token.id for token in answer.tokens))
            if answer.key != key or len(ids) < len(answer.ids) or known[: len(ids)] != ids:
                continue
            found = _from_seam(answer.tokens[len(ids) - len(answer.ids) :], job)
            if found is None:
                continue
            tokens, num_written = found
            if num_written == job.max_tokens:
                return tokens, "length"
            if answer.is_whole:
                return tokens, "stop"
            if num_written:
                return tokens, None
        return None


def _from_seam(tokens: Sequence[Token], job: Job) -> tuple[tuple[Token, ...], int] | None:
    """Return as many tokens as a Job may write, and how many go beyond the seam; None: they write another text."""
    heal = job.prompt.heal
    size = num_written = 0
    for num, token in enumerate(tokens):
        part = heal[size : size + len(token.data)]
        if token.data[: len(part)] != part:
            return None
        size += len(token.data)
        num_written += size > len(heal)
        if num_written == job.max_tokens:
            return tuple(tokens[: num + 1]), num_written
    return (tuple(tokens), num_written) if size >= len(heal) else None


def _key(job: Job) -> tuple[object, ...]:
    """Return all that a Job's text depends on, but for the text that it continues and its length."""
    scaffold = job.prompt.ids[: job.prompt.floor]
    return scaffold, replace(job, id="", prompt=_NO_PROMPT, max_tokens=0, max_round_tokens=None, reference=())
