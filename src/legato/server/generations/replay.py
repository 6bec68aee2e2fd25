"""Rebuilds a request and its Run from a record, and encodes failures in the record's dialect.

It receives records and returns values. It drives nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from legato.dialects.base import Dialect
from legato.dialects.openai_responses import OPENAI
from legato.errors import LegatoError, ModelNotFound
from legato.run.models import Models
from legato.run.plan import plan, planners
from legato.run.run import Run
from legato.storage.keys import Key
from legato.storage.records import Record, Written
from legato.system.threads import PLANS
from legato.types import Chat, CompletionRequest, Handle, Infill, Job, Mark, Source, Text
from legato.wire import DONE, encode_event

__all__ = ["Replay", "failure_frames"]


class Replay:
    """Rebuilds runs for these models. `dialects` are those of resumable generations, by path."""

    def __init__(self, models: Models, dialects: Mapping[str, Dialect]) -> None:
        self._models = models
        self._dialects = dialects

    def request(self, record: Record, given: Mapping[str, Any], before: Written, key: Key) -> CompletionRequest:
        """Return the request of a record with the fields `given` replaced, continued after the text `before`, and with
        the seed of its Job.

        Raises:
            RequestError: it is not valid, or no longer.
        """
        request = self._dialects[record.path].parse({**record.body, **given})
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=Job.from_json(record.job).sampling.seed)
        source = _behind(request.source, before)
        return replace(request, source=source, sampling=sampling, caller=key.name, control_tokens=key.control_tokens)

    async def run(self, record: Record) -> Run:
        """Return the run of a generation whose process died, with exactly the Job that it had.

        Raises:
            ModelNotFound: this server does not have its model, or its path.
            CapacityError: the server is too busy.
            LegatoError: the request is no longer valid.
        """
        if record.path not in self._dialects:
            raise ModelNotFound(f"this server has no path `{record.path}`")
        run = await self.plan(record, {}, record.before, Key(record.key), self._models)
        handle = Handle(record.id, record.created_at)
        return replace(run, request=replace(run.request, handle=handle), jobs=(Job.from_json(record.job),), tokens=[])

    async def plan(self, record: Record, given: Mapping[str, Any], before: Written, key: Key, models: Models) -> Run:
        """Plan the request of a record for one of `models`, in a thread.

        Raises:
            RequestError: it cannot be run.
            CapacityError: the server is too busy.
        """
        request = await PLANS.run(self.request, record, given, before, key)
        threads = planners(len(record.job), request.constraint) or PLANS
        return await threads.run(plan, request, models.resolve(request.model))

    def failure(self, record: Record, error: LegatoError) -> Iterable[bytes]:
        """Encode an error as the last frames of a record's answer."""
        try:
            dialect = self._dialects[record.path]
            return dialect.encoder(dialect.parse(dict(record.body))).failure(error)
        except (LegatoError, LookupError):
            return failure_frames(error)


def failure_frames(error: LegatoError) -> Iterable[bytes]:
    """Encode an error as frames where the dialect is unknown."""
    return (encode_event(OPENAI.error(error)), DONE)


def _behind(source: Source, before: Written) -> Source:
    """Return the source continued by the text that was generated after it."""
    if before == Written():
        return source
    match source:
        case Text((str() as prompt,)):
            return replace(source, prompts=(prompt + before.text,))
        case Text((tuple() as prompt,)):
            return replace(source, prompts=((*prompt, before.text),))
        case Infill():
            return replace(source, middle=source.middle + before.text)
        case Chat():
            mark = source.mark or Mark("")
            whole = Written(mark.prefix, mark.reasoning) + before
            return replace(source, mark=replace(mark, prefix=whole.text, reasoning=whole.reasoning))
    raise AssertionError("only one prompt is resumable")
