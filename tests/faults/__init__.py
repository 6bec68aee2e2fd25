"""Faults on purpose: what fails at the n-th call, for every n that a scenario has.

After each of them nothing hangs, nothing is lost or doubled, and the next request works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

__all__ = ["HANGS_AFTER_S", "Faults", "tried"]

HANGS_AFTER_S = 10.0
"""What takes longer hangs."""

tried: Counter[str] = Counter()
"""How many faults the run has tried, by what failed; printed at its end (`tests/conftest.py`)."""


class Faults:
    """Counts the calls of each kind, and lets one of them fail: the n-th of its kind, counted from 1.

    `name` is what the run's end tells of it.
    """

    def __init__(
        self, name: str = "", kind: str = "", n: int = 0, error: Callable[[], BaseException] = OSError
    ) -> None:
        self.calls: Counter[str] = Counter()
        self.has_failed = False
        self._kind = kind
        self._n = n
        self._error = error
        if kind:
            tried[name] += 1

    def call(self, kind: str) -> None:
        """Count a call, or fail."""
        self.calls[kind] += 1
        if kind == self._kind and self.calls[kind] == self._n:
            self.has_failed = True
            raise self._error()
