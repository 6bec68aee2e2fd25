"""What runs beside requests: each such task has an owner, and no end of one goes unseen. No task is made elsewhere.

It receives work and keeps it running. It knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

from legato.errors import LegatoError

__all__ = ["Supervisor", "beside", "together"]

_log = logging.getLogger("legato.system.supervisor")

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 30.0
_WELL_S = 60.0
"""Work that ran for so long has recovered: its next pause is the first again."""

_Result = TypeVar("_Result")


class Supervisor:
    """Keeps work running that ends only when it is told to."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._down: dict[str, str] = {}
        self._restarts: dict[str, int] = {}
        self._recovered: set[str] = set()

    def start(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        *,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> asyncio.Task[None]:
        """Run work for good; cancel the task that is returned to end it.

        When it ends by itself, with an error or without, that is logged and counted, `on_failure` is called with the
        cause, to end or to move on those who wait for the work, and after a pause it is called again.
        """
        self._restarts.setdefault(name, 0)
        return self._run(name, self._keep(name, work, on_failure))

    def once(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that comes to an end; cancel the task that is returned to end it early. An error is logged."""
        task = self._run(name, self._finish(name, work))
        task.add_done_callback(lambda _: work.close())  # It may have been cancelled before it began.
        return task

    def recovered(self, name: str) -> None:
        """Say that work runs well: its next pause is the first again. So it is after a minute without this."""
        self._recovered.add(name)

    def down(self) -> Mapping[str, str]:
        """Return what should run and does not, by name, and why."""
        return dict(self._down)

    def restarts(self) -> Mapping[str, int]:
        """Return how often each work has been started again, by name."""
        return dict(self._restarts)

    async def aclose(self) -> None:
        """End everything, and wait until it has ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._down.clear()

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(
        self, name: str, work: Callable[[], Awaitable[None]], on_failure: Callable[[Exception], None] | None
    ) -> None:
        clock = asyncio.get_running_loop().time
        pause_s = _FIRST_PAUSE_S
        try:
            while True:
                begun = clock()
                error = await _end_of(work)
                if clock() - begun >= _WELL_S or name in self._recovered:
                    pause_s = _FIRST_PAUSE_S
                    self._recovered.discard(name)
                self._down[name] = _cause(error)
                _report(name, error, f"it is started again in {pause_s:g} s")
                if on_failure is not None:
                    try:
                        on_failure(error)
                    except Exception:  # noqa: BLE001 - nothing may keep work from being started again
                        _log.exception("what follows from the end of %s has failed", name)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                self._restarts[name] += 1
                del self._down[name]
        finally:
            self._down.pop(name, None)

    async def _finish(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - told here, and nowhere else
            _report(name, error, "it is not started again")


async def _end_of(work: Callable[[], Awaitable[None]]) -> Exception:
    """Return why work ended by itself."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await work()
    except asyncio.CancelledError as error:
        if task.cancelling():
            raise
        return RuntimeError(f"what it waited for was cancelled: {error}" if str(error) else "it was cancelled")
    except Exception as error:  # noqa: BLE001 - told, whatever it is
        return error
    return RuntimeError("it ended by itself")


def _cause(error: Exception) -> str:
    return error.message if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"


def _report(name: str, error: Exception, then: str) -> None:
    """Log an end. What is no failure of ours to name may be a fault in the code: then it is told where."""
    where = None if isinstance(error, LegatoError) else error
    _log.error("%s has ended: %s; %s", name, _cause(error), then, exc_info=where)


class beside(Generic[_Result]):
    """Runs a coroutine beside a block: `async with beside(watch()) as task`.

    Behind the block it is cancelled if it still runs, and waited for. An error that ended it is raised there, unless
    the block has one of its own.
    """

    __slots__ = ("_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work

    async def __aenter__(self) -> asyncio.Task[_Result]:
        """Start it."""
        self._task = asyncio.get_running_loop().create_task(self._work)
        return self._task

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        block = asyncio.current_task()
        assert block is not None
        num_cancelled = block.cancelling()
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            if block.cancelling() > num_cancelled:
                raise
        except Exception as failure:
            if error is None:
                raise
            if error is not failure:
                _log.warning("an error behind another one: %s", _cause(failure), exc_info=failure)


async def together(*works: Coroutine[Any, Any, _Result]) -> list[_Result]:
    """Run coroutines side by side and return their results. The first error ends the others, and is raised."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
