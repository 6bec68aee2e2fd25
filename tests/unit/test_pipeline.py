"""Planning and folding, without an engine's work."""

from __future__ import annotations

import pytest

from legato.pipeline import choose_best
from legato.types import Answer, Times, Usage


def answer(choice: int, mean_logprob: float | None) -> Answer:
    """An answer with its likelihood."""
    return Answer(choice, f"text {choice}", (), "stop", None, Usage(3, 2), Times(0, 0), mean_logprob)


def test_the_likeliest_are_kept_prompt_by_prompt_and_numbered_anew() -> None:
    means = [-3.0, -1.0, -2.0, -0.5, -0.1, -0.7]
    kept = choose_best([answer(at, mean) for at, mean in enumerate(means)], 3, 2)
    assert [(each.choice, each.text) for each in kept] == [(0, "text 1"), (1, "text 2"), (2, "text 4"), (3, "text 3")]


@pytest.mark.parametrize(
    ("means", "first"), [([-1.0, -1.0], "text 0"), ([None, -9.0], "text 1"), ([None, None], "text 0")]
)
def test_of_equals_the_earlier_wins_and_an_empty_answer_comes_last(means: list[float | None], first: str) -> None:
    (kept,) = choose_best([answer(at, mean) for at, mean in enumerate(means)], 2, 1)
    assert kept.text == first


def test_nothing_is_moved_where_nothing_is_chosen() -> None:
    answers = tuple(answer(at, mean) for at, mean in enumerate([-3.0, -1.0]))
    assert choose_best(answers, 2, 2) == answers
