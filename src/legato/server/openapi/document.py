"""The OpenAPI document of the neutral surface: every path below `/v1` and `/admin`, `/health`, `/ready` and `/metrics`.

It receives the names of models and returns the document. What a request may have is read from the bodies that the
dialects check, which errors there are from their classes, and what an answer has is declared in `schemas`. It knows no
requests.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from legato import __version__
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
from legato.server.openapi.schemas import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Deletion,
    Error,
    FieldErrors,
    FlatError,
    Generation,
    Health,
    Infill,
    Keys,
    MadeKey,
    Model,
    Models,
    Readiness,
    Revocation,
    UsageRows,
)
from legato.server.surfaces import DIALECTS, surface_of
from legato.server.telemetry import METRICS_TYPE
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


def describe(names: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    """Return the document of a server: the dialects by path, and the names that `model` may have."""
    return _Document(names, has_keys=has_keys).build()


class _Document:
    """Builds the document."""

    def __init__(self, names: Sequence[str], *, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._refusals = [HostNotAllowed, *([NotAuthenticated] if has_keys else [])]
        """How any request with a key may fail."""
        answers: set[Any] = {
            kind for route in GENERATIONS.values() for kind in (route.answer, route.chunk, route.error)
        }
        bodies = [*(DIALECTS[path].body for path in GENERATIONS), KeyBody]
        others = (Models, Model, Health, Readiness, Generation, Deletion, Keys, MadeKey, Revocation, UsageRows)
        refs, shared = TypeAdapter.json_schemas(
            [(kind, "validation", TypeAdapter(kind)) for kind in {*answers, *bodies, *others}],
            ref_template="#/components/schemas/{model}",
            schema_generator=_Schemas,
        )
        self._schemas: dict[Any, Any] = {kind: schema for (kind, _), schema in refs.items()}
        self._components = {name: {**schema} for name, schema in sorted(shared["$defs"].items())}
        for schema in self._components.values():
            schema.pop("title", None)
        for kind in bodies:
            body = self._components[self._schemas[kind]["$ref"].rpartition("/")[2]]
            body["properties"] = dict(_properties(body, names))
        for name in ("KeyBody", "Key", "UsageRow"):
            self._components[name]["additionalProperties"] = False

    def build(self) -> dict[str, Any]:
        """Return the whole document."""
        schemes = {"key": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {"title": "Legato", "version": __version__},
            "servers": [{"url": "/"}],
            "paths": {
                **{path: self._generation(path) for path in GENERATIONS},
                **self._resumable(),
                **self._admin(),
                **self._status(),
            },
            "components": {"schemas": self._components, "securitySchemes": schemes},
            **({"security": [{"key": []}]} if self._has_keys else {}),
        }

    def _generation(self, path: str) -> dict[str, Any]:
        """Describe a path that generates."""
        route, dialect = GENERATIONS[path], DIALECTS[path]
        answer = _content("The answer.", self._schemas[route.answer], REPORT_HEADERS)
        event = _event(self._schemas[route.chunk], self._schemas[route.error])
        answer["content"][dialect.stream_type] = {"schema": event}
        encode_error = surface_of(path).encode_error
        failures = _errors([*_FAILURES, *self._refusals], encode_error, self._schemas[route.error])
        body = {"required": True, "content": {_JSON: {"schema": self._schemas[dialect.body]}}}
        return {"post": {"summary": route.summary, "requestBody": body, "responses": {"200": answer, **failures}}}

    def _operation(
        self,
        summary: str,
        method: str,
        answer: dict[str, Any],
        errors: Sequence[type[LegatoError]],
        *,
        status: str = "200",
        **keys: Any,
    ) -> dict[str, Any]:
        """Describe a method of a path whose errors are written as OpenAI writes them."""
        refused = _errors(errors, OPENAI.encode_error, self._schemas[Error])
        return {method: {"summary": summary, "responses": {status: answer, **refused}, **keys}}

    def _resumable(self) -> dict[str, Any]:
        """Describe the paths of resumable answers."""

        def operation(summary: str, method: str, answer: Any, *more: type[LegatoError], **keys: Any) -> dict[str, Any]:
            errors = [*self._refusals, GenerationNotFound, StoreUnavailable, *more]
            return self._operation(summary, method, answer, errors, **{"parameters": [id], **keys})

        id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        after = {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999}}
        events = {"description": "The events.", "content": {EVENTS: {"schema": _event({"type": "object"})}}}
        whole = _content("The answer.", {"type": "object"}, REPORT_HEADERS)
        whole["content"] |= events["content"]
        body = {"requestBody": {"required": True, "content": {_JSON: {"schema": {"type": "object"}}}}}
        shown = _content("What there is of it.", self._schemas[Generation])
        deleted = _content("It is gone.", self._schemas[Deletion])
        return {
            "/v1/generations/{id}": {
                **operation("Show a resumable answer", "get", shown),
                **operation("End and remove a resumable answer", "delete", deleted),
            },
            "/v1/generations/{id}/events": operation(
                "Follow a resumable answer", "get", events, InvalidField, parameters=[id, after]
            ),
            "/v1/generations/{id}/continue": operation(
                "Go on behind a resumable answer", "post", whole, *_FAILURES, GenerationRunning, **body
            ),
        }

    def _admin(self) -> dict[str, Any]:
        """Describe the paths for those who run the server."""

        def operation(summary: str, method: str, answer: Any, *more: type[LegatoError], **keys: Any) -> dict[str, Any]:
            errors = [*self._refusals, NotPermitted, StoreUnavailable, *more]
            return self._operation(summary, method, answer, errors, **keys)

        schemas = self._schemas
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        day = {"type": "string", "pattern": f"^{DAY}$"}
        days = [{"name": end, "in": "query", "schema": day} for end in ("since", "until")]
        keys = _content("All of them, also those that are revoked.", schemas[Keys])
        made = _content("The key, which is shown this once.", schemas[MadeKey])
        revoked = _content("It is wrong from now on.", schemas[Revocation])
        rows = _content("By day, key and model.", schemas[UsageRows])
        text = {"description": "For Prometheus.", "content": {METRICS_TYPE: {"schema": {"type": "string"}}}}
        body = {"requestBody": {"required": True, "content": {_JSON: {"schema": schemas[KeyBody]}}}}
        unread = (MalformedBody, BodyTimeout, BodyTooLarge, UnsupportedMediaType)
        return {
            "/admin/keys": {
                **operation("List the keys", "get", keys),
                **operation("Make a key", "post", made, InvalidField, KeyExists, *unread, status="201", **body),
            },
            "/admin/keys/{name}": operation("Revoke a key", "delete", revoked, KeyNotFound, parameters=[name]),
            "/admin/keys/{name}/rotate": operation(
                "Replace a key", "post", made, InvalidField, KeyNotFound, parameters=[name]
            ),
            "/admin/usage": operation("Show what was used", "get", rows, InvalidField, parameters=days),
            "/metrics": operation("Show the metrics", "get", text),
        }

    def _status(self) -> dict[str, Any]:
        """Describe the paths about models and the server itself."""

        def question(summary: str, kind: type[BaseModel], errors: Sequence[type[LegatoError]], **keys: Any) -> Any:
            return self._operation(summary, "get", _content("The answer.", self._schemas[kind]), errors, **keys)

        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        health = question("Say whether the engines run", Health, [HostNotAllowed], security=[])
        health["get"]["responses"]["503"] = _content("An engine has failed.", self._schemas[Health])
        ready = question("Say whether requests would be answered", Readiness, [HostNotAllowed], security=[])
        ready["get"]["responses"]["503"] = _content("They would not.", self._schemas[Readiness])
        return {
            "/v1/models": question("List the models", Models, self._refusals),
            "/v1/models/{name}": question("Show a model", Model, [*self._refusals, ModelNotFound], parameters=[name]),
            "/health": health,
            "/ready": ready,
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
    content: dict[str, Any] = {"description": description, "content": {_JSON: {"schema": schema}}}
    if headers:
        text = {"type": "string"}
        content["headers"] = {name: {"description": meaning, "schema": text} for name, meaning in headers.items()}
    return content


def _errors(kinds: Sequence[type[LegatoError]], reply: Reply, schema: Any) -> dict[str, Any]:
    """Return responses by status: what is the case, in the words of the errors that have it."""
    reasons: dict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        error = kind("", retry_after_s=1) if issubclass(kind, CapacityError) else kind("")
        reasons[reply(error)[0]].append((inspect.getdoc(kind) or "").partition("\n")[0])
    return {
        str(status): _content(" ".join(words), schema, _RETRY_AFTER if status in (429, 503) else None)
        for status, words in sorted(reasons.items())
    }
