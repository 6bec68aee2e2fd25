"""The OpenAPI document of the neutral surface: every path below `/v1` and `/admin`, `/health`, `/ready` and `/metrics`.

It receives dialects and the names of models, and returns the document. What a request may have is read from the bodies
that the dialects check, and which errors there are from their classes. What an answer has is declared here, without
room for other keys: the conformance tests hold the server to it. It knows no requests.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from legato import __version__
from legato.dialects.base import Dialect
from legato.dialects.openai_responses import OPENAI
from legato.errors import (
    BodyTimeout,
    BodyTooLarge,
    CapacityError,
    EngineUnavailable,
    GenerationFailed,
    GenerationNotFound,
    GenerationRunning,
    HostNotAllowed,
    InvalidField,
    JournalFull,
    KeyExists,
    KeyNotFound,
    LegatoError,
    MalformedBody,
    ModelNotFound,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    PromptTooLong,
    RateLimited,
    StoreUnavailable,
    UnsupportedFeature,
    UnsupportedMediaType,
)
from legato.server.admin import DAY, KeyBody
from legato.server.middleware import Reply
from legato.server.telemetry import METRICS_TYPE
from legato.storage.store import Key, UsageRow
from legato.types import FinishReason
from legato.wire import EVENTS

__all__ = ["GENERATIONS", "REPORT_HEADERS", "describe"]

REPORT_HEADERS: Mapping[str, str] = {
    "Legato-Seed": "The seed that gives this answer again.",
    "Legato-Healed": "For each prompt, how many of its last bytes the model wrote anew to join the answer.",
    "Legato-Ignored": "Fields of the request that had no effect.",
    "Legato-Clipped": "Fields whose value was cut down to what is possible.",
    "Legato-Truncated": "Parts of the request that did not fit, each with how much of it was left out.",
}
"""Headers that say what was done, each with its meaning."""

# ---------------------------------------------------------------------------------------------------------------------
# Answers

_OPTIONAL: Any = Field(default_factory=dict)
"""The default of a key that need not be there."""


class _Object(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cached(_Object):
    cached_tokens: int


class Reasoned(_Object):
    reasoning_tokens: int


class Usage(_Object):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: Cached
    completion_tokens_details: Reasoned = _OPTIONAL


class Report(_Object):
    """Told if the request has `report`."""

    seed: int
    healed_bytes: list[int]
    cached_tokens: int
    drafted_tokens: int
    ignored: list[str]
    clipped: list[str]
    truncated: dict[str, int]
    absent: list[str]
    rounds: int


class _Head(_Object):
    id: str
    created: int
    model: str
    legato: Report = _OPTIONAL


class CompletionLogprobs(_Object):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(_Object):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = _OPTIONAL
    prompt_token_ids: list[int] = _OPTIONAL


class CompletionChoice(CompletionChunkChoice):
    finish_reason: FinishReason


class Completion(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: Usage | None = _OPTIONAL


class Alternative(_Object):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(_Object):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[Alternative]


class ChatLogprobs(_Object):
    content: list[ChatToken]


class ChatMessage(_Object):
    role: Literal["assistant"]
    content: str
    reasoning_content: str | None


class ChatChoice(_Object):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = _OPTIONAL


class ChatCompletion(_Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = _OPTIONAL


class ChatDelta(_Object):
    role: Literal["assistant"] = _OPTIONAL
    content: str = _OPTIONAL
    reasoning_content: str = _OPTIONAL


class ChatChunkChoice(_Object):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs = _OPTIONAL
    finish_reason: FinishReason | None
    token_ids: list[int] = _OPTIONAL


class ChatChunk(_Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = _OPTIONAL
    prompt_token_ids: list[int] = _OPTIONAL


class InfillMessage(_Object):
    role: Literal["assistant"]
    content: str
    tool_calls: None
    prefix: bool


class InfillChoice(_Object):
    index: int
    message: InfillMessage
    logprobs: None
    finish_reason: FinishReason


class Infill(_Head):
    object: Literal["chat.completion"]
    choices: list[InfillChoice]
    usage: Usage


class DefaultMaxTokens(_Object):
    completions: int
    chat: int | None


class Capabilities(_Object):
    chat: bool
    prefix: bool
    infill: bool
    reasoning: bool
    context_length: int
    default_max_tokens: DefaultMaxTokens


class Model(_Object):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    capabilities: Capabilities


class Models(_Object):
    object: Literal["list"]
    data: list[Model]


class Counts(_Object):
    running: int
    waiting: int
    restarts: int


class Health(_Object):
    status: Literal["ok", "degraded", "failed"]
    models: dict[str, Counts]
    down: list[str]


class Readiness(_Object):
    status: Literal["ready", "engine failed", "store unavailable"]


class Generation(_Object):
    id: str
    object: Literal["generation"]
    created: int
    model: str
    status: Literal["running", "done", "failed", "cancelled"]
    num_events: int
    answer: dict[str, Any] | None


class Deletion(_Object):
    id: str
    deleted: Literal[True]


class Keys(_Object):
    object: Literal["list"]
    data: list[Key]


class MadeKey(_Object):
    name: str
    key: str


class Revocation(_Object):
    name: str
    revoked: Literal[True]


class UsageRows(_Object):
    object: Literal["list"]
    data: list[UsageRow]


class ErrorDetails(_Object):
    message: str
    type: str
    param: str | None
    code: str


class Error(_Object):
    error: ErrorDetails


class FieldError(_Object):
    type: str
    loc: list[str]
    msg: str


class FieldErrors(_Object):
    detail: list[FieldError]


class FlatError(_Object):
    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: str


# ---------------------------------------------------------------------------------------------------------------------
# The document


@dataclass(frozen=True)
class _Generation:
    """What the dialect of a path does not say itself."""

    summary: str
    answer: type[BaseModel]
    chunk: type[BaseModel]
    """What the events of a stream have, but for the last and for errors."""
    error: Any = Error


GENERATIONS = {
    "/v1/completions": _Generation("Continue a text, or fill a gap in it", Completion, CompletionChunk),
    "/v1/chat/completions": _Generation("Answer a chat, or continue its last message", ChatCompletion, ChatChunk),
    "/v1/fim/completions": _Generation("Fill a gap, as at Mistral", Infill, ChatChunk, FieldErrors | FlatError),
}

_FAILURES = (
    MalformedBody,
    InvalidField,
    UnsupportedFeature,
    PromptTooLong,
    ModelNotFound,
    BodyTimeout,
    BodyTooLarge,
    UnsupportedMediaType,
    RateLimited,
    JournalFull,
    StoreUnavailable,
    LegatoError,
    GenerationFailed,
    Overloaded,
    EngineUnavailable,
)
"""How a generation may fail, once the caller is let in."""

_JSON = "application/json"
_RETRY_AFTER = {"Retry-After": "Seconds to wait."}


class _Schemas(GenerateJsonSchema):
    """Names bodies without underscores, and fields by nothing but their key."""

    def normalize_name(self, name: str) -> str:
        """Drop what marks a class as one module's own."""
        return super().normalize_name(name).strip("_")

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False


