"""What answers have, key by key, without room for others: the conformance tests hold the server to it.

Only the OpenAPI document and tests read these classes; the dialects write their answers without them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from legato.storage.keys import Key
from legato.storage.usage import UsageRow
from legato.types import FinishReason

__all__ = [
    "Alternative",
    "Cached",
    "Capabilities",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatToken",
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionChunkChoice",
    "CompletionLogprobs",
    "Counts",
    "DefaultMaxTokens",
    "Deletion",
    "Error",
    "ErrorDetails",
    "FieldError",
    "FieldErrors",
    "FlatError",
    "Generation",
    "Health",
    "Infill",
    "InfillChoice",
    "InfillMessage",
    "Keys",
    "MadeKey",
    "Model",
    "Models",
    "Readiness",
    "Reasoned",
    "Report",
    "Revocation",
    "Usage",
    "UsageRows",
]

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
