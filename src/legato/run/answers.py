"""From the events of a run to whole answers: what an answer without `stream` is made of.

It receives events and answers, and returns answers and their usage. It knows no Jobs and no wire format.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from legato.run.events import Event
from legato.types import Accepted, Answer, Delta, Finished, Usage

__all__ = ["choose_best", "collect", "total_usage"]


async def collect(events: AsyncIterator[Event]) -> tuple[Answer, ...]:
    """Fold a stream into whole choices, by index."""
    prompts: dict[int, tuple[int, ...]] = {}
    deltas: defaultdict[int, list[Delta]] = defaultdict(list)
    answers = {}
    async for event in events:
        match event:
            case Accepted(choice, prompt_ids):
                prompts[choice] = prompt_ids
            case Delta(choice):
                deltas[choice].append(event)
            case Finished(choice, reason, matched, usage, times, mean_logprob):
                thoughts = [delta.text for delta in deltas[choice] if delta.channel == "reasoning"]
                answers[choice] = Answer(
                    choice,
                    text="".join(delta.text for delta in deltas[choice] if delta.channel == "content"),
                    tokens=tuple(token for delta in deltas[choice] for token in delta.tokens),
                    reason=reason,
                    matched=matched,
                    usage=usage,
                    times=times,
                    mean_logprob=mean_logprob,
                    prompt_ids=prompts.get(choice, ()),
                    token_ids=tuple(id for delta in deltas[choice] for id in delta.token_ids),
                    reasoning="".join(thoughts) if thoughts else None,
                )
    return tuple(answers[choice] for choice in sorted(answers))


def choose_best(answers: Sequence[Answer], num_drawn: int, num_choices: int) -> tuple[Answer, ...]:
    """Keep of each prompt's answers the likeliest per token, the likeliest first; their places are their new indices.

    An answer without tokens comes last. Where as many are drawn as are kept, all stay as they are.
    """
    if num_drawn == num_choices:
        return tuple(answers)
    kept: list[Answer] = []
    for first in range(0, len(answers), num_drawn):
        drawn = answers[first : first + num_drawn]
        kept += sorted(drawn, key=_unlikeliness)[:num_choices]
    return tuple(replace(answer, choice=index) for index, answer in enumerate(kept))


def _unlikeliness(answer: Answer) -> float:
    return math.inf if answer.mean_logprob is None else -answer.mean_logprob


def total_usage(usages: Sequence[Usage], num_drawn: int) -> Usage:
    """Sum up usage over choices, by index; a prompt counts once, however many choices it has. Of the rounds the most
    that a choice took are told.
    """
    firsts = usages[::num_drawn]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in firsts),
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        num_rounds=max((usage.num_rounds for usage in usages), default=0),
    )
