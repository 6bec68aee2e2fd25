"""A worker process as the server sees it: started, spoken to, watched and ended.

It receives commands and gives events; both are the worker's (`worker`). Whatever goes wrong with the process ends in an
exception of whoever runs it. It knows no Jobs.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from legato.engines.llamacpp.worker import WorkerSettings, pack
from legato.errors import ConfigError, EngineUnavailable
from legato.system.signals import blocked_in_children
from legato.system.supervisor import beside

__all__ = ["Child", "Spawn", "Worker", "running_worker"]

_log = logging.getLogger("legato.engine")

_LOAD_S = 300
_END_S = 5.0
"""So long a killed process may take to be gone."""
_DEAD_S = 0.5
"""So long one that has closed its socket may take to say how it ended."""
_MAX_MESSAGE = 256 * 2**20
_MAX_ERRORS = 8192
"""Bytes; what it writes to standard error need not have lines."""

_TICK_S = 1.0
"""So often a silent worker is looked at. Looks are counted, not seconds: this process may have been stopped as well."""
_MAX_STILL = 5
"""Looks at a worker that has neither spoken nor computed, nor waited for memory or a disk: it is stopped, or waits for
what never comes.
"""
_MAX_STILL_LOADING = 30
"""The same while it loads, perhaps from another machine's disk."""
_MAX_SILENT = 60
"""Looks at a worker that has not spoken, though it computes: longer than any step, unless the machine is very slow."""
_MAX_BATCHES = 20
"""The same, in multiples of what a full batch takes by the measure of its start."""

