"""Ollama: `/api/generate`, and what its clients ask beside.

It receives bodies that are JSON already and returns `CompletionRequest`s, lines and replies. Where it differs from
Ollama, docs/dialects/ollama.md says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from legato import __version__
from legato.dialects.base import Body, Catalogue, Encoder, Facts, Reply, read_body, unknown_fields
from legato.dialects.constraints import json_constraint
from legato.dialects.openai_requests import (
    EFFORTS,
    Penalty,
    Seed,
    Temperature,
    read_stops,
    sampling_options,
    stop_field,
)
from legato.errors import InvalidField, LegatoError, UnsupportedFeature
from legato.types import (
    REST_OF_CONTEXT,
    Accepted,
    Answer,
    Chat,
    CompletionRequest,
    ConstraintOptions,
    Delta,
    Finished,
    FinishReason,
    Infill,
    Message,
    Output,
    ReasoningOptions,
    Source,
    Stops,
    Text,
    TextToken,
    Times,
    Usage,
)
from legato.wire import LINES, encode_json, encode_line

__all__ = ["GenerateDialect", "encode_ollama_error", "tags", "version"]


class _Options(Body):
    num_predict: Annotated[int, Field(ge=-2)] = -1
    stop: Annotated[str | list[str] | None, stop_field()] = None
    seed: Seed = -1
    temperature: Temperature = 0.8
    top_k: Annotated[int, Field(ge=-1)] = 40
    top_p: Annotated[float, Field(gt=0, le=1, description="a number > 0 and <= 1")] = 0.9
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repeat_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0


class _GenerateBody(Body):
    model: Annotated[str, Field(min_length=1)]
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    stream: bool = True
    options: _Options = Field(default_factory=_Options)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    template: str = ""
    context: list[int] = Field([])
    images: list[str] = Field([])
    format: Literal["", "json"] | dict[str, Any] = ""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool = False
    shift: bool = False

    @property
    def source(self) -> Source:
        """What is to be written."""
        if not self.prompt and not self.suffix:
            return Text(())
        if self.raw:
            return Text((self.prompt,))
        if self.suffix:
            return Infill(self.prompt, self.suffix)
        system = (Message("system", self.system),) if self.system else ()
        return Chat((*system, Message("user", self.prompt)))

    def check(self) -> None:
        """Refuse what is not there."""
        if self.raw and (self.template or self.system or self.context):
            raise InvalidField("raw mode does not support template, system, or context", param="raw")
        for name in ("template", "context", "images"):
            value = getattr(self, name)
            if value:
                raise UnsupportedFeature(f"`{name}` is not supported, got {value!r:.80}", param=name)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")

    @property
    def constraint(self) -> ConstraintOptions | None:
        """What the answer must be."""
        if not self.format:
            return None
        return json_constraint({"type": "object"} if self.format == "json" else self.format, "format")

    @property
    def reasoning(self) -> ReasoningOptions:
        """How long the model may think."""
        if self.think is None:
            return ReasoningOptions()
        effort = EFFORTS[self.think] if isinstance(self.think, str) else None if self.think else 0.0
        return ReasoningOptions(effort, fields=("think",))

    @property
    def ignored(self) -> Iterator[str]:
        """Name what has no effect."""
        yield from unknown_fields(self)
        if self.think and not isinstance(self.source, Chat):
            yield "think"
        for name in ("truncate", "shift"):
            if getattr(self, name):
                yield name
        if self.suffix and self.raw:
            yield "suffix"
        if self.suffix and self.system:
            yield "system"
        for name in unknown_fields(self.options):
            yield f"options.{name}"


class GenerateDialect:
    """`/api/generate`."""

    stream_type = LINES
    body = _GenerateBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        given = body.get("options")
        if isinstance(given, dict):
            body = {**body, "options": {name: value for name, value in given.items() if value is not None}}
        read = read_body(self.body, body)
        read.check()
        options = read.options
        return CompletionRequest(
            model=read.model,
            source=read.source,
            sampling=sampling_options(
                options,
                repetition_penalty=options.repeat_penalty,
                seed=None if options.seed == -1 else options.seed,
            ),
            max_tokens=REST_OF_CONTEXT if options.num_predict < 0 else options.num_predict,
            stops=Stops(strings=read_stops(options.stop)[0]),
            constraint=read.constraint,
            reasoning=read.reasoning,
            output=Output(stream=read.stream, logprobs=(read.top_logprobs or 0) if read.logprobs else None),
            ignored=tuple(read.ignored),
        )

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return _Encoder(request)


class _Encoder:
    """Writes lines; the last one says that it is done."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request

    def start(self) -> Iterator[bytes]:
        """Nothing comes before the text."""
        return iter(())

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """A line for each piece of text, and one for the end."""
        match event:
            case Delta(_, text, tokens, _, "content"):
                yield encode_line({**self._piece(text, tokens), "done": False})
            case Delta(_, text):
                yield encode_line({**self._piece("", ()), **_thought(text), "done": False})
            case Finished(_, reason, _, usage, times):
                yield encode_line({**self._piece("", ()), **_done(reason, usage, times)})

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """A line that all is done, where there was nothing to do."""
        if self._request.source == Text(()):
            yield encode_line(self._loaded())

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """One line that says what happened."""
        yield encode_line(_error(error))

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        if not answers:
            return encode_json(self._loaded())
        (answer,) = answers
        piece = {**self._piece(answer.text, answer.tokens), **_thought(answer.reasoning)}
        return encode_json({**piece, **_done(answer.reason, answer.usage, answer.times)})

    def _piece(self, text: str, tokens: tuple[TextToken, ...]) -> dict[str, Any]:
        piece = {"model": self._request.model, "created_at": _now(), "response": text}
        if self._request.output.logprobs is None or not tokens:
            return piece
        return {**piece, "logprobs": [_scored(token) for token in tokens]}

    def _loaded(self) -> dict[str, Any]:
        return {**self._piece("", ()), "done": True, "done_reason": "load"}


def _thought(text: str | None) -> dict[str, str]:
    return {"thinking": text} if text else {}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _scored(token: TextToken) -> dict[str, Any]:
    top = [_probability(scored.data.decode("utf-8", "replace"), scored.data, scored.logprob) for scored in token.top]
    return {**_probability(token.text, token.data, token.logprob), **({"top_logprobs": top} if top else {})}


def _probability(text: str, data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(data)}


def _done(reason: FinishReason, usage: Usage, times: Times) -> dict[str, Any]:
    """Say that all is done, with counts and nanoseconds; those that are zero are left out."""
    counts = {
        "total_duration": round((times.reading_s + times.writing_s) * 1e9),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": round(times.reading_s * 1e9),
        "eval_count": usage.completion_tokens,
        "eval_duration": round(times.writing_s * 1e9),
    }
    return {"done": True, "done_reason": reason, **{name: count for name, count in counts.items() if count}}


def tags(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/api/tags`: the served models. Ollama's clients want all keys; what is not known is empty."""
    details = {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }
    started = datetime.fromtimestamp(catalogue.started, UTC).isoformat().replace("+00:00", "Z")
    known = {"modified_at": started, "size": 0, "digest": "", "details": details}
    return Reply({"models": [{"name": name, "model": name, **known} for name in catalogue.names]})


def version(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/api/version`: Legato's."""
    return Reply({"version": __version__})


def _error(error: LegatoError) -> dict[str, Any]:
    return {"error": error.message}


def encode_ollama_error(error: LegatoError) -> tuple[int, bytes]:
    """Return an error's status and body, which is one text."""
    return error.status, encode_json(_error(error))
