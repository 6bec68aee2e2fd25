"""Keyed noise and the choice it makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from legato.decoding.sampling import COVERS, TOKENS, Row, Sampler, gumbel, log_softmax, noise_key, uniform
from legato.types import Sampling

IDS = np.arange(20_000)


def sampler(**options: object) -> Sampler:
    """A sampler at temperature 1 unless said otherwise."""
    values = {"seed": 3, "temperature": 1.0, **options}
    return Sampler(Sampling(**values), choice=0)  # type: ignore[arg-type]


def choose(some: Sampler, row: Row, offset: int = 0) -> int:
    """Choose with nothing refused."""
    return some.choose(row, offset=offset, counts={}, accept=lambda token: True)


def test_noise_is_uniform_over_ids() -> None:
    assert stats.kstest(uniform(noise_key(7, 0, TOKENS, 123), IDS), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "keys",
    [
        [noise_key(7, 0, TOKENS, offset) for offset in range(2000)],
        [noise_key(seed, 0, TOKENS, 5) for seed in range(2000)],
        [noise_key(7, choice, TOKENS, 5) for choice in range(2000)],
    ],
)
def test_noise_is_uniform_over_offsets_seeds_and_choices(keys: list[tuple[int, int]]) -> None:
    values = np.array([uniform(key, np.array([11, 12, 60_000])) for key in keys])
    for column in values.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert abs(stats.pearsonr(values[:, left], values[:, right]).statistic) < 0.08


def test_noise_of_neighbours_is_independent() -> None:
    """Over many keys, the p-values of independence tests are themselves uniform."""
    for change in ("offset", "seed", "choice", "stream", "id"):
        pvalues = []
        for seed in range(40):
            base = uniform(noise_key(seed, 0, TOKENS, 100), IDS)
            other = {
                "offset": uniform(noise_key(seed, 0, TOKENS, 101), IDS),
                "seed": uniform(noise_key(seed + 1, 0, TOKENS, 100), IDS),
                "choice": uniform(noise_key(seed, 1, TOKENS, 100), IDS),
                "stream": uniform(noise_key(seed, 0, COVERS, 100), IDS),
                "id": np.roll(base, 1),
            }[change]
            table = np.histogram2d(base, other, bins=8, range=[[0, 1], [0, 1]])[0]
            pvalues.append(stats.chisquare(table.ravel()).pvalue)
        assert stats.kstest(pvalues, "uniform").pvalue > 1e-3, change


def test_choices_follow_the_distribution() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    some = sampler()
    counts = np.bincount([choose(some, row, offset) for offset in range(8000)], minlength=4)
    assert stats.chisquare(counts, 8000 * np.array([0.5, 0.3, 0.15, 0.05])).pvalue > 1e-3


def test_the_tail_outside_the_head_is_sampled_too() -> None:
    row = np.full(5000, -9.0, np.float32)
    row[0] = 0.0
    tail = 4999 * np.exp(-9.0) / (1 + 4999 * np.exp(-9.0))
    some = sampler()
    hits = sum(choose(some, row, offset) != 0 for offset in range(2000))
    assert stats.binomtest(hits, 2000, tail).pvalue > 1e-3


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.sampled_from([1e-9, 1e-5, 0.1, 0.8, 1.5, 100.0]))
def test_the_quick_way_finds_what_the_whole_vocabulary_gives(seed: int, offset: int, temperature: float) -> None:
    row = np.random.default_rng(seed % 1000).normal(0, 4, 3000).astype(np.float32)
    noisy = row * np.float32(1 / temperature) + gumbel(noise_key(seed, 0, TOKENS, offset), np.arange(3000))
    assert choose(sampler(seed=seed, temperature=temperature), row, offset) == int(noisy.argmax())


def test_greedy_takes_the_largest_and_then_the_next() -> None:
    row = np.array([1.0, 3.0, 2.0], np.float32)
    some = sampler(temperature=0.0)
    assert choose(some, row) == 1
    assert some.choose(row, offset=0, counts={}, accept=lambda token: token != 1) == 2
    assert some.choose(row, offset=0, counts={}, accept=lambda token: False) == 1
    assert row.tolist() == [1.0, 3.0, 2.0]


def test_cuts() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    assert {choose(sampler(top_k=2), row, offset) for offset in range(300)} == {0, 1}
    assert {choose(sampler(top_p=0.6), row, offset) for offset in range(300)} == {0, 1}
    assert {choose(sampler(min_p=0.6), row, offset) for offset in range(300)} == {0, 1}
    assert {choose(sampler(top_p=0.01), row, offset) for offset in range(50)} == {0}


def test_top_p_counts_the_whole_mass() -> None:
    row = np.zeros(1000, np.float32)
    assert len({choose(sampler(top_p=0.5), row, offset) for offset in range(6000)}) > 450
    assert max(choose(sampler(top_p=0.5), row, offset) for offset in range(500)) < 501


def test_bias_and_penalties() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    greedy = {"temperature": 0.0}
    assert choose(sampler(**greedy, logit_bias={2: 100.0}), row) == 2
    for penalty in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.3}, {"repetition_penalty": 1.2}):
        some = sampler(**greedy, **penalty)
        assert some.choose(row, offset=0, counts={0: 1}, accept=lambda token: True) == 1
        assert some.choose(row, offset=0, counts={}, accept=lambda token: True) == 0


def test_log_softmax_sums_to_one() -> None:
    row = np.random.default_rng(0).normal(0, 10, 5000).astype(np.float32)
    assert np.exp(log_softmax(row)).sum() == pytest.approx(1, abs=1e-12)


@given(
    st.integers(0, 2**32),
    st.floats(0.5, 8.0),
    st.sampled_from([{"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.999}, {"min_p": 0.02, "top_p": 0.9}, {"min_p": 0.1}]),
)
def test_the_cuts_are_those_of_a_full_sort(seed: int, spread: float, cuts: dict[str, float]) -> None:
    row = np.random.default_rng(seed).normal(0, spread, 3000).astype(np.float32)
    order = np.lexsort((np.arange(row.size), -row))
    weights = np.exp(row[order] - row.max()).astype(np.float64)
    kept = order
    if "top_p" in cuts:
        kept = order[: int(np.searchsorted(np.cumsum(weights), cuts["top_p"] * weights.sum())) + 1]
    if "min_p" in cuts:
        kept = kept[row[kept] >= row.max() + np.float32(np.log(cuts["min_p"]))]
    noise = gumbel(noise_key(3, 0, TOKENS, 9), kept)
    assert choose(sampler(**cuts), row, 9) == kept[(row[kept] + noise).argmax()]
