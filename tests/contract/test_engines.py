"""What every engine owes its callers (`engines.base`), over each of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from legato.config import worker_environment
from legato.engines.base import Engine
from legato.engines.llamacpp.engine import LlamaCppEngine
from legato.engines.llamacpp.worker import WorkerSettings
from legato.engines.scripted import Fault, Pause, ScriptedEngine
from legato.engines.upstream.engine import UpstreamEngine
from legato.errors import GenerationFailed
from legato.prompting.render import render
from legato.types import CompletionRequest, Job, Sampling, Step, Text
from tests.conftest import SMALL, serve_weights, tokenizer_folder, weights

ENGINES = ["scripted", "llamacpp", "upstream"]
LONG = "The keeper wrote in the log of the lighthouse, day after day. " * 120


@asynccontextmanager
async def started(kind: str) -> AsyncIterator[Engine]:
    """Start an engine of a kind."""
    engine: Engine
    if kind == "scripted":
        engine = ScriptedEngine(tuple(part for _ in range(500) for part in (b"word ", Pause(0.005))))
    elif kind == "upstream":
        with serve_weights(SMALL) as served:
            async with aclosing(
                await UpstreamEngine.start([served.url], model=SMALL, key="", folder=tokenizer_folder())
            ) as front:
                yield front
        return
    else:
        settings = WorkerSettings(weights(SMALL), context_length=4096, num_cells=0, num_threads=2)
        engine = await LlamaCppEngine.start(settings, worker_environment())
    try:
        yield engine
    finally:
        await engine.aclose()


def job_for(engine: Engine, text: str, *, id: str = "a", max_tokens: int = 8, **sampling: float) -> Job:
    """A greedy Job."""
    (prompt,) = render(CompletionRequest("m", Text((text,))), engine.profile, engine.tokenizer, engine.seam)
    values = {"seed": 7, "temperature": 0.0, **sampling}
    return Job(id=id, choice=0, prompt=prompt, max_tokens=max_tokens, sampling=Sampling(**values))  # type: ignore[arg-type]


async def steps_of(engine: Engine, job: Job) -> list[Step]:
    return [step async for step in engine.generate(job)]


def data_of(steps: list[Step]) -> bytes:
    return b"".join(token.data for step in steps for token in step.tokens)


async def until_idle(engine: Engine) -> None:
    """Wait until the engine's own counters say that nothing runs."""
    for _ in range(200):
        counts = await engine.measure() if isinstance(engine, LlamaCppEngine) else engine.counters()
        if counts["running"] == 0 and counts.get("waiting", 0) == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"still busy: {counts}")


@pytest.mark.parametrize("kind", ENGINES)
def test_an_accepted_job_ends_in_one_finish(kind: str) -> None:
    async def check() -> None:
        async with started(kind) as engine:
            steps = await steps_of(engine, job_for(engine, "One, two, three,"))
            assert steps[0].tokens == ()
            assert [step.finish is not None for step in steps] == [False] * (len(steps) - 1) + [True]
            job = job_for(engine, "The capital of Fran", id="b")
            assert data_of(await steps_of(engine, job)).startswith(job.prompt.heal)
            assert (await steps_of(engine, job_for(engine, "x", max_tokens=0, id="c")))[-1].finish in ("length", "stop")
            await until_idle(engine)

    asyncio.run(check())


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_c055_closing_the_iterator_frees_the_work(kind: str, num_steps: int) -> None:
    """While the prompt is read (one step seen) and while text is written (three)."""

    async def check() -> None:
        async with started(kind) as engine:
            text = LONG[:4000] if num_steps == 1 else "One, two,"
            async with aclosing(engine.generate(job_for(engine, text, max_tokens=2000))) as steps:
                for _ in range(num_steps):
                    await anext(steps)
            await asyncio.wait_for(until_idle(engine), 2)
            again = await steps_of(engine, job_for(engine, "One, two, three,", id="b"))
            assert again[-1].finish == "length"

    asyncio.run(check())


@pytest.mark.parametrize("kind", ENGINES)
def test_many_jobs_run_at_once_and_each_ends(kind: str) -> None:
    async def check() -> None:
        async with started(kind) as engine:
            jobs = [job_for(engine, f"Chapter {n}. It was", id=str(n), max_tokens=6) for n in range(70)]
            done = await asyncio.gather(*(steps_of(engine, job) for job in jobs))
            assert all(steps[-1].finish == "length" for steps in done)
            await until_idle(engine)

    asyncio.run(check())


def test_a_fault_of_the_script_is_an_error() -> None:
    async def check() -> None:
        engine = ScriptedEngine((b"a", Fault("broken")))
        with pytest.raises(GenerationFailed, match="broken"):
            await steps_of(engine, job_for(engine, "x"))
        assert engine.counters() == {"running": 0, "cancelled": 0}

    asyncio.run(check())


def test_a_job_survives_its_own_json() -> None:
    async def check() -> None:
        async with started("llamacpp") as engine:
            job = job_for(engine, "The capital of Fran", temperature=0.8)
            job = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, logit_bias={5: 1.5}))
            assert Job.from_json(job.to_json()) == job
            assert data_of(await steps_of(engine, job)) == data_of(await steps_of(engine, Job.from_json(job.to_json())))

    asyncio.run(check())
