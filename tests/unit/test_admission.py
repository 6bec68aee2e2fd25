"""Places: bounded, in order of arrival, and never lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.admission import Admission
from legato.errors import Overloaded, RateLimited


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop of its own."""
    asyncio.run(test())


async def settle() -> None:
    """Let every task run until it waits for something else."""
    for _ in range(5):
        await asyncio.sleep(0)


class Guest:
    """A task that takes a place and keeps it until it is told to leave."""

    def __init__(self, admission: Admission, log: list[str] | None = None, name: str = "") -> None:
        self.is_inside = False
        self._admission = admission
        self._log = log
        self._name = name
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay())

    async def _stay(self) -> None:
        async with self._admission.place():
            self.is_inside = True
            if self._log is not None:
                self._log.append(self._name)
            try:
                await self._leave.wait()
            finally:
                self.is_inside = False

    def leave(self) -> None:
        """End the stay."""
        self._leave.set()


def test_some_run_some_wait_the_rest_are_turned_away() -> None:
    async def test() -> None:
        admission = Admission(max_running=2, max_waiting=3)
        guests = [Guest(admission) for _ in range(5)]
        await settle()
        assert (admission.num_running, admission.num_waiting) == (2, 3)

        with pytest.raises(RateLimited, match="2 requests are running and 3 are waiting, of at most 2 and 3") as caught:
            async with admission.place():
                pass
        assert (caught.value.status, caught.value.retry_after_s) == (429, 5)

        for guest in guests:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in guests))
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_jobs_that_come_together_are_turned_away_together() -> None:
    async def test() -> None:
        admission = Admission(max_running=2, max_waiting=3)
        guest = Guest(admission)
        await settle()
        admission.check(4)
        with pytest.raises(RateLimited, match="there is no room for 5 more: 1 requests are running and 0 are waiting"):
            admission.check(5)
        guest.leave()
        await guest.task

    run(test)


def test_whoever_came_first_goes_first() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=9)
        log: list[str] = []
        guests = [Guest(admission, log, name) for name in "abcdef"]
        await settle()
        guests[2].task.cancel()
        for guest in guests:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)
        assert "".join(log) == "abdef"

    run(test)


def test_a_newcomer_does_not_take_the_place_of_one_who_waits() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=9)
        log: list[str] = []
        first, second = Guest(admission, log, "first"), Guest(admission, log, "second")
        await settle()
        first.leave()
        await first.task  # `second` has the place now, but has not run yet.
        third = Guest(admission, log, "third")
        await settle()
        assert log == ["first", "second"]
        for guest in (second, third):
            guest.leave()
            await guest.task

    run(test)


def test_waiting_has_an_end() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=1, max_wait_s=0.01)
        guest = Guest(admission)
        await settle()
        with pytest.raises(Overloaded, match=r"no place became free within 0\.01 s") as caught:
            async with admission.place():
                pass
        assert (caught.value.status, caught.value.retry_after_s) == (503, 10)
        assert (admission.num_running, admission.num_waiting) == (1, 0)
        guest.leave()
        await guest.task
        assert admission.num_running == 0

    run(test)


def test_a_failure_inside_gives_the_place_back() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=1)
        with pytest.raises(ZeroDivisionError):
            async with admission.place():
                raise ZeroDivisionError
        assert admission.num_running == 0

    run(test)


def test_cancelled_just_after_the_place_was_granted() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=9)
        first, second, third = Guest(admission), Guest(admission), Guest(admission)
        await settle()
        first.leave()
        await first.task
        second.task.cancel()
        await settle()
        assert not second.is_inside
        assert third.is_inside
        third.leave()
        await third.task
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_cancelled_just_before_a_place_becomes_free() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=9)
        first, second, third = Guest(admission), Guest(admission), Guest(admission)
        await settle()
        first.leave()
        second.task.cancel()  # `first` runs, and gives its place back, before `second` does.
        await settle()
        assert second.task.cancelled()
        assert third.is_inside
        third.leave()
        await third.task
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    max_running=st.integers(1, 3),
    max_waiting=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["come", "come", "leave", "cancel", "yield"]), max_size=60),
)
def test_no_place_is_ever_lost(seed: int, max_running: int, max_waiting: int, steps: list[str]) -> None:
    """Guests come, leave and are cancelled at any moment; whoever is left gets a place, and all places come back."""

    async def test() -> None:
        chance = random.Random(seed)
        admission = Admission(max_running=max_running, max_waiting=max_waiting)
        guests: list[Guest] = []
        for step in steps:
            if step == "come":
                guests.append(Guest(admission))
            elif step == "yield":
                await asyncio.sleep(0)
            elif alive := [guest for guest in guests if not guest.task.done()]:
                guest = chance.choice([guest for guest in alive if guest.is_inside == (step == "leave")] or alive)
                guest.leave() if step == "leave" else guest.task.cancel()
            assert sum(guest.is_inside for guest in guests) <= admission.num_running <= max_running
            assert admission.num_waiting <= max_waiting
        await settle()
        num_alive = sum(not guest.task.done() for guest in guests)
        assert sum(guest.is_inside for guest in guests) == min(max_running, num_alive)
        for guest in guests:
            guest.leave()
        ends = await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), RateLimited, asyncio.CancelledError}
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)
