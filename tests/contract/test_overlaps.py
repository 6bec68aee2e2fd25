"""Jobs that overlap on a real model: whoever shares beginnings with others, whatever they write, writes what it writes
alone; also afterwards.

The texts are not cut from one true text: they part from each other inside words whose healed spelling is still being
written, and go on as no model would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from legato.decoding.seam import Seam
from legato.engines.llamacpp.binding import Model
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.prompting.profiles import profile_from_metadata
from legato.prompting.render import render
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


GREEDY = Sampling(seed=0, temperature=0.0)
SAMPLINGS = (GREEDY, GREEDY, Sampling(seed=0, temperature=0.8), Sampling(seed=1, temperature=0.8))
NUM_TEXTS = 16
"""With each beginning."""


class Bench:
    """One model and its scheduler. Who shares nothing with anybody, by his salt, is alone."""

    def __init__(self, name: str) -> None:
        self.model = Model(
            weights(name), context_length=1024, num_cells=0, max_batch=256, max_sequences=MAX_SEQUENCES, num_threads=2
        )
        vocabulary = self.model.vocabulary
        self.seam = Seam(vocabulary)
        control = {id: vocabulary.pieces[id] for id in vocabulary.control_ids}
        self.profile = profile_from_metadata(vocabulary.metadata, control, self.model.context_length)
        self.scheduler = Scheduler(
            self.model,
            self.seam,
            context_length=self.model.context_length,
            max_batch=256,
            max_sequences=MAX_SEQUENCES,
            spill=Spill(0, None, ""),
        )
        self._alone: dict[tuple[str, int, float], bytes] = {}

    def job(self, id: str, text: str, sampling: Sampling, salt: str) -> Job:
        (prompt,) = render(CompletionRequest("", Text((text,))), self.profile, self.model.vocabulary, self.seam)
        return Job(id, 0, prompt, 10, sampling, cache_salt=salt)

    def alone(self, text: str, sampling: Sampling) -> bytes:
        """Return what a Job writes that reads all of its text itself, while nobody else runs."""
        key = (text, sampling.seed, sampling.temperature)
        if key not in self._alone:
            job = self.job("alone", text, sampling, f"alone {len(self._alone)}")
            self._alone[key] = run(self.scheduler, [job])["alone"]
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


def texts_of(bench: Bench, start: str) -> list[str]:
    """Return texts that begin alike, cut at and behind each other's answers."""
    draws = random.Random(start)
    texts = [start]
    while len(texts) < NUM_TEXTS:
        text = draws.choice(texts)
        answer = bench.alone(text, GREEDY)[len(bench.job("", text, GREEDY, "").prompt.heal) :]
        whole = text + answer.decode("utf-8", "ignore")
        cut = draws.randint(len(start) - 6, min(len(whole), len(start) + 30))
        texts.append(whole[:cut] + draws.choice(ENDS))
    return texts


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "share"), [(SMALL, 1.0), (DEFAULT, 0.2)], ids=["small", "default"])
def test_any_overlap_gives_each_the_text_that_it_has_alone(name: str, share: float, num_overlaps: int) -> None:
    different: list[str] = []
    pools: dict[str, list[str]] = {}
    num = 0
    bench = Bench(name)
    for index in range(round(num_overlaps * share)):
        draws = random.Random(index)
        start = draws.choice(STARTS)
        if start not in pools:
            pools[start] = texts_of(bench, start)
        texts = draws.sample(pools[start], 8)
        samplings = [draws.choice(SAMPLINGS) for _ in texts]
        expected = [bench.alone(text, sampling) for text, sampling in zip(texts, samplings, strict=True)]
        for when in ("beside", "afterwards"):
            order = draws.sample(range(8), 8)
            jobs = [bench.job(str(at), texts[at], samplings[at], f"overlap {index}") for at in order]
            pauses = iter([draws.choice([0, 1, 2, 3, 5]) for _ in jobs]) if when == "beside" else None
            written = run(bench.scheduler, jobs, pauses)
            num += len(jobs)
            different += [
                f"{index} {when}: {texts[at]!r} {samplings[at]}: {written[str(at)]!r} is {expected[at]!r} alone"
                for at in range(8)
                if written[str(at)] != expected[at]
            ]
    assert not different, f"{len(different)} of {num}"
