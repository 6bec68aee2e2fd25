"""Drives a generation: runs its Job, and adds each frame of the answer, and the end, to its `Live`.

It returns nothing and raises nothing: a failure, too, ends the `Live`. It knows no journal and no reader.
"""

from __future__ import annotations

import logging
from asyncio import sleep
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing

from legato.dialects.base import Encoder
from legato.errors import LegatoError
from legato.run.answers import collect, total_usage
from legato.run.events import Event
from legato.server.generations.live import Live
from legato.server.ledger import Ledger
from legato.server.queries import facts
from legato.server.telemetry import Telemetry
from legato.storage.keys import Key
from legato.storage.records import End, Entry, Written

__all__ = ["Driver"]

_log = logging.getLogger("legato.server")


class Driver:
    """Drives one generation, once. `note` is called when its Live has news."""

    def __init__(
        self, live: Live, encoder: Encoder, key: Key, ledger: Ledger, telemetry: Telemetry, note: Callable[[Live], None]
    ) -> None:
        self._live = live
        self._encoder = encoder
        self._key = key
        self._ledger = ledger
        self._telemetry = telemetry
        self._note = note
        self._num_frames = 0
        self._num_tokens = len(live.run.written)
        """How many of the run's tokens are in entries."""

    async def drive(self) -> None:
        """Run the generation to its end. If cancelled, it stays without an end, for another process to continue."""
        live = self._live
        try:
            await self._drive()
        except LegatoError as error:
            live.fail(error)
        except Exception:  # noqa: BLE001 - logged here and sent to readers; no caller awaits this task
            _log.exception("generation %s failed", live.record.id)
            live.fail(LegatoError("something went wrong in the server; its log has the reason"))
        self._note(live)

    async def _drive(self) -> None:
        run, encoder = self._live.run, self._encoder
        events: list[Event] = []
        async with self._ledger.account(self._key, run, is_journaled=True):
            with self._telemetry.run(run, {}):
                opening = encoder.start()
                async with aclosing(self._telemetry.events(run)) as news:
                    async for event in news:
                        events.append(event)
                        self._add((*opening, *encoder.event(event)))
                        await sleep(0)
        (answer,) = await collect(_again(events))
        usage = total_usage([answer.usage], 1)
        self._add(encoder.end(usage, facts(run, usage)))
        prefix = run.jobs[0].prompt.prefix if run.request.output.echo else ""
        written = Written(answer.text.removeprefix(prefix), answer.reasoning)
        self._live.finish(End("done", encoder.whole((answer,), usage, facts(run, usage)), written))

    def _add(self, frames: Iterable[bytes]) -> None:
        """Add frames to the `Live`, except those that it has from the journal already."""
        live, tokens = self._live, self._live.run.tokens or []
        for frame in frames:
            self._num_frames += 1
            if self._num_frames > len(live.entries):
                live.add(Entry(frame, tuple(tokens[self._num_tokens :])))
                self._num_tokens = len(tokens)
                self._note(live)


async def _again(events: Iterable[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event
