"""Places: bounded, shared fairly between callers, and never lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.errors import Overloaded, RateLimited
from legato.run.admission import Admission, Claim


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop of its own."""
    asyncio.run(test())


async def settle() -> None:
    """Let every task run until it waits for something else."""
    for _ in range(8):
        await asyncio.sleep(0)


class Guest:
    """A request that takes its places and keeps each until it is told to leave."""

    def __init__(
        self, admission: Admission, log: list[str] | None = None, name: str = "", *, caller: str = "", num: int = 1
    ) -> None:
        self.num_inside = 0
        self.caller = caller
        self._admission = admission
        self._log = log
        self._name = name
        self._num = num
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._stay())

    async def _stay(self) -> None:
        async with self._admission.claim(self.caller, self._num) as claim:
            if self._log is not None:
                self._log.append(self._name)
            async with asyncio.TaskGroup() as choices:
                for _ in range(self._num):
                    choices.create_task(self._sit(claim))

    async def _sit(self, claim: Claim) -> None:
        async with claim.place():
            self.num_inside += 1
            try:
                await self._leave.wait()
            finally:
                self.num_inside -= 1

    @property
    def is_refused(self) -> bool:
        """Whether it was turned away."""
        return self.task.done() and isinstance(self.task.exception(), RateLimited)

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
            async with admission.claim("", 1):
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
        with pytest.raises(RateLimited, match="there is no room for 5 more: 1 requests are running and 0 are waiting"):
            async with admission.claim("", 5):
                pass
        assert (admission.num_running, admission.num_waiting) == (1, 0)
        others = Guest(admission, num=4)
        await settle()
        assert (others.num_inside, admission.num_running, admission.num_waiting) == (1, 2, 3)
        guest.leave()
        others.leave()
        await asyncio.gather(guest.task, others.task)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

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
            async with admission.claim("", 1):
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
            async with admission.claim("", 1):
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
        assert second.num_inside == 0
        assert third.num_inside == 1
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
        assert third.num_inside == 1
        third.leave()
        await third.task
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_a_request_that_has_a_place_is_never_turned_away() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=3, max_wait_s=0.01)
        guest = Guest(admission, num=4)
        await asyncio.sleep(0.05)
        assert (guest.num_inside, admission.num_waiting) == (1, 3)
        with pytest.raises(RateLimited):
            async with admission.claim("other", 1):
                pass
        guest.leave()
        await guest.task
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_a_request_may_wait_less_than_others() -> None:
    async def test() -> None:
        admission = Admission(max_running=1)
        guest = Guest(admission)
        await settle()
        with pytest.raises(Overloaded, match=r"within 0\.02 s"):
            async with admission.claim("", 1, timeout_s=0.02):
                pass
        guest.leave()
        await guest.task

    run(test)


def test_two_requests_that_each_want_every_place_both_end() -> None:
    async def test() -> None:
        admission = Admission(max_running=64, max_waiting=256)
        log: list[str] = []
        guests = [Guest(admission, log, name, num=64, caller=name) for name in "ab"]
        await settle()
        assert [guest.num_inside for guest in guests] == [64, 0]
        for guest in guests:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in guests))
        assert log == ["a", "b"]
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_callers_take_turns() -> None:
    async def test() -> None:
        admission = Admission(max_running=1)
        log: list[str] = []
        guests = [Guest(admission, log, name, caller=name[0]) for name in ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]]
        await settle()
        late = Guest(admission, log, "d1", caller="d")
        await settle()
        for guest in [*guests, late]:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in [*guests, late]))
        assert log == ["a1", "a2", "b1", "c1", "d1", "a3", "b2", "a4"]

    run(test)


def test_the_places_of_a_large_request_are_turns_too() -> None:
    async def test() -> None:
        admission = Admission(max_running=1)
        first, large, small = Guest(admission), Guest(admission, caller="a", num=5), Guest(admission, caller="b")
        await settle()
        first.leave()
        await settle()
        assert (large.num_inside, small.num_inside) == (1, 0)
        large.leave()
        await settle()
        assert (large.num_inside, small.num_inside, admission.num_waiting) == (0, 1, 4)
        small.leave()
        await asyncio.gather(first.task, large.task, small.task)

    run(test)


