"""Cycles of tokens: found in time, never without one, and the same in one run or in two."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.text.cycles import MAX_PERIOD, MAX_TOKENS, MIN_CYCLES, MIN_TOKENS, Cycle


def first_cycle(ids: Sequence[int], before: Sequence[int] = ()) -> int | None:
    """How many of the ids it takes until a cycle is found; None if there is none."""
    cycle = Cycle(before)
    return next((num for num, id in enumerate(ids, 1) if cycle.feed(id)), None)


def is_cycle(ids: Sequence[int]) -> bool:
    """The definition, the slow way."""
    for period in range(1, MAX_PERIOD + 1):
        num = max(MIN_TOKENS, MIN_CYCLES * period)
        if len(ids) < num or ids[-1] != ids[-1 - period]:
            continue
        tail = ids[-num:]
        if all(tail[at] == tail[at - period] for at in range(period, num)):
            return True
    return False


@pytest.mark.parametrize("period", [1, 7, 60, MAX_PERIOD])
def test_c102_a_cycle_is_found_within_its_bound(period: int) -> None:
    found = first_cycle([at % period for at in range(MAX_TOKENS)])
    assert found == max(MIN_TOKENS, MIN_CYCLES * period)
    assert found <= max(MIN_CYCLES * period, 512)


def test_c102_what_is_similar_or_short_is_no_cycle() -> None:
    rows = "".join(f"| {row:>3} | lamp lit | wind from the north | 0 ships |\n" for row in range(50))
    for text in (rows, "=" * (MIN_TOKENS - 1), ("x" * 200 + "\n" + "=" * 200 + "\n") * 3):
        assert first_cycle(text.encode()) is None


def test_c102_longer_periods_are_left_alone() -> None:
    assert first_cycle([at % (MAX_PERIOD + 1) for at in range(4 * MAX_TOKENS)]) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=MAX_PERIOD), st.lists(st.integers(0, 5), max_size=300))
def test_c102_whatever_repeats_is_found_whatever_stands_before_it(unit: list[int], before: list[int]) -> None:
    found = first_cycle(unit * (MAX_TOKENS // len(unit) + 1), before)
    assert found is not None
    assert found <= MAX_TOKENS


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 300)), min_size=1, max_size=4
    ),
    st.integers(0, 900),
)
def test_c102_only_cycles_are_found_and_a_cut_makes_no_difference(parts: list[tuple[list[int], int]], cut: int) -> None:
    ids = [id for unit, times in parts for id in unit * times][:900]
    expected = next((num for num in range(1, len(ids) + 1) if is_cycle(ids[:num])), None)
    assert first_cycle(ids) == expected
    cut = min(cut, len(ids) if expected is None else expected - 1)
    rest = first_cycle(ids[cut:], ids[:cut])
    assert rest == (None if expected is None else expected - cut)
