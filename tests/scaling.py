"""Whether work grows as what it is done on: by comparing times, as machines differ and are never quiet."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["growth"]


def growth(work: Callable[[int], object], num: int) -> float:
    """How many times as long work takes on four times as much: 4 if it is linear, 16 if it is quadratic.

    The least of eight ratios is taken, since the machine is not ours alone. `num` should be large enough for what is
    quadratic to show.
    """
    return min(_seconds(work, 4 * num) / max(_seconds(work, num), 1e-9) for _ in range(8))


def _seconds(work: Callable[[int], object], num: int) -> float:
    """The processor's time, which others on the machine lengthen least."""
    start = time.thread_time()
    work(num)
    return time.thread_time() - start