def test_in_a_full_queue_the_last_of_whoever_has_most_waiting_goes() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=4)
        flood = [Guest(admission, caller="a") for _ in range(5)]
        await settle()
        assert admission.num_waiting == 4
        others = [Guest(admission, caller="b") for _ in range(3)]
        await settle()
        assert [guest.is_refused for guest in flood] == [False, False, False, True, True]
        assert [guest.is_refused for guest in others] == [False, False, True], "no more than half is b's share"
        more = Guest(admission, caller="a")
        await settle()
        assert more.is_refused
        assert (admission.num_running, admission.num_waiting) == (1, 4)
        for guest in [*flood, *others]:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in [*flood, *others]), return_exceptions=True)
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


def test_nobody_goes_for_a_request_that_would_not_fit_even_so() -> None:
    async def test() -> None:
        admission = Admission(max_running=1, max_waiting=4)
        flood = [Guest(admission, caller="a") for _ in range(5)]
        await settle()
        with pytest.raises(RateLimited, match="no room for 3 more"):
            async with admission.claim("b", 3):
                pass
        assert not any(guest.is_refused for guest in flood)
        for guest in flood:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in flood))

    run(test)


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    max_running=st.integers(1, 3),
    max_waiting=st.integers(1, 6),
    steps=st.lists(st.sampled_from(["come", "come", "leave", "cancel", "yield"]), max_size=60),
)
def test_no_place_is_ever_lost(seed: int, max_running: int, max_waiting: int, steps: list[str]) -> None:
    """Requests of several callers and sizes come, leave and are cancelled at any moment; whoever is left gets its
    places, and all places come back.
    """

    async def test() -> None:
        chance = random.Random(seed)
        admission = Admission(max_running=max_running, max_waiting=max_waiting)
        guests: list[Guest] = []
        for step in steps:
            if step == "come":
                guests.append(Guest(admission, caller=chance.choice("abc"), num=chance.choice([1, 1, 1, 2, 3])))
            elif step == "yield":
                await asyncio.sleep(0)
            elif alive := [guest for guest in guests if not guest.task.done()]:
                fitting = [guest for guest in alive if (guest.num_inside > 0) == (step == "leave")]
                guest = chance.choice(fitting or alive)
                guest.leave() if step == "leave" else guest.task.cancel()
            assert sum(guest.num_inside for guest in guests) <= admission.num_running <= max_running
            assert admission.num_waiting <= max_waiting
        await settle()
        assert admission.num_waiting == 0 or admission.num_running == max_running, "a place is free and somebody waits"
        for guest in guests:
            guest.leave()
        ends = await asyncio.gather(*(guest.task for guest in guests), return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), RateLimited, asyncio.CancelledError}
        assert (admission.num_running, admission.num_waiting) == (0, 0)

    run(test)


@settings(deadline=None, max_examples=100)
@given(
    max_running=st.integers(1, 3),
    flood=st.integers(1, 30),
    others=st.lists(st.sampled_from("bcd"), min_size=1, max_size=6),
    rest=st.integers(0, 3),
)
def test_nobody_waits_longer_than_a_turn_for_a_caller_who_floods(
    max_running: int, flood: int, others: list[str], rest: int
) -> None:
    """However much `a` asks for, and goes on to ask for, another's next request is at most one turn away."""

    async def test() -> None:
        admission = Admission(max_running=max_running)
        log: list[str] = []
        guests = [Guest(admission, log, "a", caller="a") for _ in range(max_running + flood)]
        await settle()
        guests += [Guest(admission, log, name, caller=name) for name in others]
        await settle()
        del log[:]
        num_callers = len({"a", *others})
        for at in range(len(others) * num_callers):
            if at < rest:
                guests.append(Guest(admission, log, "a", caller="a"))
            next(guest for guest in guests if guest.num_inside and not guest.task.done()).leave()
            await settle()
            left = {name: others.count(name) - log.count(name) for name in set(others)}
            for name in set(others):
                assert left[name] == 0 or log.count("a") <= log.count(name) + 1
            if not any(left.values()):
                break
        assert {name: log.count(name) for name in set(others)} == {name: others.count(name) for name in set(others)}
        for guest in guests:
            guest.leave()
        await asyncio.gather(*(guest.task for guest in guests))

    run(test)
