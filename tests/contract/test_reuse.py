"""The embedded engine's cache, drafts and exactness: what is reused, and that nothing of it shows in the text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from legato.config import worker_environment
from legato.engines.llamacpp.engine import LlamaCppEngine
from legato.engines.llamacpp.worker import WorkerSettings
from legato.errors import GenerationFailed
from legato.types import Job, Step
from tests.conftest import SMALL, weights
from tests.contract.test_engines import LONG, data_of, job_for, steps_of

FILE = "".join(f"    def field_{n}(self) -> int:\n        return self._fields[{n * 7}] + {n}\n\n" for n in range(12))


@asynccontextmanager
async def engine_with(
    spill_bytes: int = 0, spill_dir: Path | None = None, context_length: int = 2048
) -> AsyncIterator[LlamaCppEngine]:
    settings = WorkerSettings(weights(SMALL), context_length, 0, 2, spill_bytes, spill_dir)
    engine = await LlamaCppEngine.start(settings, worker_environment())
    try:
        yield engine
    finally:
        await engine.aclose()


def answer(job: Job, steps: list[Step]) -> bytes:
    return data_of(steps)[len(job.prompt.heal) :]


async def decoded(engine: LlamaCppEngine) -> int:
    return (await engine.measure())["decoded_tokens"]


def head_of(engine: LlamaCppEngine, num_tokens: int, start: str) -> str:
    """A text of about so many tokens."""
    ids = engine.tokenizer.encode((start + LONG * 2).encode(), special=False)
    return b"".join(engine.tokenizer.pieces[id] for id in ids[:num_tokens]).decode("utf-8", "ignore")


def test_two_prompts_with_a_long_common_head_that_alternate_stay_warm() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            head = head_of(engine, 1900, "A report. ")
            ends = [" In the end Ann said", " At the door Bob said"]
            cold = [await steps_of(engine, job_for(engine, head + end, max_tokens=4)) for end in ends]
            before = await decoded(engine)
            for _ in range(5):
                for end, first in zip(ends, cold, strict=True):
                    steps = await steps_of(engine, job_for(engine, head + end, max_tokens=4))
                    assert data_of(steps) == data_of(first)
                    assert steps[0].num_cached > 1890
            assert await decoded(engine) - before < 10 * 8

    asyncio.run(check())


def test_thirty_rounds_never_read_the_head_again() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            prompt = head_of(engine, 600, "A diary. ") + " On the first day"
            one = job_for(engine, prompt, max_tokens=120, temperature=0.8)
            whole = answer(one, await steps_of(engine, one)).decode()
            text = ""
            before = await decoded(engine)
            for _ in range(30):
                job = job_for(engine, prompt + text, max_tokens=4, temperature=0.8)
                text += answer(job, await steps_of(engine, job)).decode()
            assert text == whole
            # What was written once is known: no round decodes more than its own tokens.
            assert await decoded(engine) - before <= 120

    asyncio.run(check())


def test_a_prompt_that_comes_again_starts_without_a_decode() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            for prompt in (LONG[:900] + " The li", LONG[:900] + "\n"):
                job = job_for(engine, prompt, max_tokens=1, temperature=0.8)
                first = await steps_of(engine, job)
                before = await decoded(engine)
                assert data_of(await steps_of(engine, job)) == data_of(first)
                assert await decoded(engine) == before

    asyncio.run(check())


def test_a_salt_keeps_entries_apart() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            job = job_for(engine, LONG[:900], max_tokens=4)
            first = await steps_of(engine, replace(job, cache_salt="a"))
            other = await steps_of(engine, replace(job, cache_salt="b"))
            again = await steps_of(engine, replace(job, cache_salt="a"))
            assert [steps[0].num_cached for steps in (first, other)] == [0, 0]
            assert again[0].num_cached > 100
            assert data_of(first) == data_of(other) == data_of(again)

    asyncio.run(check())


@pytest.mark.parametrize("max_mib", [0, 512])
def test_what_left_the_cells_is_read_back(max_mib: int) -> None:
    async def check() -> None:
        async with engine_with(spill_bytes=max_mib * 2**20, context_length=512) as engine:
            jobs = [job_for(engine, head_of(engine, 400, f"Part {n}. "), max_tokens=4) for n in range(5)]
            first = [await steps_of(engine, job) for job in jobs]
            before = await decoded(engine)
            again = await steps_of(engine, jobs[0])
            assert data_of(again) == data_of(first[0])
            if max_mib:
                assert again[0].num_cached > 390
                assert await decoded(engine) - before < 20
            else:
                assert again[0].num_cached < 100
                assert (await engine.measure())["spilled"] == 0

    asyncio.run(check())


def test_a_restart_is_warm(tmp_path: Path) -> None:
    async def check() -> None:
        texts = []
        for is_again in (False, True):
            async with engine_with(100 * 2**20, tmp_path / "spill") as engine:
                job = job_for(engine, head_of(engine, 600, "A log. "), max_tokens=24, temperature=0.8)
                steps = await steps_of(engine, job)
                texts.append(data_of(steps))
                assert (steps[0].num_cached > 550) == is_again
        assert texts[0] == texts[1]
        assert 0 < sum(path.stat().st_size for path in (tmp_path / "spill").iterdir()) < 100 * 2**20

    asyncio.run(check())


# -- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_are_taken_and_do_not_change_the_text(temperature: float) -> None:
    async def check() -> None:
        async with engine_with() as engine:
            prompt = f"class Record:\n{FILE}\n# The same class, with one more field:\nclass Record:\n"
            reference = tuple(engine.tokenizer.encode(FILE.encode(), special=False))
            job = job_for(engine, prompt, max_tokens=160, temperature=temperature)
            drafted = await steps_of(engine, replace(job, reference=reference))
            assert sum(step.num_drafted for step in drafted) > 40
            assert len(drafted) < 130
            # A round of one token leaves no room for a draft.
            text = b""
            for _ in range(60):
                one = job_for(engine, prompt + text.decode(), max_tokens=1, temperature=temperature)
                steps = await steps_of(engine, one)
                assert not any(step.num_drafted for step in steps)
                text += answer(one, steps)
            assert answer(job, drafted).startswith(text)

    asyncio.run(check())


def test_drafts_stop_at_the_limit() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            prompt = "1 2 3 4 5 6 7 8\n" * 12 + "1 2 3"
            for limit in (1, 2, 3, 7, 20):
                job = job_for(engine, prompt, max_tokens=limit)
                steps = await steps_of(engine, job)
                assert steps[-1].finish == "length"
                heal = len(job.prompt.heal)
                ends = 0
                size = 0
                for step in steps:
                    for token in step.tokens:
                        size += len(token.data)
                        ends += size > heal
                assert ends == limit

    asyncio.run(check())


# -- exactness --------------------------------------------------------------------------------------------------------


def scores(steps: list[Step]) -> list[float | None]:
    return [token.logprob for step in steps for token in step.tokens if token.logprob is not None]


def test_deterministic_is_exact_to_the_last_bit() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            prompt = head_of(engine, 300, "A letter. ") + " Dear"
            job = replace(
                job_for(engine, prompt, max_tokens=30, temperature=0.8), deterministic=True, logprobs=0, cache_salt="0"
            )
            alone = await steps_of(engine, job)
            text = answer(job, alone)
            others = [
                job_for(engine, LONG[n * 50 : 400 + n * 90], id=f"other{n}", max_tokens=60, temperature=0.8)
                for n in range(7)
            ]
            beside = asyncio.gather(*(steps_of(engine, other) for other in others))
            crowded = await steps_of(engine, replace(job, id="b", cache_salt="1"))
            cached = await steps_of(engine, replace(job, id="c"))
            await beside
            assert (data_of(crowded), data_of(cached)) == (data_of(alone), data_of(alone))
            assert scores(crowded) == scores(cached) == scores(alone)
            # Written, then read: the second half, cold, after the first half was sent back.
            half = text[: len(text) // 2].decode("utf-8", "ignore")
            for salt in ("0", "2"):
                rest = replace(
                    job_for(engine, prompt + half, max_tokens=12, temperature=0.8, id=salt),
                    deterministic=True,
                    logprobs=0,
                    cache_salt=salt,
                )
                steps = await steps_of(engine, rest)
                assert text[len(half.encode()) :].startswith(answer(rest, steps))
                got = scores(steps)[1:]
                assert any(scores(alone)[at : at + len(got)] == got for at in range(len(scores(alone))))

    asyncio.run(check())


def test_a_short_prompt_takes_nothing_that_a_long_one_has_read_fast() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            long = job_for(engine, head_of(engine, 300, "A memo. "), max_tokens=4)
            short = replace(job_for(engine, head_of(engine, 40, "A memo. "), max_tokens=8), logprobs=0)
            cold = await steps_of(engine, replace(short, cache_salt="cold"))
            await steps_of(engine, long)
            behind = await steps_of(engine, short)
            assert behind[0].num_cached == 0
            assert (data_of(behind), scores(behind)) == (data_of(cold), scores(cold))
            # The other way round nothing is lost: who may read fast takes what was read exactly.
            again = await steps_of(engine, replace(short, cache_salt="other"))
            longer = await steps_of(engine, replace(long, id="longer", cache_salt="other"))
            assert again[0].num_cached == 0
            assert longer[0].num_cached >= 36

    asyncio.run(check())


def test_what_goes_wrong_for_one_job_ends_that_job_alone() -> None:
    async def check() -> None:
        async with engine_with() as engine:
            good = job_for(engine, "One, two,", id="good", max_tokens=20)
            bad = job_for(engine, "One, two,", id="bad", max_tokens=20)
            bad = replace(bad, sampling=replace(bad.sampling, logit_bias={10**6: 1.0}))
            quiet = await steps_of(engine, good)
            results = await asyncio.gather(
                steps_of(engine, replace(good, id="again")), steps_of(engine, bad), return_exceptions=True
            )
            assert isinstance(results[0], list)
            assert data_of(results[0]) == data_of(quiet)
            assert isinstance(results[1], GenerationFailed)
            assert "IndexError" in str(results[1])
            assert engine.num_restarts == 0

    asyncio.run(check())
