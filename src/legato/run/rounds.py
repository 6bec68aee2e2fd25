"""One answer in several rounds: where one ends at its limit, the next goes on by itself.

It receives a Job and returns its Steps, as one engine would write them in one go. It knows no text, request or wire
format: stops, thinking, loops and usage are settled behind it, where all rounds are one stream already.

A round goes on behind the very tokens that the last one wrote, as after a crash, so by the second law rounds differ
from one long run in nothing but where the engine may turn to others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from legato.engines.base import Engine
from legato.types import Job, Step, Token

__all__ = ["Continuation"]


class Continuation:
    """Runs a Job, once."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine = engine
        self._job = job
        self.num = 1
        """Rounds that have begun."""

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yield the Steps of all rounds: one acceptance, one finish. Close the iterator to cancel the round that runs.

        Raises:
            EngineError: a round could not be finished.
        """
        rest: Job | None = self._job
        is_accepted = False
        while rest is not None:
            job, rest = rest, None
            written: list[Token] = []
            async with aclosing(self._engine.generate(_first_round(job))) as steps:
                async for step in steps:
                    written += step.tokens
                    if step.finish == "length" and (rest := _rest(job, written)) is not None:
                        step = replace(step, finish=None)
                    if step.tokens or step.prompt or step.finish or not is_accepted:
                        yield step
                    is_accepted = True
            self.num += rest is not None


def _first_round(job: Job) -> Job:
    return job if job.max_round_tokens is None else replace(job, max_tokens=min(job.max_tokens, job.max_round_tokens))


def _rest(job: Job, written: list[Token]) -> Job | None:
    """Return what is left of a Job after a round that ended at its limit; None: nothing, or the round wrote nothing."""
    rest = replace(job.resumed(written), score_prompt=False)
    return rest if 0 < rest.max_tokens < job.max_tokens else None
