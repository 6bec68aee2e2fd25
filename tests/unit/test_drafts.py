"""Drafts: what is looked up, and how much it is trusted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from legato.engines.llamacpp.drafts import Drafter

IDS = st.lists(st.integers(0, 3), max_size=30)


def test_the_reference_is_followed_and_an_edit_is_stepped_over() -> None:
    reference = list(range(100, 140))
    drafter = Drafter(reference, [1, 2, *reference[:5]])
    assert drafter.propose(4) == reference[5:9]
    drafter.extend([7])  # Something else than the reference has.
    assert drafter.propose(4) == []
    drafter.extend(reference[6:8])
    assert drafter.propose(40) == reference[8:]


def test_the_longest_match_wins_over_the_latest() -> None:
    drafter = Drafter([1, 2, 3, 4, 50, 9, 3, 4, 60], [1, 2, 3, 4])
    assert drafter.propose(1) == [50]


def test_a_cycle_goes_on() -> None:
    assert Drafter([], [5, 6, 7, 5, 6]).propose(7) == [7, 5, 6, 7, 5, 6, 7]


def test_trust_follows_what_was_right() -> None:
    drafter = Drafter([], [])
    start = drafter.chance
    drafter.learn([1, 2, 3], [1, 2, 3])
    assert drafter.chance > start
    for _ in range(20):
        drafter.learn([1, 1, 1], [2])
    assert drafter.chance < 0.05
    drafter.learn([], [1])
    assert drafter.chance < 0.05


@given(IDS, IDS, st.integers(1, 20))
def test_a_draft_follows_a_place_where_the_last_two_stood(reference: list[int], tokens: list[int], num: int) -> None:
    drafter = Drafter(reference, tokens)
    draft = drafter.propose(num)
    assert len(draft) <= num
    if not draft:
        return
    pair = tokens[-2:] + draft[:1]
    texts = [reference, tokens + draft[:1] if tokens[-3:-1] == tokens[-2:] else tokens]
    assert any(text[at : at + 3] == pair for text in texts for at in range(len(text)))
