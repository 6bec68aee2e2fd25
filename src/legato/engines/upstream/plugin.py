"""What is chosen inside another server: a Job in a request's extra arguments, rows of logits in, token ids out.

It receives what `encode_request` made of a Job, the ids of a prompt, and one row of logits per token; it returns the
token that the embedded engine would choose. It knows no server, and no tensors but numpy's.

A request does one of two things. It *writes*: every token is the Job's own choice, beginning with the heal bytes, which
the engine compares. Or it *scores* an inner path of the seam: the path is written, then the best last token, and then
two tokens that are digits of the score, for ids are all that a server gives back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from legato.decoding.choice import Choosing
from legato.decoding.sampling import Row
from legato.decoding.seam import Inner, ScoredInner, Seam, best_cover
from legato.types import Job, Tokenizer

__all__ = ["NUM_DIGITS", "Chooser", "decode_request", "decode_score", "encode_request"]

_JOB = "legato_job"
_INNER = "legato_inner"
NUM_DIGITS = 2
"""Tokens that tell a score."""
_LEAST = -1024.0
_SPAN = 2048.0
"""Scores that can be told: `_LEAST` and `_SPAN` above it."""


def encode_request(job: Job, inner: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the extra arguments of a request that writes a Job's answer or, given an inner path, scores that."""
    prompt = replace(job.prompt, ids=(), tail=(), prefix="", thought=None)
    args: dict[str, Any] = {_JOB: replace(job, prompt=prompt, reference=()).to_json()}
    return args if inner is None else {**args, _INNER: list(inner)}


def decode_request(args: Mapping[str, Any] | None) -> tuple[Job, tuple[int, ...] | None] | None:
    """Return the Job and the inner path of a request's extra arguments; None: it has none of ours.

    Raises:
        ValueError: the Job is not one of this version.
    """
    if not args or _JOB not in args:
        return None
    try:
        job = Job.from_json(args[_JOB])
        inner = args.get(_INNER)
        return job, None if inner is None else tuple(map(int, inner))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"`{_JOB}` must be a Job of this version of Legato: {type(error).__name__}: {error}") from None


def encode_score(score: float, size: int) -> tuple[int, int]:
    """Write a score as two ids of a vocabulary of `size`; what is too low to be told is `-inf`."""
    share = min(max((score - _LEAST) / _SPAN, 0.0), 1.0)
    return divmod(round(share * (size**2 - 1)), size)


def decode_score(digits: Sequence[int], size: int) -> float:
    """Return the score that two ids are, or `-inf`."""
    value = digits[0] * size + digits[1]
    return _LEAST + _SPAN * value / (size**2 - 1) if value else -np.inf


class Chooser:
    """One request's way of choosing."""

    def __init__(
        self, job: Job, inner: tuple[int, ...] | None, tokenizer: Tokenizer, seam: Seam, prompt: Sequence[int]
    ) -> None:
        self._job = job
        self._inner = inner
        self._pieces = tokenizer.pieces
        self._seam = seam
        self._choosing = Choosing(job, tokenizer, seam)
        self._sampler = self._choosing.sampler
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._offset = job.prompt.origin
        self._seam_end = job.prompt.origin + len(job.prompt.heal)
        self._num_written = 0
        self._counts: Counter[int] = Counter(self._tokens[job.prompt.floor :] if self._sampler.has_penalties else ())
        self._last = 0
        self._scores: dict[int, float] = {}
        self._digits = (0, 0)

    def choose(self, row: Row, written: Sequence[int]) -> int:
        """Return the token that follows.

        Args:
            row: logits, one per id of the tokenizer.
            written: what the request has written so far. A negative id stands for the one that was chosen last: a
            server may compute ahead of what it knows.
        """
        for id in written[len(self._tokens) - self._num_prompt :]:
            self._take(id if id >= 0 else self._last)
        self._last = self._write(row) if self._inner is None else self._score(row, self._inner)
        return self._last

    def _take(self, token: int) -> None:
        self._tokens.append(token)
        self._offset += len(self._pieces[token])
        self._num_written += self._offset > self._seam_end
        if self._sampler.has_penalties:
            self._counts[token] += 1

    def _write(self, row: Row) -> int:
        """Choose the next token of the answer."""
        return self._choosing.choose(
            row,
            self._tokens,
            offset=self._offset,
            num_written=self._num_written,
            is_healing=self._offset < self._seam_end,
            counts=self._counts,
        )

    def _score(self, row: Row, inner: tuple[int, ...]) -> int:
        """Write the inner path, the likeliest token that ends a cover over it, and the cover's score."""
        num = len(self._tokens) - self._num_prompt
        if num > len(inner):
            return self._digits[min(num - len(inner), NUM_DIGITS) - 1]
        logprobs = self._sampler.cover_logprobs(row, self._counts)
        if num < len(inner):
            self._scores[num] = float(logprobs[inner[num]])
            return inner[num]
        heal, is_sampled = self._job.prompt.heal, self._job.sampling.temperature > 0
        rest = heal[sum(len(self._pieces[id]) for id in inner) :]
        noise = partial(self._sampler.cover_noise, self._seam_end - len(rest)) if is_sampled else None
        joint = sum(self._scores.get(at, -np.inf) for at in range(num))
        scored = ScoredInner(Inner(inner, rest), joint, logprobs, noise)
        kept = self._tokens[: self._num_prompt]
        cover, score = best_cover(self._seam, kept, self._job.prompt.floor, [scored], ())
        self._digits = encode_score(score, len(self._pieces))
        return cover[-1] if cover else 0
