"""Jobs that overlap on a real model: whoever shares beginnings with others, whatever they write, writes what it writes
alone; also afterwards.

The texts are not cut from one true text: they part from each other inside words whose healed spelling is still being
written, and go on as no model would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from legato.engines.llamacpp.binding import Model
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.profiles import profile_from_metadata
from legato.prompting import render
from legato.seam import Seam
from legato.types import CompletionRequest, Job, Sampling, Text
from tests.conftest import DEFAULT, SMALL, weights

MAX_SEQUENCES = 130
STARTS = (
    "Paris is the capital city of Fra",
    "def quick_sort(array):\n    if len(arr",
    "Die Kinder warteten auf dem Bahnst",
    '{"name": "Ada", "born": 18',
    "春天来了，花园里的花都开",
)
ENDS = (
    "",
    "",
    "",
    "\n\nThe word above",
    "g",
    "nce and Ger",
    " x = 1",
    "(1)",
    " — no, ",
    "eig",
    "ay) <= 1:\n\tret",
    "è",
)


class Bench:
    """One model, and a new scheduler for each time."""

    def __init__(self, name: str) -> None:
        self.model = Model(
            weights(name), context_length=1024, num_cells=0, max_batch=256, max_sequences=MAX_SEQUENCES, num_threads=2
        )
        vocabulary = self.model.vocabulary
        self.seam = Seam(vocabulary)
        control = {id: vocabulary.pieces[id] for id in vocabulary.control_ids}
        self.profile = profile_from_metadata(vocabulary.metadata, control, self.model.context_length)
        self._alone: dict[tuple[str, int, float], bytes] = {}

    def job(self, id: str, text: str, sampling: Sampling, max_tokens: int = 10) -> Job:
        (prompt,) = render(CompletionRequest("", Text((text,))), self.profile, self.model.vocabulary, self.seam)
        return Job(id, 0, prompt, max_tokens, sampling)

    def scheduler(self) -> Scheduler:
        self.model.clear()
        return Scheduler(
            self.model,
            self.seam,
            context_length=self.model.context_length,
            max_batch=256,
            max_sequences=MAX_SEQUENCES,
            spill=Spill(0, None, ""),
        )

    def alone(self, text: str, sampling: Sampling) -> bytes:
        """Return what a Job writes on an empty cache."""
        key = (text, sampling.seed, sampling.temperature)
        if key not in self._alone:
            self._alone[key] = run(self.scheduler(), [self.job("alone", text, sampling)])["alone"]
        return self._alone[key]


def run(scheduler: Scheduler, jobs: list[Job], pauses: Iterator[int] | None = None) -> dict[str, bytes]:
    """Submit Jobs, each some steps after the one before, and return what they write."""
    written = {job.id: b"" for job in jobs}
    left = [*jobs]
    wait = 0
    while left or not scheduler.is_idle:
        while left and wait <= 0:
            scheduler.submit(left.pop(0))
            wait = next(pauses) if pauses else 0
        wait -= 1
        for id, step in scheduler.step():
            assert not isinstance(step, Exception), step
            written[id] += b"".join(token.data for token in step.tokens)
    return written


def texts_of(bench: Bench, random: random.Random) -> list[str]:
    """Return eight texts that begin alike, cut at and behind each other's answers."""
    start = random.choice(STARTS)
    texts = [start]
    while len(texts) < 8:
        text = random.choice(texts)
        answer = bench.alone(text, Sampling(seed=0, temperature=0.0))
        whole = text + answer[len(bench.job("", text, Sampling(0, 0.0)).prompt.heal) :].decode("utf-8", "ignore")
        texts.append(whole[: random.randint(len(start) - 6, min(len(whole), len(start) + 30))] + random.choice(ENDS))
    return texts


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "share"), [(SMALL, 1.0), (DEFAULT, 0.2)], ids=["small", "default"])
def test_any_overlap_gives_each_the_text_that_it_has_alone(name: str, share: float, num_overlaps: int) -> None:
    different: list[str] = []
    num = 0
    bench = Bench(name)
    for index in range(round(num_overlaps * share)):
        draws = random.Random(index)
        texts = texts_of(bench, draws)
        samplings = [Sampling(draws.randint(0, 1), draws.choice([0.0, 0.0, 0.8])) for _ in texts]
        expected = [bench.alone(text, sampling) for text, sampling in zip(texts, samplings, strict=True)]
        scheduler = bench.scheduler()
        for when in ("beside", "afterwards"):
            order = draws.sample(range(8), 8)
            jobs = [bench.job(str(at), texts[at], samplings[at]) for at in order]
            pauses = iter([draws.choice([0, 1, 2, 3, 5]) for _ in jobs]) if when == "beside" else None
            written = run(scheduler, jobs, pauses)
            num += len(jobs)
            different += [
                f"{index} {when}: {texts[at]!r} {samplings[at]}: {written[str(at)]!r} is {expected[at]!r} alone"
                for at in range(8)
                if written[str(at)] != expected[at]
            ]
    assert not different, f"{len(different)} of {num}"
