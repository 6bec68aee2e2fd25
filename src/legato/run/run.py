"""A planned request, and how its choices run side by side.

It receives Jobs and a `Model`, and returns the events of all choices as one stream. It knows no wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from legato.run.admission import Claim
from legato.run.answers import total_usage
from legato.run.events import ChoiceEvents, Event
from legato.run.models import Model
from legato.system.supervisor import beside, together
from legato.types import CompletionRequest, Job, Token, Usage

__all__ = ["Report", "Run"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was done with a request that its answer does not show."""

    seed: int
    healed_bytes: tuple[int, ...]
    """Per prompt."""
    clipped: tuple[str, ...]
    truncated: Mapping[str, int]
    """What an infill's context had no room for: characters of `prefix` and `suffix`, number of `files`."""
    ignored: tuple[str, ...]
    absent: tuple[str, ...] = ()
    """What the model's engine cannot do for this answer: `canonical` sampling, or noise by the place in the text."""


@dataclass(frozen=True, slots=True)
class Run:
    """A planned request. `events` runs it, once."""

    request: CompletionRequest
    """With the model's name and the seed, where they were left open."""
    model: Model
    jobs: tuple[Job, ...]
    """Prompt by prompt, `num_drawn` each: a Job's place here is its choice's index."""
    num_drawn: int
    report: Report
    written: tuple[Token, ...] = ()
    """Tokens that another run of the only Job has written before it was broken off: this one goes on behind them, with
    the same events.
    """
    tokens: list[Token] | None = None
    """If it is a list, all tokens of the only Job are added to it before the events that they make."""
    usages: dict[int, Usage] = field(default_factory=dict)
    """What each choice has taken so far, by its index; those that an engine has accepted."""

    def taken(self) -> Usage:
        """Return what all have taken so far."""
        taken = [self.usages.get(choice, Usage(0, 0)) for choice in range(len(self.jobs))]
        return total_usage(taken, self.num_drawn)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of all choices as they come. Close the iterator to cancel everything.

        Raises:
            CapacityError: before the first event, if there is no place, or none in time.
            EngineError: a choice could not be finished.
        """
        if not self.jobs:
            return
        timeout_s = self.request.timeout_s
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        places = self.model.admission.claim(self.request.caller, len(self.jobs), timeout_s=timeout_s)
        async with places as claim:
            choices = [self._choice(choice, claim, deadline) for choice in range(len(self.jobs))]
            async with aclosing(choices[0] if len(choices) == 1 else _joined(choices)) as events:
                async for event in events:
                    yield event

    def _choice(self, choice: int, claim: Claim, deadline: float | None) -> AsyncGenerator[Event, None]:
        events = ChoiceEvents(
            self.request,
            self.jobs[choice],
            choice,
            self.model.engine,
            written=self.written,
            tokens=self.tokens,
            usages=self.usages,
        )
        return events.events(claim, deadline)


async def _joined(choices: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Run all choices side by side. None waits for a reader: what is not read yet is bounded by `max_tokens`."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def forward(choice: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(choice) as events:
                async for event in events:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except BaseException as error:  # noqa: BLE001 - handed over, and raised by the reader
            queue.put_nowait(error)

    async with beside(together(*map(forward, choices))):
        left = len(choices)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
