"""Whether work grows as what it is done on: by comparing times, as machines differ and are never quiet."""

from __future__ import annotations

import timeit
from collections.abc import Callable

__all__ = ["growth"]


def growth(work: Callable[[int], object], num: int) -> float:
    """How many times as long work takes on four times as much: 4 if it is linear, 16 if it is quadratic.

    `num` should be large enough for what is quadratic to show.
    """
    few, many = (min(timeit.repeat(lambda size=size: work(size), number=1, repeat=3)) for size in (num, 4 * num))  # type: ignore[misc]
    return many / few
