"""The embedded engine as the server sees it: it starts the worker, passes Jobs to it and starts it again when it dies.

Native code can end a process. When the worker dies or hangs, each running Job is submitted to the next one with the
tokens that it has already produced, so its text goes on as if nothing had happened; a Job that was running at two
deaths ends in an error. Nobody waits long for a worker that cannot be started, and it is tried again for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from legato.decoding.seam import Seam
from legato.engines.llamacpp.process import Child, Spawn, Worker, running_worker
from legato.engines.llamacpp.recall import Recall
from legato.engines.llamacpp.worker import WorkerSettings
from legato.errors import ConfigError, EngineUnavailable, GenerationFailed, LegatoError
from legato.prompting.profiles import Profile, profile_from_metadata
from legato.system.supervisor import Supervisor
from legato.system.threads import ASIDE
from legato.types import Capabilities, Job, Step, Token, Tokenizer

__all__ = ["LlamaCppEngine"]

_log = logging.getLogger("legato.engine")

_SPILL_S = 20.0
"""So long a worker may take to write to files what it keeps, at the end."""
_PATIENCE_S = 3.0
"""So long Jobs wait for a worker that has to be started again, beside twice the time that its first start took."""
_MEASURE_S = 10.0
_MAX_DEATHS = 2
"""A Job is given up when the worker has died this often under it."""


@dataclass(slots=True)
class _Live:
    """A Job that has not ended, and what it has produced."""

    job: Job
    steps: asyncio.Queue[Step | Exception] = field(default_factory=asyncio.Queue)
    tokens: list[Token] = field(default_factory=list)
    is_accepted: bool = False
    has_scores: bool = False
    num_deaths: int = 0

    def remaining(self) -> Job:
        """Return the Job that continues from the tokens produced so far."""
        job = self.job.resumed(self.tokens)
        return replace(job, score_prompt=job.score_prompt and not self.has_scores)


class LlamaCppEngine:
    """One GGUF model, run by llama.cpp. Make it with `start`."""

    capabilities = Capabilities(
        logprobs=True,
        score_prompt=True,
        canonical=True,
        keyed_noise=True,
        ends=True,
        thinking=True,
        constraints=True,
    )

    def __init__(self, settings: WorkerSettings, environment: Mapping[str, str], spawn: Spawn) -> None:
        self._name = f"the engine of {settings.path.name}"
        self._settings = settings
        self._environment = environment
        self._spawn = spawn
        self._supervisor = Supervisor()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start_s = 0.0
        self._worker: Worker | None = None
        self._live: dict[str, _Live] = {}
        self._recall = Recall()
        self._counts: deque[asyncio.Future[Mapping[str, int]]] = deque()
        self._patience: asyncio.TimerHandle | None = None
        """Runs while there is no worker."""
        self._has_failed = False
        """Whether it has run out, so that nobody waits any more."""
        self._is_closing = False
        self.num_restarts = 0
        self.tokenizer: Tokenizer
        self.seam: Seam
        self.profile: Profile

    @classmethod
    async def start(
        cls, settings: WorkerSettings, environment: Mapping[str, str], *, spawn: Spawn = Child.spawn
    ) -> LlamaCppEngine:
        """Start a worker and load the model.

        Args:
            settings: what to load.
            environment: the worker's environment variables.
            spawn: starts the worker's process.

        Raises:
            ConfigError: the file is no usable model, memory does not suffice, or the native code does not run here.
        """
        engine = cls(settings, environment, spawn)
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            engine._supervisor.start(engine._name, engine._work, on_failure=engine._wait)
            await engine._started
        except BaseException as error:
            await engine.aclose()
            if isinstance(error, EngineUnavailable):
                raise ConfigError(error.message) from None
            raise
        engine._start_s = clock() - begun
        return engine

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none that takes Jobs."""
        return self._worker.pid if self._worker else None

    async def generate(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job. Close the iterator to cancel it.

        Raises:
            EngineUnavailable: the worker is gone and could not be started again.
            GenerationFailed: the worker died twice under this Job.
        """
        async with aclosing(self._recall.steps(job, self._write)) as steps:
            async for step in steps:
                yield step

    async def _write(self, job: Job) -> AsyncGenerator[Step, None]:
        """Run a Job in the worker."""
        if self._has_failed:
            raise _unavailable()
        live = _Live(job)
        self._live[job.id] = live
        try:
            self._send(("submit", job))
            while True:
                step = await live.steps.get()
                if isinstance(step, Exception):
                    raise step
                yield step
                if step.finish is not None:
                    return
        finally:
            if self._live.pop(job.id, None) is not None:
                self._send(("cancel", job.id))

    async def measure(self) -> Mapping[str, int]:
        """Ask the worker for its own counters: running and waiting Jobs, decoded tokens, steps.

        Raises:
            EngineUnavailable: there is no worker now, or it does not answer.
        """
        if self._worker is None:
            raise _unavailable()
        future: asyncio.Future[Mapping[str, int]] = asyncio.get_running_loop().create_future()
        self._counts.append(future)
        self._send(("count",))
        try:
            async with asyncio.timeout(_MEASURE_S):
                return await future
        except TimeoutError:
            raise _unavailable() from None

    def counters(self) -> Mapping[str, int]:
        """Return what is known without asking the worker."""
        return {
            "running": len(self._live),
            "restarts": self.num_restarts,
            "down": int(self._worker is None),
            "failed": int(self._has_failed),
        }

    async def aclose(self) -> None:
        """End the worker."""
        self._is_closing = True
        self._started.cancel()
        await self._supervisor.aclose()
        if self._patience is not None:
            self._patience.cancel()
        self._end_all(_unavailable())

    # -- the worker ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run a worker for as long as it lives."""
        try:
            async with running_worker(self._settings, self._environment, self._spawn, self._grace_s) as worker:
                await worker.load(self._load_vocabulary)
                self._enter(worker)
                try:
                    await worker.run(self._dispatch, lambda: bool(self._live or self._counts))
                except Exception as error:
                    self._leave(error)
                    raise
        except Exception as error:
            if self._started.done():
                raise
            self._started.set_exception(error)
            await asyncio.Event().wait()  # Whoever starts the engine ends this.

    def _grace_s(self) -> float:
        return _SPILL_S if self._is_closing and self._worker and self._settings.spill_dir is not None else 0.0

    def _enter(self, worker: Worker) -> None:
        """Take a worker that is ready, and pass on to it what runs."""
        self._worker = worker
        self._has_failed = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._started.done():
            self.num_restarts += 1
            self._supervisor.recovered(self._name)
            _log.warning("%s runs again, with %d requests", self._name, len(self._live))
        else:
            self._started.set_result(None)
        for live in list(self._live.values()):
            try:
                self._send(("submit", live.remaining()))
            except Exception:  # noqa: BLE001 - it must not keep the others from going on
                _log.exception("a request cannot go on")
                self._fail(live, GenerationFailed("the engine died, and this request cannot go on"))

    def _leave(self, error: Exception) -> None:
        """Leave a worker that is of no use any more. Who waits for it waits for the next, unless it was the second."""
        self._worker = None
        self._wait(error)
        while self._counts:
            future = self._counts.popleft()
            if not future.done():
                future.set_exception(_unavailable())
        for live in list(self._live.values()):
            live.num_deaths += 1
            if live.num_deaths >= _MAX_DEATHS:
                self._fail(live, GenerationFailed("the engine died twice while it worked on this request"))

    def _wait(self, error: Exception) -> None:
        """Begin to lose patience, unless that has begun."""
        if self._patience is None:
            patience_s = _PATIENCE_S + 2 * self._start_s
            self._patience = asyncio.get_running_loop().call_later(patience_s, self._give_up)

    def _give_up(self) -> None:
        """Let nobody wait any more. The worker is tried to be started all the same."""
        self._has_failed = True
        _log.error("%s cannot be started for now: requests are refused until it runs again", self._name)
        self._end_all(_unavailable())

    def _send(self, command: tuple[Any, ...]) -> None:
        if self._worker is not None:
            self._worker.send(command)

    async def _load_vocabulary(self, context_length: int) -> None:
        """Read the model's file here as well, at the first start."""
        if not self._started.done():
            await ASIDE.run(self._read_vocabulary, context_length)

    def _read_vocabulary(self, context_length: int) -> None:
        from legato.engines.llamacpp.binding import Vocabulary

        vocabulary = Vocabulary.load(self._settings.path)
        special = {id: vocabulary.pieces[id] for id in vocabulary.control_ids}
        self.tokenizer = vocabulary
        self.seam = Seam(vocabulary)
        self.profile = profile_from_metadata(vocabulary.metadata, special, context_length)

    def _dispatch(self, event: str, value: Any) -> None:
        if event == "counts":
            future = self._counts.popleft()
            if not future.done():
                future.set_result(value)
            return
        if event != "steps":
            raise ValueError(f"the engine says {event!r}, which means nothing")
        for job_id, step in value:
            live = self._live.get(job_id)
            if live is None:
                continue
            if isinstance(step, LegatoError):
                self._fail(live, step)
                continue
            if not step.tokens and not step.prompt and step.finish is None:
                if live.is_accepted:
                    continue  # Accepted once already, by a worker that died since.
                live.is_accepted = True
            live.has_scores = live.has_scores or bool(step.prompt)
            live.tokens.extend(step.tokens)
            live.steps.put_nowait(step)
            if step.finish is not None:
                del self._live[job_id]

    def _end_all(self, error: LegatoError) -> None:
        for live in list(self._live.values()):
            self._fail(live, error)

    def _fail(self, live: _Live, error: Exception) -> None:
        del self._live[live.job.id]
        live.steps.put_nowait(error)


def _unavailable() -> EngineUnavailable:
    return EngineUnavailable("the engine has ended and is being started again; try again in 5 s")
