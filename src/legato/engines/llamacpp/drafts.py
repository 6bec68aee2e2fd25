"""Drafts: what probably follows, looked up where the last tokens have stood before (Saxena 2023, prompt lookup).

A drafter receives token ids and returns token ids. Checking a draft costs one call of the model for several tokens;
as choices are keyed to their place (`sampling`), a draft is right or it is not, and never changes the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

__all__ = ["Drafter"]

_SHORTEST = 2
"""So many tokens must stand alike before a place counts as the same."""
_LONGEST = 16
"""More tokens than these do not make a place more alike."""
_MAX_PLACES = 32
"""Places looked at for one draft, the latest of them."""
_RATE = 0.2
"""How much one outcome weighs in the estimate."""


class Drafter:
    """Looks up drafts for one answer, in a reference text, the prompt and the answer itself."""

    def __init__(self, reference: Sequence[int], tokens: Sequence[int]) -> None:
        self._corpus = [*reference, -1]
        self._start = len(self._corpus)
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(_SHORTEST, len(reference) + 1):
            self._note(end)
        self.extend(tokens)
        self.chance = 0.5
        """How likely the first token of a draft is right, as seen so far."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the text has got."""
        for token in tokens:
            self._corpus.append(token)
            if len(self._corpus) >= self._start + _SHORTEST:
                self._note(len(self._corpus))

    def propose(self, num: int) -> list[int]:
        """Return up to `num` tokens that may follow; none if nothing like the last tokens was seen before."""
        corpus = self._corpus
        end = len(corpus)
        best, best_length = -1, 0
        for place in reversed(self._places.get(tuple(corpus[-_SHORTEST:]), ())[-_MAX_PLACES:]):
            if place == end:
                continue
            length = _SHORTEST
            while length < _LONGEST and place > length and corpus[place - 1 - length] == corpus[end - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
        draft: list[int] = []
        while best >= 0 and len(draft) < num:
            at = best + len(draft)
            token = corpus[at] if at < end else draft[at - end]
            if token < 0:
                break
            draft.append(token)
        return draft

    def learn(self, draft: Sequence[int], written: Sequence[int]) -> None:
        """Take note of how a draft turned out, also of one that was not checked."""
        for guess, token in zip(draft, written, strict=False):
            self.chance += _RATE * ((guess == token) - self.chance)
            if guess != token:
                return

    def _note(self, end: int) -> None:
        self._places[tuple(self._corpus[end - _SHORTEST : end])].append(end)
