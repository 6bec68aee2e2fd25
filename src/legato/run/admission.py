"""A bounded number of places: some Jobs run, some wait, the rest are turned away.

It receives the claim of a request to one place or several. Callers who wait get places in turn, the requests of one
caller in order of arrival. It knows no engine, and nothing about what a place is used for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

from legato.errors import CapacityError, Overloaded, RateLimited

__all__ = ["Admission", "Claim"]


class Claim:
    """The places that one request waits for or holds. Made by `Admission.claim`."""

    def __init__(self, admission: Admission, num: int) -> None:
        self.num_waiting = num
        self.num_held = 0
        self.refusal: CapacityError | None = None
        self.decided = asyncio.Event()
        """Set when the first place is there, or the claim was refused."""
        self._admission = admission
        self._granted = asyncio.Semaphore(0)

    def grant(self) -> None:
        """Turn a place that was waited for into one that is held."""
        self.num_waiting -= 1
        self.num_held += 1
        self.decided.set()
        self._granted.release()

    def refuse(self, error: CapacityError) -> None:
        """Turn the whole claim away; only while it has no place."""
        self.refusal = error
        self.decided.set()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of the claimed places while the context is open, as soon as it is there."""
        await self._granted.acquire()
        try:
            yield
        finally:
            self._admission.give_back(self, 1)


class Admission:
    """Places for one model. Not thread-safe: one event loop uses it."""

    def __init__(self, *, max_running: int = 64, max_waiting: int = 256, max_wait_s: float = 60.0) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._queues: dict[str, deque[Claim]] = {}
        """What waits, by caller; the caller whose turn is next stands first."""
        self.num_running = 0

    @property
    def max_running(self) -> int:
        """How many places there are."""
        return self._max_running

    @property
    def num_waiting(self) -> int:
        """How many places are waited for."""
        return sum(map(_size, self._queues.values()))

    @asynccontextmanager
    async def claim(self, caller: str, num: int, *, timeout_s: float | None = None) -> AsyncIterator[Claim]:
        """Claim `num` places. The context opens when the first is there, and gives all back that are left.

        A claim is turned away as a whole, and only while it has no place: from then on it waits for the others as
        long as it takes. A place in use never waits for another one, so claims cannot block each other.

        Raises:
            RateLimited: too many wait already.
            Overloaded: no place became free in time; `timeout_s` may shorten that.
        """
        for name, other in self._displaced(caller, num):
            self._dequeue(name, other)
            other.refuse(self._no_room(other.num_waiting))
        claim = Claim(self, num)
        self._queues.setdefault(caller, deque()).append(claim)
        try:
            self._grant()
            await self._decided(claim, self._max_wait_s if timeout_s is None else min(timeout_s, self._max_wait_s))
            yield claim
        finally:
            if claim in self._queues.get(caller, ()):
                self._dequeue(caller, claim)
            self.give_back(claim, claim.num_held)

    def give_back(self, claim: Claim, num: int) -> None:
        """Free places that a claim holds."""
        claim.num_held -= num
        self.num_running -= num
        self._grant()

    async def _decided(self, claim: Claim, wait_s: float) -> None:
        try:
            if not claim.decided.is_set():
                async with asyncio.timeout(wait_s):
                    await claim.decided.wait()
        except TimeoutError:
            raise Overloaded(f"no place became free within {wait_s:g} s; try again in 10 s", retry_after_s=10) from None
        if claim.refusal is not None:
            raise claim.refusal

    def _grant(self) -> None:
        """Hand out free places, one to each caller in turn."""
        while self._queues and self.num_running < self._max_running:
            caller = next(iter(self._queues))
            claims = self._queues.pop(caller)
            self.num_running += 1
            claims[0].grant()
            if not claims[0].num_waiting:
                claims.popleft()
            if claims:
                self._queues[caller] = claims

    def _displaced(self, caller: str, num: int) -> list[tuple[str, Claim]]:
        """Choose who must go so that `num` more can at least wait: the last to come of whoever has most waiting.

        Nobody goes for a caller who would then have as many waiting.
        """
        missing = self.num_running + self.num_waiting + num - self._max_running - self._max_waiting
        sizes = {name: _size(claims) for name, claims in self._queues.items() if name != caller}
        own = num + _size(self._queues.get(caller, ()))
        last = {name: _refusable(self._queues[name]) for name in sizes}
        going: list[tuple[str, Claim]] = []
        while missing > 0:
            longest = max(sizes, key=sizes.__getitem__, default=caller)
            if sizes.get(longest, 0) <= own:
                raise self._no_room(num)
            claim = next(last[longest], None)
            if claim is None:
                del sizes[longest]
                continue
            going.append((longest, claim))
            sizes[longest] -= claim.num_waiting
            missing -= claim.num_waiting
        return going

    def _no_room(self, num: int) -> RateLimited:
        return RateLimited(
            f"there is no room for {num} more: {self.num_running} requests are running and {self.num_waiting} are "
            f"waiting, of at most {self._max_running} and {self._max_waiting}; try again in 5 s",
            retry_after_s=5,
        )

    def _dequeue(self, caller: str, claim: Claim) -> None:
        self._queues[caller].remove(claim)
        if not self._queues[caller]:
            del self._queues[caller]


def _size(claims: Iterable[Claim]) -> int:
    return sum(claim.num_waiting for claim in claims)


def _refusable(claims: deque[Claim]) -> Iterator[Claim]:
    """Yield the claims without a place, the last to come first."""
    return (claim for claim in reversed(claims) if not claim.decided.is_set())
