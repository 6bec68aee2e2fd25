"""What a measurement is: samples by server, and how they are summed up.

Knows neither servers nor files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["SIZES", "Measure", "Size", "Unit"]

Unit = Literal["tokens/s", "events/s", "s", "x", "%", "points"]
"""`x` is a ratio of times, `%` a share of hits (1) and misses (0), `points` a mean of differences of such."""

_Z = 1.96


@dataclass(frozen=True)
class Measure:
    """One measure on some servers."""

    suite: str
    name: str
    unit: Unit
    samples: Mapping[str, Sequence[float]]
    """By the server's name; a server that it cannot be measured on has none."""

    def value(self, server: str) -> float | None:
        """Sum the samples up: a share, a mean or a median; None if there are none."""
        samples = self.samples.get(server)
        if not samples:
            return None
        return 100 * statistics.fmean(samples) if self.unit in ("%", "points") else statistics.median(samples)

    def interval(self, server: str) -> tuple[float, float]:
        """Return the bounds between which the value is with 95 % confidence; for medians, the extremes."""
        samples = self.samples[server]
        num, mean = len(samples), statistics.fmean(samples)
        if self.unit == "%":  # Wilson's
            centre = (mean + _Z**2 / (2 * num)) / (1 + _Z**2 / num)
            half = _Z / (1 + _Z**2 / num) * math.sqrt(mean * (1 - mean) / num + _Z**2 / (4 * num**2))
            return max(0.0, 100 * (centre - half)), min(100.0, 100 * (centre + half))
        if self.unit == "points":
            half = _Z * statistics.pstdev(samples) / math.sqrt(num)
            return 100 * (mean - half), 100 * (mean + half)
        return min(samples), max(samples)

    def gain(self, server: str, other: str) -> float | None:
        """Return how many times better `server` does; None where that has no meaning."""
        mine, theirs = self.value(server), self.value(other)
        if self.unit in ("%", "points") or not mine or not theirs:
            return None
        return mine / theirs if self.unit.endswith("/s") else theirs / mine


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    repeats: int
    """Of everything that is timed."""
    tokens: int
    """Written in a timed stream, and in a text that is cut."""
    long_words: int
    """Words of a long prompt."""
    kinds: int
    """Kinds of texts that are cut."""
    cuts: int
    """Of one text."""
    positions: int
    """In texts that people wrote, for each place of the cut; infills, a quarter of it for each language."""
    keys: int
    """Typed into a file, for each repetition."""
    clients: int
    """Of the scripted engine."""
    streams: tuple[int, ...]
    """That write at the same time."""


SIZES = {
    "full": Size(
        repeats=5,
        tokens=128,
        long_words=600,
        kinds=12,
        cuts=8,
        positions=400,
        keys=40,
        clients=300,
        streams=(1, 4, 8),
    ),
    "short": Size(
        repeats=3,
        tokens=64,
        long_words=300,
        kinds=12,
        cuts=4,
        positions=60,
        keys=20,
        clients=300,
        streams=(1, 4, 8),
    ),
    "quick": Size(
        repeats=1,
        tokens=16,
        long_words=40,
        kinds=2,
        cuts=2,
        positions=4,
        keys=3,
        clients=10,
        streams=(1, 2),
    ),
}
"""The last is only to see that everything runs."""
