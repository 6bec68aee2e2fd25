"""The embedded engine and its worker: the process, the socket, and what is said over it fail at every moment.

The worker has no model (`worker`), but for the last test.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from legato.config import worker_environment
from legato.decoding.seam import Seam
from legato.engines.llamacpp.engine import LlamaCppEngine
from legato.engines.llamacpp.process import Child
from legato.engines.llamacpp.worker import WorkerSettings
from legato.engines.scripted import ByteTokenizer
from legato.errors import EngineUnavailable, GenerationFailed
from legato.prompting.profiles import Profile
from legato.run.admission import Admission
from legato.run.models import Model, Models
from legato.system.supervisor import together
from legato.types import Job, Prompt, Sampling, Step
from tests.conformance.reading import COMPLETIONS
from tests.conformance.test_watch import metrics
from tests.conftest import SMALL, Served, children, serve, weights
from tests.faults import HANGS_AFTER_S, Faults, tried

PROGRAM = (sys.executable, str(Path(__file__).with_name("worker.py")))
NUM_TOKENS = 4


class Numbers(LlamaCppEngine):
    """The engine, in front of a worker without a model."""

    def _read_vocabulary(self, context_length: int) -> None:
        self.tokenizer = ByteTokenizer()
        self.seam = Seam(self.tokenizer)
        self.profile = Profile(context_length=context_length)


class Unreliable(Child):
    """A process at which calls fail."""

    def __init__(self, child: Child, faults: Faults) -> None:
        super().__init__(child._process, child._reader, child._writer)
        self._faults = faults

    def write(self, data: bytes) -> None:
        self._faults.call("write")
        super().write(data)

    async def read(self, num: int) -> bytes:
        self._faults.call("read")
        return await super().read(num)

    async def read_errors(self) -> bytes:
        self._faults.call("read_errors")
        return await super().read_errors()

    def close(self) -> None:
        super().close()
        self._faults.call("close")

    def kill(self) -> None:
        self._faults.call("kill")
        super().kill()

    async def wait(self) -> int:
        self._faults.call("wait")
        return await super().wait()


def spawning(faults: Faults, *first: str) -> Callable[[Mapping[str, str]], Coroutine[Any, Any, Child]]:
    """Return what starts workers at which calls fail. The `first` ones are told what to do wrong, one each."""
    wrongs = list(first)

    async def spawn(environment: Mapping[str, str]) -> Child:
        faults.call("spawn")
        program = (*PROGRAM, wrongs.pop(0)) if wrongs else PROGRAM
        return Unreliable(await Child.spawn(environment, program), faults)

    return spawn


@asynccontextmanager
async def started(faults: Faults, *first: str) -> AsyncIterator[LlamaCppEngine]:
    """Start an engine, again if the fault is there, and end it."""
    settings = WorkerSettings(Path("numbers.gguf"), 0, 0, 1)
    try:
        engine = await Numbers.start(settings, dict(os.environ), spawn=spawning(faults, *first))
    except Exception:  # noqa: BLE001 - whatever the fault is
        assert faults.has_failed
        engine = await Numbers.start(settings, dict(os.environ), spawn=spawning(faults))
    try:
        yield engine
    finally:
        await engine.aclose()


def job(id: str, *, place: int = 1, num: int = NUM_TOKENS) -> Job:
    """A Job that writes the numbers of its places."""
    return Job(id, 0, Prompt((0,) * place, (), b"", place, 0, ""), num, Sampling(seed=0, temperature=0.0))


async def ask(engine: LlamaCppEngine, asked: Job, faults: Faults | None = None) -> None:
    """Run a Job, and see that it does not hang and that nothing of it is lost, or comes twice.

    If there are `faults`, it may be the second death that the Job sees.
    """
    steps: list[Step] = []
    is_whole = True
    try:
        async with asyncio.timeout(HANGS_AFTER_S), aclosing(engine.generate(asked)) as found:
            async for step in found:
                steps.append(step)
    except GenerationFailed:
        assert faults is not None
        assert faults.has_failed
        is_whole = False
    first = len(asked.prompt.ids)
    ids = [token.id for step in steps for token in step.tokens]
    assert ids == [*range(first, first + (asked.max_tokens if is_whole else len(ids)))]
    assert [step.finish for step in steps if step.finish] == ["length"] * is_whole
    num_accepted = sum(not step.tokens for step in steps)
    assert num_accepted == 1 or (not is_whole and num_accepted == 0)


async def scenario(faults: Faults) -> None:
    """Two Jobs at once, one that is left, a measurement, the end of the worker under a Job, and another Job."""
    async with started(faults) as engine:
        await together(ask(engine, job("a")), ask(engine, job("b", place=7)))
        async with aclosing(engine.generate(job("left", num=500))) as steps:
            await anext(steps)
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                await engine.measure()
        except EngineUnavailable:
            assert faults.has_failed
        async with aclosing(engine.generate(job("lasting", num=500))) as steps:
            await anext(steps)
            if pid := engine.worker_pid:
                os.kill(pid, signal.SIGKILL)
            await ask(engine, job("killed"), faults)
        await ask(engine, job("last"))


ERRORS: Mapping[str, tuple[Callable[[], BaseException], ...]] = {
    "spawn": (lambda: OSError(12, "Cannot allocate memory"), lambda: ValueError("a bug")),
    "read": (ConnectionResetError, lambda: asyncio.IncompleteReadError(b"", 4), lambda: ValueError("a bug")),
    "write": (ConnectionResetError, lambda: RuntimeError("a bug")),
    "read_errors": (lambda: OSError(5, "Input/output error"),),
    "close": (lambda: OSError(5, "Input/output error"),),
    "kill": (lambda: PermissionError(1, "Operation not permitted"),),
    "wait": (lambda: RuntimeError("a bug"),),
}
NUM_AT_ONCE = 4


@pytest.mark.parametrize("kind", ERRORS)
def test_a_call_fails_at_every_moment(kind: str) -> None:
    async def test() -> None:
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def fail(n: int, error: Callable[[], BaseException]) -> str | None:
            faults = Faults(f"engine: {kind}", kind, n, error)
            async with places:
                try:
                    await scenario(faults)
                except Exception as seen:  # noqa: BLE001 - told with the place where it was
                    return f"{kind} {n} {error()!r}: {seen!r}"
            return None

        counted = Faults()
        await scenario(counted)
        assert counted.calls[kind]
        moments = [(n, error) for n in range(1, counted.calls[kind] + 1) for error in ERRORS[kind]]
        told = await together(*(fail(*moment) for moment in moments))
        assert not any(told), "\n".join(filter(None, told))

    asyncio.run(test())
    assert not [pid for pid in children(os.getpid()) if is_worker(pid)]


def is_worker(pid: int) -> bool:
    """Whether a process is a worker of these tests."""
    return PROGRAM[1].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


async def survive(*wrongs: str, num_restarts: int | None = None) -> None:
    """Run Jobs with workers that do wrong, one after the other."""
    tried["engine: " + ", then ".join(wrongs)] += 1
    async with started(Faults(), *wrongs) as engine:
        await together(*(ask(engine, job(str(place), place=place, num=20)) for place in (1, 5, 9)))
        await ask(engine, job("next"))
        assert engine.num_restarts == (len(wrongs) if num_restarts is None else num_restarts)


@pytest.mark.parametrize(
    "wrong",
    [
        "says nonsense",
        "says too much",
        "says what nobody knows",
        "breaks off",
        "closes its socket",
        "stops",
        "waits for ever",
        "is killed",
    ],
)
def test_a_worker_does_wrong(wrong: str) -> None:
    asyncio.run(survive(wrong))


@pytest.mark.parametrize("wrong", ["closes its standard error", "writes without lines"])
def test_a_worker_writes_errors_as_it_likes(wrong: str) -> None:
    asyncio.run(survive(wrong, num_restarts=0))


@pytest.mark.parametrize("second", ["leaves at once", "leaves half loaded", "refuses"])
def test_the_next_worker_cannot_be_started_either(second: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(survive("is killed", second, num_restarts=1))
    said = {
        "leaves at once": "the engine died (exit code 3) while it loaded numbers.gguf; it is started again in 0.2 s",
        "leaves half loaded": "the engine died (exit code 3) while it loaded numbers.gguf: a last word; it is started",
        "refuses": "no model; it is started again in 0.2 s",
    }
    assert said[second] in caplog.text


def test_who_sees_two_deaths_is_given_up_and_the_next_is_not() -> None:
    async def test() -> None:
        tried["engine: two deaths"] += 1
        async with started(Faults(), "is killed", "is killed") as engine:
            with pytest.raises(GenerationFailed, match="died twice"):
                async for _ in engine.generate(job("a", num=50)):
                    pass
            await ask(engine, job("b"))
            assert engine.num_restarts == 2

    asyncio.run(test())


class NoFork:
    """Starts a worker, and from then on none until it may."""

    def __init__(self) -> None:
        self.may = True

    async def __call__(self, environment: Mapping[str, str]) -> Child:
        if not self.may:
            raise OSError(12, "Cannot allocate memory")
        return await Child.spawn(environment, PROGRAM)


async def without_end(engine: LlamaCppEngine) -> None:
    """Run a Job that comes to no end of its own."""
    async for _ in engine.generate(job(secrets.token_hex(4), num=100_000)):
        pass


@pytest.mark.alone
def test_nobody_waits_long_for_a_worker_that_cannot_be_started() -> None:
    async def test() -> None:
        tried["engine: no worker for long"] += 1
        spawn = NoFork()
        engine = await Numbers.start(WorkerSettings(Path("numbers.gguf"), 0, 0, 1), dict(os.environ), spawn=spawn)
        asking = asyncio.ensure_future(without_end(engine))
        await asyncio.sleep(0.05)
        spawn.may = False
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert engine.counters()["down"] == 1
        with pytest.raises(EngineUnavailable):
            await engine.measure()
        late = asyncio.ensure_future(without_end(engine))  # It waits for the next worker, for a while.
        async with asyncio.timeout(HANGS_AFTER_S):
            for one in (asking, late):
                with pytest.raises(EngineUnavailable, match="try again in 5 s"):
                    await one
        assert engine.counters()["failed"] == 1
        begun = time.monotonic()
        for _ in range(3):
            with pytest.raises(EngineUnavailable):
                await without_end(engine)
        assert time.monotonic() - begun < 0.5
        spawn.may = True
        async with asyncio.timeout(HANGS_AFTER_S):
            while engine.worker_pid is None:  # noqa: ASYNC110 - there is nothing else to wait for
                await asyncio.sleep(0.05)
        assert engine.counters() == {"running": 0, "restarts": 1, "down": 0, "failed": 0}
        await ask(engine, job("again"))
        await engine.aclose()

    asyncio.run(test())


def test_a_measurement_that_is_given_up_confuses_nobody() -> None:
    async def test() -> None:
        tried["engine: a stopped worker is measured"] += 1
        async with started(Faults()) as engine:
            measuring = [asyncio.ensure_future(engine.measure()) for _ in range(3)]
            await asyncio.sleep(0)
            measuring[1].cancel()
            assert await measuring[0] == await measuring[2] == {"running": 0}
            assert engine.worker_pid is not None
            os.kill(engine.worker_pid, signal.SIGSTOP)
            async with asyncio.timeout(HANGS_AFTER_S):
                with pytest.raises(EngineUnavailable):
                    await engine.measure()
            await ask(engine, job("next"))

    asyncio.run(test())


def test_a_server_says_how_its_engine_is(caplog: pytest.LogCaptureFixture) -> None:
    tried["engine: no worker for long"] += 1
    spawn = NoFork()

    async def load() -> Models:
        engine = await Numbers.start(WorkerSettings(Path("numbers.gguf"), 0, 0, 1), dict(os.environ), spawn=spawn)
        return Models({"m": Model("m", engine, Admission())}, {})

    def wait(served: Served, status: str) -> Any:
        deadline = time.monotonic() + HANGS_AFTER_S
        while (health := served.get("/health")).json()["status"] != status:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return health

    with serve(load) as served:
        assert served.complete("x", max_tokens=3)["usage"]["completion_tokens"] == 3
        spawn.may = False
        os.kill(served.engine.worker_pid, signal.SIGKILL)
        health = wait(served, "degraded")
        assert (health.status_code, health.json()["down"]) == (200, ["engine m"])
        assert metrics(served)['legato_task_down{task="engine m"}'] == 1
        refused = served.post(COMPLETIONS, {"model": "m", "prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert "memory" not in refused.text  # That is for the log.
        health = wait(served, "failed")
        assert (health.status_code, served.get("/ready").status_code) == (503, 503)
        spawn.may = True
        assert wait(served, "ok").json()["models"]["m"]["restarts"] == 1
        assert served.get("/ready").status_code == 200
        assert served.complete("x", max_tokens=3)["usage"]["completion_tokens"] == 3
        assert metrics(served)['legato_task_down{task="engine m"}'] == 0
    assert "the engine of numbers.gguf has ended: no process can be started: Cannot allocate memory" in caplog.text


def test_a_real_worker_cannot_be_started_once() -> None:
    """With the small model: the text goes on as if nothing had happened."""
    tried["engine: spawn, with a model"] += 1
    faults = Faults("engine: spawn, with a model", "spawn", 2, lambda: OSError(12, "Cannot allocate memory"))

    async def spawn(environment: Mapping[str, str]) -> Child:
        faults.call("spawn")
        return await Child.spawn(environment)

    async def test() -> None:
        settings = WorkerSettings(weights(SMALL), 1024, 0, 1)
        engine = await LlamaCppEngine.start(settings, worker_environment(), spawn=spawn)
        ids = tuple(engine.tokenizer.encode(b"Once upon a time", special=False))
        asked = Job("a", 0, Prompt(ids, (), b"", 16, 0, ""), 60, Sampling(seed=0, temperature=0.0))

        async def write(*, kill_at: int) -> list[int]:
            found: list[int] = []
            async with aclosing(engine.generate(asked)) as steps:
                async for step in steps:
                    found += [token.id for token in step.tokens]
                    if kill_at and len(found) >= kill_at:
                        kill_at = 0
                        assert engine.worker_pid is not None
                        os.kill(engine.worker_pid, signal.SIGKILL)
            return found

        alone = await write(kill_at=0)
        assert await write(kill_at=20) == alone
        assert engine.num_restarts == 1
        assert faults.calls["spawn"] == 3
        await engine.aclose()

    asyncio.run(test())
