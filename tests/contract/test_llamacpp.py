"""The embedded engine: what is particular to it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from contextlib import aclosing

import pytest

from legato.engines.llamacpp.engine import LlamaCppEngine
from legato.errors import ConfigError
from legato.types import Job, SeamOptions, Step
from tests.contract.test_engines import LONG, data_of, job_for, started, steps_of, until_idle


def test_a_shared_head_is_copied_not_read_again() -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            head = LONG[:3000]
            first = job_for(engine, head + " In the end", id="a")
            alone = await steps_of(engine, first)
            before = (await engine.measure())["decoded_tokens"]
            again = await steps_of(engine, job_for(engine, head + " In the end", id="b"))
            other = await steps_of(engine, job_for(engine, head + " At first", id="c"))
            assert data_of(again) == data_of(alone)
            assert again[0].num_cached >= len(first.prompt.ids) - 1
            assert other[0].num_cached >= len(first.prompt.ids) - 4
            assert (await engine.measure())["decoded_tokens"] - before < 60

    asyncio.run(check())


def test_equal_prompts_at_once_are_read_once() -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            jobs = [job_for(engine, LONG[:2000], id=str(n), max_tokens=4) for n in range(6)]
            done = await asyncio.gather(*(steps_of(engine, job) for job in jobs))
            assert len({data_of(steps) for steps in done}) == 1
            assert (await engine.measure())["decoded_tokens"] < 2 * jobs[0].prompt.num_tokens

    asyncio.run(check())


@pytest.mark.parametrize("wait_s", [0.0, 0.05, 0.3])
def test_closing_while_the_worker_restarts_ends(wait_s: float) -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            assert engine.worker_pid is not None
            os.kill(engine.worker_pid, signal.SIGKILL)
            await asyncio.sleep(wait_s)
            await asyncio.wait_for(engine.aclose(), 5)

    asyncio.run(check())


def test_a_worker_that_hangs_is_replaced() -> None:
    """It is stopped while it writes: the text goes on as if nothing had happened."""

    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            job = job_for(engine, "The lamp", max_tokens=60)
            expected = data_of(await steps_of(engine, job))
            steps: list[Step] = []
            async with aclosing(engine.generate(job)) as found:
                async for step in found:
                    steps.append(step)
                    if len(steps) == 10:
                        assert engine.worker_pid is not None
                        os.kill(engine.worker_pid, signal.SIGSTOP)
            assert data_of(steps) == expected
            assert engine.num_restarts == 1

    asyncio.run(check())


def test_penalties_and_bias_reach_the_model() -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            prompt = "ha ha ha ha ha ha ha ha ha ha ha ha"
            plain = data_of(await steps_of(engine, job_for(engine, prompt, max_tokens=12)))
            assert plain.count(b"ha") >= 6
            job = job_for(engine, prompt, max_tokens=12, frequency_penalty=2.0)
            assert data_of(await steps_of(engine, job)).count(b"ha") < 6
            (word,) = engine.tokenizer.encode(b" fox", special=False)
            job = job_for(engine, "The", max_tokens=3)
            job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, logit_bias={word: 100.0}))
            assert b" fox" in data_of(await steps_of(engine, job))

    asyncio.run(check())


def test_without_the_seam_the_prompt_is_fed_as_it_is() -> None:
    async def check() -> None:
        from legato.prompting.render import render
        from legato.types import CompletionRequest, Text

        async with started("llamacpp") as engine:
            request = CompletionRequest("m", Text(("The capital of Fran",)), seam=SeamOptions(heal=False))
            (prompt,) = render(request, engine.profile, engine.tokenizer, engine.seam)
            job = dataclasses.replace(job_for(engine, "x"), prompt=prompt)
            assert prompt.heal == b""
            assert len(data_of(await steps_of(engine, job))) > 0

    asyncio.run(check())


def test_a_bad_file_is_refused_in_one_line(tmp_path: os.PathLike[str]) -> None:
    from pathlib import Path

    from legato.config import worker_environment
    from legato.engines.llamacpp.worker import WorkerSettings

    async def check() -> None:
        for content, reason in ((b"GGUF" + b"\x00" * 400, "cannot be loaded"), (b"hello", "not a GGUF file")):
            path = Path(tmp_path) / "bad.gguf"
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=reason):
                await LlamaCppEngine.start(WorkerSettings(path, 0, 0, 2), worker_environment())
        with pytest.raises(ConfigError, match="does not exist"):
            await LlamaCppEngine.start(WorkerSettings(Path(tmp_path) / "no.gguf", 0, 0, 2), worker_environment())

    asyncio.run(check())


def test_cells_that_run_out_only_slow_things_down() -> None:
    """More text than cells: Jobs are set back and go on, and nothing is lost."""

    async def check() -> None:
        from legato.config import worker_environment
        from legato.engines.llamacpp.worker import WorkerSettings
        from tests.conftest import SMALL, weights

        settings = WorkerSettings(weights(SMALL), context_length=512, num_cells=0, num_threads=2)
        engine = await LlamaCppEngine.start(settings, worker_environment())
        try:
            jobs = [job_for(engine, f"{n}. " + LONG[: 60 * n], id=str(n), max_tokens=60) for n in range(1, 9)]
            done = await asyncio.gather(*(steps_of(engine, job) for job in jobs))
            assert all(steps[-1].finish in ("length", "stop") for steps in done)
            await until_idle(engine)
        finally:
            await engine.aclose()

    asyncio.run(check())


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            assert isinstance(engine, LlamaCppEngine)
            order = []

            async def run(job: Job) -> None:
                await steps_of(engine, job)
                order.append(job.id)

            long = asyncio.create_task(run(job_for(engine, LONG, id="long", max_tokens=1)))
            await asyncio.sleep(0.05)
            await run(
                job_for(engine, "It was a bright cold day in April, and the clocks were", id="short", max_tokens=1)
            )
            await long
            assert order == ["short", "long"]

    asyncio.run(check())
