"""An event loop in which hours take no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_leaping"]

_Result = TypeVar("_Result")


class _Leaping(selectors.DefaultSelector):
    """Does not wait: the time that it is to wait has passed."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Look, and let the time pass."""
        self.now += timeout or 0
        found: list[Any] = super().select(0)
        return found


class _Leap(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        """Return its own time."""
        return self._leaping.now


def run_leaping(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that only waits for time, and return what it does."""
    with asyncio.Runner(loop_factory=_Leap) as runner:
        return runner.run(work)