_REINSTALL = (
    "llama.cpp cannot run on this processor as it was built; install it again with "
    "`CMAKE_ARGS='-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON' "
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python`"
)


class Child:
    """A process of the operating system and a socket to it: all that is not in our hands. Make it with `spawn`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.pid = process.pid

    @classmethod
    async def spawn(cls, environment: Mapping[str, str], program: Sequence[str] = ()) -> Child:
        """Start a process, by default a worker, with the number of its end of the socket as its last argument.

        Raises:
            OSError: there is no memory for it, or no descriptor.
        """
        command = program or (sys.executable, "-m", "legato.engines.llamacpp.worker")
        ours, theirs = socket.socketpair()
        try:
            with theirs, blocked_in_children():
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env=dict(environment),
                )
        except BaseException:
            ours.close()
            raise
        try:
            return cls(process, *await asyncio.open_connection(sock=ours))
        except BaseException:
            ours.close()
            process.kill()
            raise

    def write(self, data: bytes) -> None:
        """Send bytes, without waiting."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def read(self, num: int) -> bytes:
        """Receive so many bytes.

        Raises:
            asyncio.IncompleteReadError, ConnectionError: the other end is closed.
        """
        return await self._reader.readexactly(num)

    async def read_errors(self) -> bytes:
        """Receive some of what it writes to standard error; nothing at its end."""
        assert self._process.stderr is not None
        return await self._process.stderr.read(1 << 16)

    def close(self) -> None:
        """Close the socket, upon which a worker ends by itself."""
        self._writer.close()

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        return await self._process.wait()

    def work_done(self) -> tuple[int, ...]:
        """Return numbers that change while it computes, reads memory or waits for a disk."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        faults_and_ticks = (int(fields[place]) for place in (7, 9, 11, 12))
        return (*faults_and_ticks, time.monotonic_ns() if fields[0] == "D" else 0)


Spawn = Callable[[Mapping[str, str]], Awaitable[Child]]
"""Starts the process of a worker."""


class Worker:
    """A worker that runs. Made by `running_worker`; before all else it has to `load`."""

    def __init__(self, child: Child, settings: WorkerSettings) -> None:
        self._child = child
        self._settings = settings
        self._errors: deque[str] = deque(maxlen=8)
        self._is_loaded = False
        self._is_awaited: Callable[[], bool] = lambda: True
        self._max_silent = _MAX_SILENT
        self._num_received = 0
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the worker is of no use any more, though it has not died."""
        self.pid = child.pid

    def send(self, command: Any) -> None:
        """Send a command; if the worker is dead, nobody hears it."""
        data = pack(command)
        try:
            self._child.write(data)
        except Exception as error:  # noqa: BLE001 - handed over to who uses the worker
            self._break(error)

    async def load(self, meanwhile: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Let it load its model. `meanwhile` gets the context length once the file is found to be a model.

        Raises:
            ConfigError: it refuses.
            EngineUnavailable: it has died, or hangs.
        """

        async def greet() -> None:
            self.send(self._settings)
            event, value = await self._receive()
            if event == "refused":
                raise ConfigError(value)
            async with beside(meanwhile(value)) as other:
                _, batch_s = await self._receive()
                await other
            self._max_silent = max(_MAX_SILENT, int(_MAX_BATCHES * batch_s / _TICK_S))

        try:
            async with asyncio.timeout(_LOAD_S):
                await self._while_usable(greet())
        except TimeoutError:
            raise EngineUnavailable(f"the engine has not loaded {self._settings.path} in {_LOAD_S} s") from None
        self._is_loaded = True

    async def run(self, dispatch: Callable[[str, Any], None], is_awaited: Callable[[], bool]) -> None:
        """Hand out events until the worker dies. While `is_awaited` says that somebody waits, it has to show life.

        Raises:
            EngineUnavailable: it has died, or hangs.
        """

        async def listen() -> None:
            while True:
                event, value = await self._receive()
                if event != "pong":
                    dispatch(event, value)

        self._is_awaited = is_awaited
        await self._while_usable(listen())

    async def _receive(self) -> tuple[str, Any]:
        size = int.from_bytes(await self._child.read(4), "big")
        if size > _MAX_MESSAGE:
            raise pickle.UnpicklingError(f"a message of {size} bytes")
        message: tuple[str, Any] = pickle.loads(await self._child.read(size))
        self._num_received += 1
        return message

    async def _while_usable(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work with the worker; put its death into words."""
        try:
            async with beside(work) as working:
                await asyncio.wait((working, self._broken), return_when=asyncio.FIRST_COMPLETED)
                await (self._broken if self._broken.done() else working)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EngineUnavailable(await self._describe_death()) from None

    async def _describe_death(self) -> str:
        """Say how it died, which it has done or is about to do."""
        doing = "" if self._is_loaded else f" while it loaded {self._settings.path}"
        try:
            code = await asyncio.wait_for(self._child.wait(), _DEAD_S)
        except TimeoutError:
            return f"the engine closed its socket{doing}"
        if code == -signal.SIGILL:
            return _REINSTALL
        if code == -signal.SIGKILL:
            return f"the engine was killed{doing}: probably memory does not suffice"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        await asyncio.sleep(0)  # What it said last may be read only now.
        last = f": {self._errors[-1]}" if self._errors else ""
        return f"the engine died ({name}){doing}{last}"

    # -- beside it ----------------------------------------------------------------------------------------------------

    async def needed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work without which the worker is of no use."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - handed over to who uses the worker
            self._break(error)

    def _break(self, error: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
            self._broken.exception()  # Nobody need ask for it.

    async def read_errors(self) -> None:
        """Keep the last lines that native code writes before it dies. If nobody read them, it would wait for ever."""
        rest = b""
        while data := await self._child.read_errors():
            *lines, rest = (rest + data)[-_MAX_ERRORS:].split(b"\n")
            self._errors.extend(text for line in lines if (text := line.decode("utf-8", "replace").strip()))
        self._errors.extend(text for text in (rest.decode("utf-8", "replace").strip(),) if text)

    async def watch(self) -> None:
        """See that it lives while somebody waits for it.

        Raises:
            EngineUnavailable: it does not.
        """
        silent = still = 0
        before: tuple[int, object] = (-1, None)
        while True:
            await asyncio.sleep(_TICK_S)
            now = (self._num_received, self._work_done())
            if now[0] != before[0] or not self._is_awaited():
                silent = still = 0
            else:
                silent += 1
                still = still + 1 if now == before else 0
            before = now
            if not self._is_loaded:
                is_hung = still >= _MAX_STILL_LOADING
            else:
                is_hung = still >= _MAX_STILL or silent >= self._max_silent
                if silent == 1:
                    self.send(("ping",))  # Answered between two steps.
            if is_hung:
                raise EngineUnavailable(f"the engine hung: no sign of life for {silent * _TICK_S:g} s")

    def _work_done(self) -> object:
        try:
            return self._child.work_done()
        except (OSError, ValueError, IndexError):
            return object()  # Equal to none before: who cannot be seen may be at work.

    async def end(self, grace_s: float) -> None:
        """End it. It has so long to do so by itself."""
        with self._all_the_same():
            self._child.close()
        if grace_s:
            with self._all_the_same(), suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), grace_s)
        for _ in range(2):
            with self._all_the_same():
                self._child.kill()
            with self._all_the_same():
                await asyncio.wait_for(self._child.wait(), _END_S)
                return

    @contextmanager
    def _all_the_same(self) -> Iterator[None]:
        """Go on after an error: without its socket the process ends by itself, and another one is started anyway."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - told here
            _log.error("the engine's process %d cannot be ended: %r", self.pid, error)


@asynccontextmanager
async def running_worker(
    settings: WorkerSettings, environment: Mapping[str, str], spawn: Spawn, grace_s: Callable[[], float]
) -> AsyncIterator[Worker]:
    """Start a worker, which has yet to `load`, and end it behind the block.

    `grace_s` says how long it may then take.

    Raises:
        EngineUnavailable: it cannot be started.
    """
    try:
        child = await spawn(environment)
    except OSError as error:
        raise EngineUnavailable(f"no process can be started: {error.strerror or error}") from None
    worker = Worker(child, settings)
    async with beside(worker.needed(worker.read_errors())) as reading:
        try:
            async with beside(worker.needed(worker.watch())):
                yield worker
        finally:
            await worker.end(grace_s())
            # Until all is read asyncio holds on to the process; an event loop that is closed earlier complains.
            await asyncio.wait((reading,), timeout=_DEAD_S)