def describe(dialects: Mapping[str, Dialect], names: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    """Return the document of a server: its dialects by path, and the names that `model` may have."""
    generations = {path: (dialects[path], said) for path, said in GENERATIONS.items()}
    answers = {kind for said in GENERATIONS.values() for kind in (said.answer, said.chunk, said.error)}
    others = {Models, Model, Health, Readiness, Generation, Deletion, KeyBody, Keys, MadeKey, Revocation, UsageRows}
    kinds = {*answers, *(dialect.body for dialect, _ in generations.values()), *others}
    refs, shared = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    schemas = {kind: schema for (kind, _), schema in refs.items()}
    components = {name: {**schema} for name, schema in sorted(shared["$defs"].items())}
    for schema in components.values():
        schema.pop("title", None)
    for kind in (*(dialect.body for dialect, _ in generations.values()), KeyBody):
        body = components[schemas[kind]["$ref"].rpartition("/")[2]]
        body["properties"] = dict(_properties(body, names))

    refusals = [HostNotAllowed, *([NotAuthenticated] if has_keys else [])]
    paths: dict[str, Any] = {}
    for path, (dialect, said) in generations.items():
        answer = _content("The answer.", schemas[said.answer], REPORT_HEADERS)
        answer["content"][dialect.stream_type] = {"schema": _event(schemas[said.chunk], schemas[said.error])}
        failures = _errors([*_FAILURES, *refusals], dialect.encode_error, schemas[said.error])
        paths[path] = {
            "post": {
                "summary": said.summary,
                "requestBody": {"required": True, "content": {_JSON: {"schema": schemas[dialect.body]}}},
                "responses": {"200": answer, **failures},
            }
        }

    def question(summary: str, answer: type[BaseModel], errors: Sequence[type[LegatoError]], **keys: Any) -> Any:
        refused = _errors(errors, OPENAI.encode_error, schemas[Error])
        responses = {"200": _content("The answer.", schemas[answer]), **refused}
        return {"get": {"summary": summary, "responses": responses, **keys}}

    def handle(summary: str, method: str, answer: Any, *more: type[LegatoError], **keys: Any) -> Any:
        refused = _errors([*refusals, GenerationNotFound, StoreUnavailable, *more], OPENAI.encode_error, schemas[Error])
        return {method: {"summary": summary, "responses": {"200": answer, **refused}, "parameters": [id], **keys}}

    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    after = {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999}}
    events = {"description": "The events.", "content": {EVENTS: {"schema": _event({"type": "object"})}}}
    whole = _content("The answer.", {"type": "object"}, REPORT_HEADERS)
    whole["content"] |= events["content"]
    given = {"requestBody": {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}}
    paths["/v1/generations/{id}"] = {
        **handle("Show a resumable answer", "get", _content("What there is of it.", schemas[Generation])),
        **handle("End and remove a resumable answer", "delete", _content("It is gone.", schemas[Deletion])),
    }
    paths["/v1/generations/{id}/events"] = handle(
        "Follow a resumable answer", "get", events, InvalidField, parameters=[id, after]
    )
    paths["/v1/generations/{id}/continue"] = handle(
        "Go on behind a resumable answer", "post", whole, *_FAILURES, GenerationRunning, **given
    )
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for kind in ("KeyBody", "Key", "UsageRow"):
        components[kind]["additionalProperties"] = False

    def admin(
        summary: str, method: str, answer: Any, *more: type[LegatoError], status: str = "200", **keys: Any
    ) -> Any:
        refused = _errors([*refusals, NotPermitted, StoreUnavailable, *more], OPENAI.encode_error, schemas[Error])
        return {method: {"summary": summary, "responses": {status: answer, **refused}, **keys}}

    made = _content("The key, which is shown this once.", schemas[MadeKey])
    wanted = {"requestBody": {"required": True, "content": {_JSON: {"schema": schemas[KeyBody]}}}}
    unread = (MalformedBody, BodyTimeout, BodyTooLarge, UnsupportedMediaType)
    paths["/admin/keys"] = {
        **admin("List the keys", "get", _content("All of them, also those that are revoked.", schemas[Keys])),
        **admin("Make a key", "post", made, InvalidField, KeyExists, *unread, status="201", **wanted),
    }
    revoked = _content("It is wrong from now on.", schemas[Revocation])
    paths["/admin/keys/{name}"] = admin("Revoke a key", "delete", revoked, KeyNotFound, parameters=[name])
    paths["/admin/keys/{name}/rotate"] = admin(
        "Replace a key", "post", made, InvalidField, KeyNotFound, parameters=[name]
    )
    rows = _content("By day, key and model.", schemas[UsageRows])
    day = {"type": "string", "pattern": f"^{DAY}$"}
    days = [{"name": end, "in": "query", "schema": day} for end in ("since", "until")]
    paths["/admin/usage"] = admin("Show what was used", "get", rows, InvalidField, parameters=days)
    text = {"description": "For Prometheus.", "content": {METRICS_TYPE: {"schema": {"type": "string"}}}}
    paths["/metrics"] = admin("Show the metrics", "get", text)
    paths["/v1/models"] = question("List the models", Models, refusals)
    paths["/v1/models/{name}"] = question("Show a model", Model, [*refusals, ModelNotFound], parameters=[name])
    paths["/health"] = question("Say whether the engines run", Health, [HostNotAllowed], security=[])
    paths["/health"]["get"]["responses"]["503"] = _content("An engine has failed.", schemas[Health])
    paths["/ready"] = question("Say whether requests would be answered", Readiness, [HostNotAllowed], security=[])
    paths["/ready"]["get"]["responses"]["503"] = _content("They would not.", schemas[Readiness])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Legato", "version": __version__},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        **({"security": [{"key": []}]} if has_keys else {}),
    }


