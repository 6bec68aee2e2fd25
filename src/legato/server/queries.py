"""Requests that are answered without an engine: a text's tokens, a chat's prompt, which models there are.

An endpoint receives a body and sends the dialect's reply. It runs no Jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from legato.dialects.base import Answerer, Facts, KnownModel
from legato.prompting.profiles import Profile
from legato.prompting.render import render_open
from legato.run.models import Model, Models
from legato.run.plan import planners
from legato.run.run import Report, Run
from legato.server.middleware import Gate
from legato.server.streaming import run_aside, send_body
from legato.types import Chat, Tokenizer, Usage
from legato.wire import encode_json, parse_body

__all__ = ["Query", "facts", "report_headers"]

_MAX_HEADER = 2048
"""Clients and proxies refuse an answer whose headers are long, some from 4 KiB on."""


class Query:
    """The endpoint of one path."""

    def __init__(self, answer: Answerer, models: Models, started: float, gate: Gate) -> None:
        self._answer = answer
        self._models = models
        self._started = started
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse and answer."""
        data = await self._gate.read_body(scope, receive) if scope["method"] == "POST" else b"{}"
        served = ServedModels(self._models.only(scope["key"].models), self._started)

        def work() -> tuple[bytes, Sequence[str]]:
            reply = self._answer(parse_body(data), served)
            return encode_json(reply.value), reply.ignored

        body, ignored = await run_aside(receive, planners(len(data)), work)
        await send_body(send, body, status=200, headers=_ignored_header(ignored))


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names fields without effect; none if there are none."""
    if not names:
        return {}
    text = ", ".join(quote(name, safe="[]._-") for name in names)
    if len(text) > _MAX_HEADER:
        text = text[:_MAX_HEADER].rpartition(", ")[0] + ", ..."
    return {"legato-ignored": text}


def report_headers(report: Report) -> dict[str, str]:
    """Return the headers that report how the request was run."""
    headers = {
        "legato-seed": str(report.seed),
        "legato-healed": ", ".join(map(str, report.healed_bytes)),
        **_ignored_header(report.ignored),
    }
    if report.clipped:
        headers["legato-clipped"] = ", ".join(report.clipped)
    if report.truncated:
        headers["legato-truncated"] = ", ".join(f"{name}={num}" for name, num in report.truncated.items())
    return headers


def facts(run: Run, usage: Usage) -> Facts:
    """Return the `legato` block of a body, with the same report; empty if the request did not ask for it."""
    if not run.request.output.report:
        return {}
    report = run.report
    return {
        "seed": report.seed,
        "healed_bytes": list(report.healed_bytes),
        "cached_tokens": usage.cached_tokens,
        "drafted_tokens": usage.drafted_tokens,
        "ignored": list(report.ignored),
        "clipped": list(report.clipped),
        "truncated": dict(report.truncated),
        "absent": list(report.absent),
        "rounds": usage.num_rounds,
    }


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The served models, as dialects see them; implements `dialects.base.Catalogue`."""

    models: Models
    started: float

    @property
    def names(self) -> Sequence[str]:
        """All names and aliases."""
        return tuple(self.models.served)

    def find(self, name: str) -> KnownModel:
        """Return the model of a name, the first one for none."""
        return _ServedModel(self.models.resolve(name))


@dataclass(frozen=True, slots=True)
class _ServedModel:
    model: Model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.engine.tokenizer

    @property
    def profile(self) -> Profile:
        return self.model.engine.profile

    @property
    def num_places(self) -> int:
        return self.model.admission.max_running

    def open_turn(self, chat: Chat) -> str:
        return render_open(chat, self.profile)
