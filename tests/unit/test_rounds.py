"""Rounds joined into the Steps of one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from legato.engines.scripted import Fault, Script, ScriptedEngine
from legato.errors import GenerationFailed
from legato.run.rounds import Continuation
from legato.types import Job, Prompt, Sampling, Step

TEXT = b"abcdefghijklmnop"


def job(max_tokens: int, size: int | None, heal: bytes = b"") -> Job:
    """A Job behind two tokens."""
    prompt = Prompt((1, 2), tuple(heal), heal, 2, 0, "")
    return Job("id", 0, prompt, max_tokens, Sampling(0, 0), max_round_tokens=size, min_tokens=3)


def on(job: Job) -> Script:
    """Go on where the Job was interrupted."""
    return [TEXT[job.num_resumed :]]


def run(job: Job, script: Callable[[Job], Script] = on) -> tuple[list[Step], int, ScriptedEngine]:
    """Return the Steps, the number of rounds, and the engine."""
    engine = ScriptedEngine(script)

    async def collect() -> tuple[list[Step], int]:
        rounds = Continuation(engine, job)
        return [step async for step in rounds.steps()], rounds.num

    return *asyncio.run(collect()), engine


@pytest.mark.parametrize(
    ("max_tokens", "size", "num"), [(10, None, 1), (10, 10, 1), (10, 12, 1), (10, 4, 3), (8, 4, 2)]
)
def test_rounds_are_accepted_once_and_end_once(max_tokens: int, size: int | None, num: int) -> None:
    steps, num_rounds, _ = run(job(max_tokens, size))
    assert num_rounds == num
    assert steps[0] == Step()
    assert [step for step in steps[1:] if not step.tokens] == []
    assert [step.finish for step in steps[1:]] == [None] * (num - 1) + ["length"]
    assert b"".join(token.data for step in steps for token in step.tokens) == TEXT[:max_tokens]


def test_what_is_resumed_is_what_is_left() -> None:
    seen = []

    def script(job: Job) -> Script:
        seen.append(job)
        return [TEXT[job.num_resumed :]]

    run(job(6, 2, heal=b"ab"), script)
    assert [(each.max_tokens, each.min_tokens, each.num_resumed) for each in seen] == [(2, 3, 0)]
    seen.clear()
    run(job(6, 2), script)
    assert [(each.max_tokens, each.min_tokens, each.num_resumed) for each in seen] == [(2, 3, 0), (2, 1, 2), (2, 0, 4)]
    assert seen[1].prompt.ids == (1, 2, *b"ab")
    assert (seen[1].prompt.origin, seen[1].prompt.heal, seen[1].prompt.tail) == (4, b"", ())


def test_an_end_by_itself_is_the_last() -> None:
    steps, num, _ = run(job(99, 5))
    assert (steps[-1].finish, num) == ("stop", 4)


def test_a_failure_is_passed_on() -> None:
    with pytest.raises(GenerationFailed):
        run(job(99, 5), lambda job: [b"abcde", Fault()] if job.num_resumed == 0 else [Fault()])


def test_closing_cancels_the_round_that_runs() -> None:
    engine = ScriptedEngine(lambda job: [bytes([byte]) for byte in TEXT[job.num_resumed :]])

    async def leave() -> None:
        async with aclosing(Continuation(engine, job(99, 5)).steps()) as steps:
            async for step in steps:
                if any(token.data == b"g" for token in step.tokens):
                    return

    asyncio.run(leave())
    assert engine.counters() == {"running": 0, "cancelled": 1}
