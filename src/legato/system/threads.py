"""The threads that blocking work runs in: a few for each kind of work, so that no kind waits for another.

They receive calls and return what these return. A call that cannot begin soon is refused, so whoever asks has an
answer in bounded time. The store has threads of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from legato.errors import CapacityError, Overloaded

__all__ = ["ASIDE", "CONSTRAINTS", "PLANS", "SHORT_CONSTRAINTS", "Threads"]

_Result = TypeVar("_Result")


class Threads:
    """So many threads for one kind of work, and a bounded number of calls that wait for one of them."""

    def __init__(
        self, name: str, num: int, *, max_waiting: int, max_wait_s: float, busy: Callable[[], CapacityError]
    ) -> None:
        self._executor = ThreadPoolExecutor(num, f"legato-{name}")
        self._max_calls = num + max_waiting
        self._max_wait_s = max_wait_s
        self._busy = busy
        self._num_calls = 0
        self._lock = threading.Lock()  # Servers in several event loops may share the threads.

    async def run(self, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a blocking call, and return what it returns.

        A thread cannot be called back: cancelled before the call has begun it never runs, and later its end is waited
        for.

        Raises:
            CapacityError: too many calls wait already, or this one has waited too long; it has not begun.
        """
        with self._lock:
            if self._num_calls >= self._max_calls:
                raise self._busy()
            self._num_calls += 1
        call_made = self._executor.submit(call, *arguments)
        call_made.add_done_callback(self._leave)
        timer = asyncio.get_running_loop().call_later(self._max_wait_s, call_made.cancel)
        ended = asyncio.wrap_future(call_made)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not ended.done():
                try:
                    await asyncio.wait((ended,))
                except asyncio.CancelledError as error:
                    if call_made.cancel():
                        raise
                    cancelled = error
        finally:
            timer.cancel()
        if cancelled is not None:
            if not ended.cancelled():
                ended.exception()  # Nobody else will ask for it.
            raise cancelled
        if ended.cancelled():
            raise self._busy()
        return ended.result()

    def close(self) -> None:
        """Let the threads end, each with the call that it is in; what waits is called off."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, call: Future[Any]) -> None:
        with self._lock:
            self._num_calls -= 1


def _busy(what: str) -> Callable[[], Overloaded]:
    return lambda: Overloaded(f"the server is busy {what}; try again in 5 s", retry_after_s=5)


PLANS = Threads("plan", 4, max_waiting=128, max_wait_s=20, busy=_busy("reading other long prompts"))
"""For prompts that take long to become tokens."""

CONSTRAINTS = Threads("constraint", 2, max_waiting=32, max_wait_s=5, busy=_busy("trying other constraints"))
"""For requests with a constraint, which is tried first (`checker`)."""

SHORT_CONSTRAINTS = Threads("short", 1, max_waiting=32, max_wait_s=5, busy=_busy("trying other constraints"))
"""For those whose constraint is short, which most are, and which seldom takes long."""

ASIDE = Threads("aside", 4, max_waiting=64, max_wait_s=20, busy=_busy("with what takes long"))
"""For the rest: loading code and vocabularies, looking at the disk."""
