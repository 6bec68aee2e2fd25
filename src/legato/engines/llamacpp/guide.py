"""What a constraint (`legato.decoding.grammar`) lets a Job write next: which tokens, and which text that is forced.

It receives the tokens of a Job in order. Thinking is free; content is constrained. A guide is a place in one text: at a
seam, each path that is tried has a copy of its own.

Forced text is cut as the tokenizer cuts it behind the text before it, without the last tokens that what follows could
still change: so the text, sent again, is the same tokens. For the same reason a token cannot be chosen if it would be
another one before the text that is forced behind it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from copy import copy, deepcopy

import numpy as np
from numpy.typing import NDArray

from legato.decoding.grammar import Compiler, ConstraintError
from legato.decoding.seam import Seam, is_whole
from legato.text.assembler import Channels
from legato.types import Job

__all__ = ["Guide"]

_MAX_FORCED = 256
"""Bytes of forced text that are looked at, at once."""


class Guide:
    """The place of one Job in its constrained text, behind `tokens`."""

    def __init__(
        self, job: Job, compiler: Compiler, pieces: Sequence[bytes], seam: Seam, ends: Set[int], tokens: Sequence[int]
    ) -> None:
        """Go through a Job's tokens so far.

        Raises:
            ConstraintError: the constraint is too complex, or refuses them.
        """
        constraint = job.constraint
        assert constraint is not None
        self._pieces = pieces
        self._seam = seam
        self._floor = job.prompt.floor
        self._ends = np.fromiter(sorted(ends), np.int64)
        self._open_ids = job.thinking.open_ids if job.thinking and constraint.start is None else ()
        self._num_opened = 0
        self._matcher = compiler.compile(constraint.grammar)
        if constraint.start is None:
            self._channels = Channels.of(job, pieces, is_begun=False)
            for token in tokens[job.prompt.turn :]:
                self.take(token)
        else:
            self._channels = Channels()
            num = job.prompt.origin - constraint.start
            first = len(tokens)
            size = 0
            while size < num:
                first -= 1
                size += len(pieces[tokens[first]])
            self._feed(b"".join(pieces[id] for id in tokens[first:])[size - num :])

    def copy(self) -> Guide:
        """Return another guide at the same place."""
        other = copy(self)
        other._channels = deepcopy(self._channels) if self._channels.channel != "content" else self._channels
        other._matcher = self._matcher.copy()
        return other

    def behind(self, tokens: Sequence[int]) -> Guide:
        """Return a guide that is further by some tokens."""
        other = self.copy()
        for token in tokens:
            other.take(token)
        return other

    def take(self, token: int) -> None:
        """Go on behind a token.

        Raises:
            ConstraintError: it cannot stand here.
        """
        self._num_opened += 1
        self._feed(self._channels.feed(self._pieces[token])[1])

    def _feed(self, data: bytes) -> None:
        num = self._matcher.take(data)
        if num < len(data):
            raise ConstraintError(f"the constraint does not allow {data[num : num + 16]!r}")

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return self._channels.channel == "content" and self._matcher.is_complete

    @property
    def is_over(self) -> bool:
        """Whether the text must end here."""
        return self._channels.channel == "content" and self._matcher.is_over

    def allowed(self) -> NDArray[np.bool_] | None:
        """Say of every token whether it can follow; None: all can, but for those that end the text."""
        if self._channels.channel == "reasoning":
            return None
        allowed = self._matcher.allowed()
        allowed[self._ends] = self.is_complete
        if self._channels.channel is None and self._num_opened < len(self._open_ids):
            if self._num_opened:
                allowed[:] = False
            allowed[self._open_ids[self._num_opened]] = True
        return allowed

    def fits(self, tokens: Sequence[int], token: int, *, canonical: bool) -> bool:
        """Whether a token that is allowed can be chosen behind `tokens`: what its bytes begin can be gone on with."""
        if self._channels.channel == "content" and not canonical:
            return True
        after = self.copy()
        try:
            after.take(token)
        except ConstraintError:  # The end of a thinking's tag, and then what no content begins with.
            return False
        data = after._whole_forced() if canonical else b""
        if not data:
            return True
        so_far = [*tokens, token]
        return self._seam.is_canonical(so_far, self._floor, self._seam.encode_after(so_far, self._floor, data)[0])

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that must follow behind `tokens`, as far as they are known."""
        data = self._whole_forced()
        if not data:
            return []
        ids = self._seam.encode_after(tokens, self._floor, data)
        if b"".join(self._pieces[id] for id in ids) != data:
            return []
        end = self._matcher.copy()
        end.take(data)
        if end.is_over:
            return ids
        kept, _ = self._seam.split([*tokens, *ids], len(tokens))
        return ids[: kept - len(tokens)]

    def _whole_forced(self) -> bytes:
        """Return the next bytes that are forced, up to the end of a character."""
        if self._channels.channel != "content":
            return b""
        data = self._matcher.forced()[:_MAX_FORCED]
        while not is_whole(data):
            data = data[:-1]
        return data
