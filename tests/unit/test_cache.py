"""Retained sequences: the longest shared head, and who goes first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from legato.engines.llamacpp.cache import Retained, shared_head

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


def common(left: list[int], right: list[int]) -> int:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return size


@given(TOKENS, TOKENS)
def test_shared_head(left: list[int], right: list[int]) -> None:
    assert shared_head(array(left), array(right)) == common(left, right)


@given(st.lists(TOKENS, max_size=8), TOKENS)
def test_the_longest_head_is_found(kept: list[list[int]], wanted: list[int]) -> None:
    retained = Retained()
    alive = {}
    for id, tokens in enumerate(kept):
        alive[id] = tokens
        for covered in retained.add(id, tokens):
            assert tokens[: len(alive[covered])] == alive.pop(covered)
    best = max((common(tokens, wanted) for tokens in alive.values()), default=0)
    sequence, length = retained.longest(array(wanted))
    assert length == best
    assert sequence == -1 if best == 0 else common(alive[sequence], wanted) == best
    assert len(retained) == len(alive)


def test_the_least_recently_used_goes_first() -> None:
    retained = Retained()
    for id in range(3):
        retained.add(id, [id, 9])
    retained.touch(0)
    assert [id for id, _ in retained.newest_first()] == [0, 2, 1]
    retained.drop(2)
    assert [retained.evict(), retained.evict(), retained.evict()] == [1, 0, None]
