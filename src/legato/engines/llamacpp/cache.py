"""Which retained sequence shares the longest head with a prompt, and which one to give up first.

It receives and returns sequence ids and token ids. It does not touch the KV cache itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Retained", "shared_head"]

Tokens = NDArray[np.int32]


def shared_head(left: Tokens, right: Tokens) -> int:
    """Return how many leading tokens two arrays have in common."""
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


class Retained:
    """Finished sequences whose KV entries are kept, least recently used first."""

    def __init__(self) -> None:
        self._tokens: dict[int, Tokens] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def longest(self, tokens: Tokens) -> tuple[int, int]:
        """Return the sequence with the longest common head, and its length; (-1, 0) if nothing is shared."""
        best, length = -1, 0
        for sequence, kept in self._tokens.items():
            if kept.size > length and kept[length] == tokens[min(length, tokens.size - 1)]:
                shared = shared_head(kept, tokens)
                if shared > length:
                    best, length = sequence, shared
        return best, length

    def touch(self, sequence: int) -> None:
        """Make a sequence the most recently used."""
        self._tokens[sequence] = self._tokens.pop(sequence)

    def add(self, sequence: int, tokens: Sequence[int]) -> list[int]:
        """Keep a sequence; return those that are now useless because it begins with all of their tokens."""
        kept = np.asarray(tokens, np.int32)
        covered = [other for other, head in self._tokens.items() if shared_head(kept, head) == head.size]
        for other in covered:
            del self._tokens[other]
        self._tokens[sequence] = kept
        return covered

    def drop(self, sequence: int) -> None:
        """Keep a sequence no longer."""
        del self._tokens[sequence]

    def evict(self) -> int | None:
        """Give up the least recently used sequence and return it; None if there is none."""
        for sequence in self._tokens:
            del self._tokens[sequence]
            return sequence
        return None

    def newest_first(self) -> list[tuple[int, Tokens]]:
        """Return all sequences and their tokens, the most recently used first."""
        return list(reversed(self._tokens.items()))
