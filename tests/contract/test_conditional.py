"""What the engine samples behind a cut is the model's own distribution, given the bytes of the text."""

from __future__ import annotations

import pytest

from bench.conditional import Continuations, distance, perfect_distance
from tests.conftest import SMALL, weights

NUM_SEEDS = 600


@pytest.fixture(scope="module")
def continuations() -> Continuations:
    return Continuations(weights(SMALL))


@pytest.mark.parametrize("prefix", ["The dog is a domestica", "We visited the museum of natural his"])
def test_draws_are_as_near_to_the_models_own_distribution_as_perfect_ones(
    continuations: Continuations, prefix: str
) -> None:
    prompt = continuations.begin(prefix)
    assert prompt.heal
    own = continuations.own(prompt)
    bound = perfect_distance(own, NUM_SEEDS)[-1] + 0.01  # The share that enumerating leaves out, twice.
    assert distance(own, continuations.drawn(prompt, NUM_SEEDS)) < bound
