"""A bounded number of places: some Jobs run, some wait, the rest are turned away.

It receives requests for a place and grants them in order of arrival. It knows no engine, and nothing about what a
place is used for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from legato.errors import Overloaded, RateLimited

__all__ = ["Admission"]


class Admission:
    """Places for one model. Not thread-safe: one event loop uses it."""

    def __init__(self, *, max_running: int = 64, max_waiting: int = 256, max_wait_s: float = 60.0) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """How many wait for a place."""
        return len(self._waiting)

    def check(self, num: int) -> None:
        """Turn `num` Jobs of one request away together, unless each of them can run or at least wait.

        Raises:
            RateLimited: there is no room.
        """
        room = self._max_running - self.num_running + self._max_waiting - self.num_waiting
        if num > room:
            raise RateLimited(
                f"there is no room for {num} more: {self.num_running} requests are running and {self.num_waiting} are "
                f"waiting, of at most {self._max_running} and {self._max_waiting}",
                retry_after_s=5,
            )

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place while the context is open.

        Raises:
            RateLimited: too many wait already.
            Overloaded: no place became free in time.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    async def _acquire(self) -> None:
        if self.num_running < self._max_running:
            self.num_running += 1
            return
        self.check(1)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release()  # The place was granted, but whoever waited for it is gone.
            elif turn in self._waiting:
                self._waiting.remove(turn)  # Otherwise `_release` has passed over it already.
            if isinstance(error, TimeoutError):
                raise Overloaded(f"no place became free within {self._max_wait_s:g} s", retry_after_s=10) from None
            raise

    def _release(self) -> None:
        """Hand the place to whoever waits longest, or give it back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_running -= 1
