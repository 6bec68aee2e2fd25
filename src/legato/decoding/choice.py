"""Which token follows, of those that a Job lets stand there: the same in every engine that has rows of logits.

It receives a row, the ids before it and where it stands, and returns an id. How likely tokens are weighed is
`sampling`'s; here is what a Job and its tokenizer rule out. It keeps nothing of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from legato.decoding.sampling import Mask, Row, Sampler
from legato.decoding.seam import Seam
from legato.types import Job, Tokenizer

__all__ = ["Choosing", "ends_of"]


def ends_of(job: Job, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a Job's answer if they are chosen behind the seam."""
    return frozenset(job.stop_ids) | (frozenset() if job.ignore_end else tokenizer.end_ids)


class Choosing:
    """One Job's way of choosing."""

    def __init__(self, job: Job, tokenizer: Tokenizer, seam: Seam) -> None:
        self.ends = ends_of(job, tokenizer)
        self.model_ends = self.ends & tokenizer.end_ids
        """Those that the model itself ends with."""
        never = dict.fromkeys(tokenizer.end_ids - self.ends, -np.inf)
        sampling = replace(job.sampling, logit_bias={**job.sampling.logit_bias, **never})
        self.sampler = Sampler(sampling, choice=job.choice)
        self._job = job
        self._seam = seam
        self._end_ids = tokenizer.end_ids
        self._banned = tokenizer.control_ids - tokenizer.end_ids
        self._tags = frozenset((*job.thinking.open_ids, *job.thinking.close_ids) if job.thinking else ())

    def choose(
        self,
        row: Row,
        tokens: Sequence[int],
        *,
        offset: int,
        num_written: int,
        is_healing: bool,
        counts: Mapping[int, int],
        allowed: Mask | None = None,
        accept: Callable[[int], bool] | None = None,
    ) -> int:
        """Return the token that follows.

        Args:
            row: logits, unchanged on return.
            tokens: the whole text before it.
            offset: bytes of the rendered text before it.
            num_written: tokens of the answer before it.
            is_healing: whether it begins inside the heal bytes.
            counts: how often each id counts for penalties.
            allowed: says of every id whether a constraint allows it; None: there is none.
            accept: refuses tokens that a constraint allows and that cannot be gone on with; not asked of thinking's
            tags.

        Raises:
            ValueError: none is allowed.
        """
        if num_written < self._job.min_tokens and not is_healing:
            row = row.copy()
            row[list(self.ends)] = -np.inf
        may_stand = partial(self._may_stand, tokens, num_written, is_healing, accept)
        return self.sampler.choose(row, offset=offset, counts=counts, allowed=allowed, accept=may_stand)

    def _may_stand(
        self,
        tokens: Sequence[int],
        num_written: int,
        is_healing: bool,
        accept: Callable[[int], bool] | None,
        token: int,
    ) -> bool:
        if token in self._tags:
            return True
        if token in self._end_ids:
            may_stand = num_written >= self._job.min_tokens
        elif token in self._banned:
            may_stand = token in self.ends and not is_healing
        else:
            may_stand = not self._job.canonical or self._seam.is_canonical(tokens, self._job.prompt.floor, token)
        return may_stand and (accept is None or accept(token))
