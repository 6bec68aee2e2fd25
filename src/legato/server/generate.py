"""The endpoint of a path that generates: parse, plan, run and answer, streamed or whole.

It receives requests that the gate has let in, and knows no dialect but the one that it is given.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.types import Receive, Scope, Send

from legato.dialects.base import Dialect, Encoder
from legato.run.answers import choose_best, collect, total_usage
from legato.run.events import Event
from legato.run.models import Models
from legato.run.plan import plan, planners
from legato.run.run import Run
from legato.server.generations import Generations
from legato.server.generations.routes import send_live
from legato.server.ledger import Ledger
from legato.server.middleware import Gate
from legato.server.queries import facts, report_headers
from legato.server.streaming import run_aside, send_body, send_stream, while_connected
from legato.server.telemetry import Telemetry
from legato.storage.keys import Key
from legato.types import CompletionRequest, Finished, Usage
from legato.wire import KEEP_ALIVE, parse_body

__all__ = ["Generation"]


class Generation:
    """The endpoint of one dialect's path."""

    def __init__(
        self,
        path: str,
        dialect: Dialect,
        models: Models,
        gate: Gate,
        ledger: Ledger,
        telemetry: Telemetry,
        generations: Generations,
    ) -> None:
        self._path = path
        self._dialect = dialect
        self._models = models
        self._gate = gate
        self._ledger = ledger
        self._telemetry = telemetry
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse, plan, run and answer."""
        key: Key = scope["key"]
        body = await self._gate.read_body(scope, receive)

        def read() -> tuple[dict[str, Any], CompletionRequest]:
            fields = parse_body(body)
            return fields, self._dialect.parse(fields)

        fields, parsed = await run_aside(receive, planners(len(body)), read)
        request = replace(parsed, caller=key.name, control_tokens=key.control_tokens)
        model = self._models.only(key.models).resolve(request.model)
        threads = planners(len(body), request.constraint)
        run = await run_aside(receive, threads, lambda: plan(request, model))
        if run.request.resumable and run.jobs:
            live = await self._generations.start(key, self._path, fields, run)
            scope["notes"] |= {"model": model.name, "generation": live.record.id}
            await send_live(self._generations, live, receive, send)
            return
        async with self._ledger.account(key, run):
            with self._telemetry.run(run, scope["notes"]):
                await self._answer(run, receive, send)

    async def _answer(self, run: Run, receive: Receive, send: Send) -> None:
        request = run.request
        headers = report_headers(run.report)
        encoder = self._dialect.encoder(request)
        if request.output.stream:
            kind = self._dialect.stream_type
            headers["content-type"] = kind
            async with aclosing(self._telemetry.events(run)) as events:
                frames = _frames(run, encoder, events)
                stream = send_stream(send, frames, encoder.failure, headers, KEEP_ALIVE[kind])
                await while_connected(receive, stream)
        else:
            choices = await while_connected(receive, collect(self._telemetry.events(run)))
            answers = choose_best(choices, run.num_drawn, request.num_choices)
            usage = total_usage([answer.usage for answer in choices], run.num_drawn)
            await send_body(send, encoder.whole(answers, usage, facts(run, usage)), status=200, headers=headers)


async def _frames(run: Run, encoder: Encoder, events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Encode a stream: one frame for each event, which may be empty. The opening goes out with the first."""
    usages: dict[int, Usage] = {}
    opening = encoder.start()
    async for event in events:
        if isinstance(event, Finished):
            usages[event.choice] = event.usage
        yield b"".join((*opening, *encoder.event(event)))
    usage = total_usage([usages[choice] for choice in sorted(usages)], run.num_drawn)
    for frame in encoder.end(usage, facts(run, usage)):
        yield frame
