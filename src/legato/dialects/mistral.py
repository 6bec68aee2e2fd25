"""Mistral's infill: a prompt and a suffix are asked for, a chat's answer comes back.

Unlike elsewhere a field that is not known is refused, and what is wrong with a field is 422, because this vendor's
clients expect it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from legato.dialects.base import Body, Encoder, Facts, read_body, unknown_fields
from legato.dialects.openai_requests import read_stops, stop_field
from legato.dialects.openai_responses import ChatEncoder, ChatRoute, Shape, error_type
from legato.errors import InvalidField, LegatoError
from legato.types import (
    Accepted,
    CompletionRequest,
    Delta,
    Finished,
    Infill,
    Output,
    SamplingOptions,
    Stops,
    Text,
    Usage,
)
from legato.wire import DONE

__all__ = ["SHAPE", "InfillDialect"]

_TYPES = {"authentication_error", "rate_limit_error", "server_error"}


def _error(error: LegatoError) -> Mapping[str, Any]:
    if isinstance(error, InvalidField):
        place = ["body", error.param] if error.param else ["body"]
        return {"detail": [{"type": error.code, "loc": place, "msg": error.message}]}
    kind = error_type(error)
    return {
        "object": "error",
        "message": error.message,
        "type": kind if kind in _TYPES else "invalid_request_error",
        "param": error.param,
        "code": error.code,
    }


SHAPE = Shape(
    error=_error,
    status=lambda error: 422 if isinstance(error, InvalidField) else error.status,
    message={"tool_calls": None, "prefix": False},
)


class _InfillBody(Body):
    model_config = ConfigDict(json_schema_extra={"additionalProperties": False})  # Refused in `parse`, by name.

    model: Annotated[str, Field(min_length=1)]
    prompt: str
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, le=1.5)] | None = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="a number > 0 and <= 1")] = None
    stop: Annotated[str | list[str] | None, stop_field()] = None
    random_seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stream: bool = False
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None


class InfillDialect(ChatRoute):
    """`/v1/fim/completions`."""

    shape = SHAPE
    body = _InfillBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        for name in unknown_fields(read):
            raise InvalidField(
                f"`{name}` is not a field of this path; those are {', '.join(self.body.model_fields)}",
                param=name,
                code="extra_forbidden",
            )
        strings, _ = read_stops(read.stop)
        return CompletionRequest(
            model=read.model,
            source=Infill(read.prompt, read.suffix) if read.suffix else Text((read.prompt,)),
            sampling=SamplingOptions(temperature=read.temperature, top_p=read.top_p, seed=read.random_seed),
            max_tokens=read.max_tokens,
            stops=Stops(strings=strings, min_tokens=read.min_tokens),
            output=Output(stream=read.stream),
            ignored=tuple(name for name in ("metadata", "prompt_cache_key") if getattr(read, name) is not None),
        )

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return _Encoder(request, self.shape)


class _Encoder(ChatEncoder):
    """Writes usage, unasked, on the last chunk that has a choice: there the clients look for it."""

    _reason: str

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """As in a chat, but for the end, which waits for the usage."""
        if isinstance(event, Finished):
            self._reason = event.reason
            return iter(())
        return super().event(event)

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """The finish reason with the usage, and the mark of the end."""
        yield self._chunk(self._choice(0, {"content": ""}, reason=self._reason), usage=self._shape.usage(usage))
        yield DONE
