"""What moves on standard error while somebody waits at a terminal."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import click

from legato.logs import escape
from legato.system.supervisor import beside

__all__ = ["Estimate", "is_watched", "loading"]

_FRAMES = "|/-\\"
_FRAME_S = 0.1
_WINDOW_S = 15.0
"""The rate of a download is that of so many seconds."""
_LEAST_S = 3.0
"""Before it has run for so long, its rate says nothing."""
_MAX_LEFT_S = 24 * 3600
"""A longer time is not worth telling: the rate will not stay what it is."""


def is_watched() -> bool:
    """Whether somebody sees standard error as it is written."""
    return sys.stderr.isatty()


@asynccontextmanager
async def loading(name: str) -> AsyncIterator[None]:
    """Turn a spinner on a terminal as long as the block runs; say nothing elsewhere."""
    if not is_watched():
        yield
        return
    label = f" Loading {escape(name)}"
    _draw(_FRAMES[0] + label)
    try:
        async with beside(_spin(label)):
            yield
    finally:
        _draw(" " * (1 + len(label)))
        _draw("")


async def _spin(label: str) -> None:
    for frame in itertools.cycle(_FRAMES):
        _draw(frame + label)
        await asyncio.sleep(_FRAME_S)


def _draw(line: str) -> None:
    """Write over the line that the cursor is in."""
    with suppress(OSError):
        click.echo(f"\r{line}", nl=False, err=True)


class Estimate:
    """How much longer something takes that has so many bytes, judged by the last seconds."""

    def __init__(self, size_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size_bytes
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()
        """When how many bytes were there. What was there at the beginning has taken no time."""

    def tell(self, num_bytes: int) -> str:
        """Take note of how many bytes there are now, and return what is known; nothing, if that is not enough."""
        now = self._clock()
        self._seen.append((now, num_bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
            self._seen.popleft()
        begun, first = self._seen[0]
        if now - begun < _LEAST_S or num_bytes <= first:
            return ""
        rate = (num_bytes - first) / (now - begun)
        left_s = (self._size - num_bytes) / rate
        speed = f"{rate / 1e6:.1f} MB/s" if rate >= 1e6 else f"{rate / 1e3:.0f} kB/s"
        return speed + (_about(left_s) if left_s < _MAX_LEFT_S else "")


def _about(seconds: float) -> str:
    """Say a time as roughly as it is known."""
    if seconds < 60:
        return f", {max(5, round(seconds / 5) * 5)} s left"
    if seconds < 90 * 60:
        return f", {round(seconds / 60)} min left"
    return f", {round(seconds / 3600)} h left"