def _properties(body: Mapping[str, Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield a body's fields as `read_body` takes them: null for any that need not be there."""
    for name, schema in body["properties"].items():
        if name == "model":
            yield name, {"type": "string", "enum": list(names)}
        elif name in body["required"] or {"type": "null"} in schema.get("anyOf", ()):
            yield name, schema
        else:
            yield name, {"anyOf": [schema, {"type": "null"}]}


def _event(*schemas: Any) -> dict[str, Any]:
    """Return the schema of one event of a stream, whose data is JSON but for the last."""
    json = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": schemas}}
    data = {"anyOf": [{"const": "[DONE]"}, json]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _content(description: str, schema: Any, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a response with a JSON body."""
    told = {name: {"description": meaning, "schema": {"type": "string"}} for name, meaning in (headers or {}).items()}
    return {"description": description, "content": {_JSON: {"schema": schema}}, **({"headers": told} if told else {})}


def _errors(kinds: Sequence[type[LegatoError]], reply: Reply, schema: Any) -> dict[str, Any]:
    """Return responses by status: what is the case, in the words of the errors that have it."""
    reasons: dict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        error = kind("", retry_after_s=1) if issubclass(kind, CapacityError) else kind("")
        reasons[reply(error)[0]].append((inspect.getdoc(kind) or "").partition("\n")[0])
    return {
        str(status): _content(" ".join(said), schema, _RETRY_AFTER if status in (429, 503) else None)
        for status, said in sorted(reasons.items())
    }
