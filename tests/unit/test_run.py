"""Planning, counting and folding, over scripted engines."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from legato.dialects import openai
from legato.engines.scripted import Script, ScriptedEngine
from legato.run.admission import Admission
from legato.run.answers import choose_best
from legato.run.models import Model
from legato.run.plan import plan
from legato.types import Answer, Delta, Times, Usage


def answer(choice: int, mean_logprob: float | None) -> Answer:
    """An answer with its likelihood."""
    return Answer(choice, f"text {choice}", (), "stop", None, Usage(3, 2), Times(0, 0), mean_logprob)


def test_the_likeliest_are_kept_prompt_by_prompt_and_numbered_anew() -> None:
    means = [-3.0, -1.0, -2.0, -0.5, -0.1, -0.7]
    kept = choose_best([answer(at, mean) for at, mean in enumerate(means)], 3, 2)
    assert [(each.choice, each.text) for each in kept] == [(0, "text 1"), (1, "text 2"), (2, "text 4"), (3, "text 3")]


@pytest.mark.parametrize(
    ("means", "first"), [([-1.0, -1.0], "text 0"), ([None, -9.0], "text 1"), ([None, None], "text 0")]
)
def test_of_equals_the_earlier_wins_and_an_empty_answer_comes_last(means: list[float | None], first: str) -> None:
    (kept,) = choose_best([answer(at, mean) for at, mean in enumerate(means)], 2, 1)
    assert kept.text == first


def test_nothing_is_moved_where_nothing_is_chosen() -> None:
    answers = tuple(answer(at, mean) for at, mean in enumerate([-3.0, -1.0]))
    assert choose_best(answers, 2, 2) == answers


SCRIPT: Script = [b"one ", "zwö".encode(), b"", b" three"]
NUM_TOKENS = 14


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"stop": ["zz"]}, {"return_token_ids": True}, {"echo": True}])
def test_whoever_leaves_after_any_event_has_paid_for_what_was_shown(
    num_choices: int, fields: dict[str, object]
) -> None:
    model = Model("m", ScriptedEngine(SCRIPT), Admission())
    body = {"model": "m", "prompt": "four", "max_tokens": 50, "n": num_choices, **fields}

    async def leave(after: int) -> tuple[int, str, Usage]:
        """Read so many events; return how many came, their text, and what was counted."""
        run = plan(openai.CompletionsDialect().parse(body), model)
        num, shown = 0, ""
        async with aclosing(run.events()) as events:
            async for event in events:
                shown += event.text if isinstance(event, Delta) else ""
                num += 1
                if num == after:
                    break
        return num, shown, run.taken()

    echoed = len("four") * num_choices if "echo" in fields else 0
    after = 0
    while True:
        after += 1
        num, shown, taken = asyncio.run(leave(after))
        num_shown = max(0, len(shown.encode()) - echoed)
        assert num_shown <= taken.completion_tokens <= NUM_TOKENS * num_choices
        if num_choices == 1 and not fields:
            assert taken.completion_tokens == num_shown, after
        if num < after:
            break
        assert taken.prompt_tokens == 4
    assert taken.completion_tokens == NUM_TOKENS * num_choices
