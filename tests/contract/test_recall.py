"""The embedded engine's memory for who types: an answer given from it is what the model writes without it.

Somebody types into a gap, takes over what was foretold, deletes and moves: a few times in CI, `--typed` says how often.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from legato.run.admission import Admission
from legato.run.models import Model
from legato.run.plan import plan
from legato.types import CompletionRequest, Infill, Job, SamplingOptions
from tests.contract.test_engines import data_of, steps_of
from tests.contract.test_reuse import engine_with

GAPS = [
    ("def area(w, h):\n    return w * h\n\n\ndef perimeter(w, h):\n", "\n\nprint(perimeter(2, 3))\n"),
    ("The keeper wrote in the log that the sea was calm, and", " before the storm came back.\n"),
    ("| city | country |\n| --- | --- |\n| Paris | France |\n| Rom", "\n| Oslo | Norway |\n"),
    ("Die Brücke über den Fluss ist", ", und niemand weiß, warum.\n"),
]
TYPED = ["\t", " ", "    ", "\n", "r", "re", "the ", "2", "(", "é", "x = ", "un"]
NUM_ASKED = 6
"""Answers of one sequence."""


class Typist:
    """Somebody in one of the gaps, at the end of a text of his own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.before, self.suffix = self._random.choice(GAPS)
        self.text = ""
        self._texts = [""]
        self._sampling = SamplingOptions(temperature=self._random.choice((0.0, 0.8)), seed=seed)

    def edit(self, foretold: str) -> None:
        """Change the text; what is foretold is taken over more often than not."""
        match self._random.choices(("type", "accept", "delete", "back", "move"), (4, 4, 3, 2, 1))[0]:
            case "type":
                self.text += self._random.choice(TYPED)
            case "accept":
                self.text += foretold[: self._random.randint(1, 12)]
            case "delete":
                self.text = self.text[: -self._random.randint(1, 6)]
            case "back":
                self.text = self._random.choice(self._texts)
            case _:
                self.before, self.suffix = self._random.choice(GAPS)
        self._texts.append(self.text)

    def request(self) -> CompletionRequest:
        """What is asked for there; it is always read exactly, so that nothing else makes a difference."""
        return CompletionRequest(
            "m",
            Infill(self.before + self.text, self.suffix, is_prompted=True),
            self._sampling,
            max_tokens=self._random.randint(2, 6),
            deterministic=True,
        )


def test_an_answer_from_memory_is_what_the_model_writes(request: pytest.FixtureRequest) -> None:
    num_sequences: int = request.config.getoption("--typed")

    async def check() -> int:
        num_recalled = 0
        async with engine_with() as engine:
            model = Model("m", engine, Admission())

            async def answer(job: Job) -> tuple[bytes, str | None, int]:
                before = (await engine.measure())["steps"]
                steps = await steps_of(engine, job)
                return data_of(steps), steps[-1].finish, (await engine.measure())["steps"] - before

            for seed in range(num_sequences):
                typist, foretold = Typist(seed), ""
                for _ in range(NUM_ASKED):
                    typist.edit(foretold)
                    (job,) = plan(typist.request(), model).jobs
                    data, finish, num_steps = await answer(job)
                    alone, end, num_alone = await answer(replace(job, is_typed=False))
                    assert (data, finish) == (alone, end), (seed, typist.before, typist.text)
                    num_recalled += num_steps < num_alone
                    foretold = alone[len(job.prompt.heal) :].decode("utf-8", "ignore")
        return num_recalled

    assert asyncio.run(check()) >= num_sequences
