"""The embedded engine as the server sees it: it starts the worker, passes Jobs to it and starts it again when it dies.

Native code can end a process. When the worker dies, each running Job is submitted to the next one with the tokens
that it has already produced, so its text goes on as if nothing had happened; a Job that was running at two deaths
ends in an error.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from legato.engines.llamacpp.recall import Recall
from legato.engines.llamacpp.worker import WorkerSettings, pack
from legato.errors import ConfigError, EngineUnavailable, GenerationFailed, LegatoError
from legato.profiles import Profile, profile_from_metadata
from legato.seam import Seam
from legato.signals import blocked_in_children
from legato.types import Capabilities, Job, Step, Token, Tokenizer

__all__ = ["LlamaCppEngine"]

_START_TIMEOUT_S = 300
_SPILL_TIMEOUT_S = 20
_MAX_STARTS = 3
_MAX_DEATHS = 2
"""A Job is given up when the worker has died this often under it."""

_REINSTALL = (
    "llama.cpp cannot run on this processor as it was built; install it again with "
    "`CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON' "
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python`"
)


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

    def __init__(self, settings: WorkerSettings, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._environment = environment
        self._live: dict[str, _Live] = {}
        self._recall = Recall()
        self._counts: deque[asyncio.Future[Mapping[str, int]]] = deque()
        self._errors: deque[str] = deque(maxlen=8)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading_errors: asyncio.Task[None]
        self._watch: asyncio.Task[None] | None = None
        self._failure: EngineUnavailable | None = None
        self._is_closing = False
        self.num_restarts = 0
        self.tokenizer: Tokenizer
        self.seam: Seam
        self.profile: Profile

    @classmethod
    async def start(cls, settings: WorkerSettings, environment: Mapping[str, str]) -> LlamaCppEngine:
        """Start a worker and load the model.

        Args:
            settings: what to load.
            environment: the worker's environment variables.

        Raises:
            ConfigError: the file is no usable model, memory does not suffice, or the native code does not run here.
        """
        engine = cls(settings, environment)
        try:
            reader = await engine._start_worker(engine._load_vocabulary)
        except BaseException:
            await engine.aclose()
            raise
        engine._watch = asyncio.create_task(engine._run(reader))
        return engine

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none that takes Jobs."""
        return self._process.pid if self._process and self._writer else None

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
        if self._failure is not None:
            raise self._failure
        live = _Live(job)
        self._live[job.id] = live
        self._send(("submit", job))
        try:
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
            EngineUnavailable: there is no worker now.
        """
        if self._writer is None:
            raise EngineUnavailable("the engine is being started again")
        future: asyncio.Future[Mapping[str, int]] = asyncio.get_running_loop().create_future()
        self._counts.append(future)
        self._send(("count",))
        return await future

    def counters(self) -> Mapping[str, int]:
        """Return what is known without asking the worker."""
        failed = int(self._failure is not None)
        return {"running": len(self._live), "restarts": self.num_restarts, "failed": failed}

    async def aclose(self) -> None:
        """End the worker."""
        self._is_closing = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._writer is not None and self._process is not None and self._settings.spill_dir is not None:
            self._writer.close()  # The worker then spills what it has, and ends by itself.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _SPILL_TIMEOUT_S)
        await self._end_worker()

    # -- the worker ---------------------------------------------------------------------------------------------------

    async def _end_worker(self) -> int | None:
        """Kill the worker, wait until it is gone and all it said is read; return its exit code. None: there was none.

        Only then has asyncio let go of the process: an event loop that closes earlier complains on standard error.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        await self._reading_errors
        return code

    def _send(self, command: tuple[Any, ...]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(command))

    async def _start_worker(self, read_too: Callable[[int], None] | None = None) -> asyncio.StreamReader:
        """Start a process, let it load the model; return its events.

        Once it has found the file to be a model, `read_too` reads it as well, in a thread, with the model's context
        length.
        """
        ours, theirs = socket.socketpair()
        with theirs, blocked_in_children():
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "legato.engines.llamacpp.worker",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=dict(self._environment),
            )
        self._reading_errors = asyncio.create_task(self._read_errors(self._process))
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack(self._settings))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                event, value = await _receive(reader)
                if event == "loaded":
                    reading = [asyncio.to_thread(read_too, value)] if read_too else []
                    await asyncio.gather(_receive(reader), *reading)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            writer.close()
            if not isinstance(error, TimeoutError):
                await self._process.wait()  # It has died by itself: how, is worth telling.
            code = await self._end_worker()
            assert code is not None
            raise ConfigError(self._describe_death(code)) from None
        except BaseException:
            writer.close()
            raise
        if event == "refused":
            writer.close()
            await self._end_worker()
            raise ConfigError(value)
        self._writer = writer
        return reader

    def _describe_death(self, code: int) -> str:
        if code == -signal.SIGILL:
            return _REINSTALL
        if code == -signal.SIGKILL:
            return f"the engine was killed while it loaded {self._settings.path}: probably memory does not suffice"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = f": {self._errors[-1]}" if self._errors else ""
        return f"the engine died ({name}) while it loaded {self._settings.path}{last}"

    async def _read_errors(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines that native code wrote before it died."""
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode("utf-8", "replace").strip()
            if text:
                self._errors.append(text)

    def _load_vocabulary(self, context_length: int) -> None:
        from legato.engines.llamacpp.binding import Vocabulary

        vocabulary = Vocabulary.load(self._settings.path)
        special = {id: vocabulary.pieces[id] for id in vocabulary.control_ids}
        self.tokenizer = vocabulary
        self.seam = Seam(vocabulary)
        self.profile = profile_from_metadata(vocabulary.metadata, special, context_length)

    async def _run(self, reader: asyncio.StreamReader) -> None:
        """Hand out events; start the worker again when it dies."""
        while True:
            try:
                while True:
                    self._dispatch(*await _receive(reader))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            await self._end_worker()
            while self._counts:
                self._counts.popleft().set_exception(EngineUnavailable("the engine died"))
            if self._is_closing:
                return
            self.num_restarts += 1
            for live in list(self._live.values()):
                live.num_deaths += 1
                if live.num_deaths >= _MAX_DEATHS:
                    self._fail(live, GenerationFailed("the engine died twice while it worked on this request"))
            restarted = await self._restart()
            if restarted is None:
                return
            reader = restarted
            for live in self._live.values():
                self._send(("submit", live.remaining()))

    async def _restart(self) -> asyncio.StreamReader | None:
        """Start the worker again, in a few tries; None: it cannot be had, and every Job has failed."""
        reason = ""
        for _ in range(_MAX_STARTS):
            if self._is_closing:
                return None
            try:
                reader = await self._start_worker()
            except ConfigError as error:
                reason = error.message
            else:
                return reader
        self._failure = EngineUnavailable(f"the engine died and could not be started again: {reason}")
        for live in list(self._live.values()):
            self._fail(live, self._failure)
        return None

    def _dispatch(self, event: str, value: Any) -> None:
        if event == "counts":
            self._counts.popleft().set_result(value)
            return
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

    def _fail(self, live: _Live, error: Exception) -> None:
        del self._live[live.job.id]
        live.steps.put_nowait(error)


async def _receive(reader: asyncio.StreamReader) -> tuple[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    message: tuple[str, Any] = pickle.loads(await reader.readexactly(size))
    return message
