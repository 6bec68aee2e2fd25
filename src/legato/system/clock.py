"""What time it is, as a value that is passed in. What may run while a clock is set must not trust one reading of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass(frozen=True, slots=True)
class Clock:
    """Two clocks of one machine."""

    wall: Callable[[], float] = time.time
    """Seconds since 1970, as everybody's clock has them. It may be set, forwards or backwards."""
    steady: Callable[[], float] = time.monotonic
    """Seconds since some moment. It is never set, and means nothing to another process."""

    def day(self) -> str:
        """Return the day, in UTC, as YYYY-MM-DD."""
        return time.strftime("%Y-%m-%d", time.gmtime(self.wall()))
