"""MaaS (Huawei Cloud ModelArts): chat V2, where a message is marked with `prefix`, and the route with OpenAI's flags.

Both write errors in two envelopes at once, because the vendor's clients read the one or the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Literal, get_args

from legato.dialects.base import read_body
from legato.dialects.openai_requests import ChatBody, FlaggedChatBody, MessageBody, has_mark
from legato.dialects.openai_responses import ChatRoute, Shape, error_type
from legato.errors import (
    EngineUnavailable,
    HostNotAllowed,
    InvalidField,
    KeyMissing,
    LegatoError,
    ModelNotFound,
    NotAuthenticated,
    Overloaded,
    PromptTooLong,
    RateLimited,
    RequestError,
)
from legato.types import CompletionRequest

__all__ = ["SHAPE", "FlaggedChatDialect", "PrefixChatDialect"]

_Role = Literal["system", "user", "assistant", "function", "tool"]
_ROLES = list(get_args(_Role))

_CODES: Mapping[type[LegatoError], tuple[str, str]] = {
    KeyMissing: ("ModelArts.81002", "Failed to get the authorization header."),
    NotAuthenticated: ("ModelArts.81003", "Invalid authorization header."),
    HostNotAllowed: ("ModelArts.81004", "Invalid request because you do not have access to it."),
    ModelNotFound: ("ModelArts.81009", "Invalid model."),
    RateLimited: ("ModelArts.81101", "Too many requests."),
    EngineUnavailable: ("ModelArts.81010", ""),
    Overloaded: ("APIG.0203", "Backend timeout."),
    PromptTooLong: ("ModelArts.81001", "Inference failed:"),
    RequestError: ("ModelArts.81001", ""),
}
"""The vendor's code and the words that it begins with, by kind of error; what is not here keeps its own code."""


def _error(error: LegatoError) -> Mapping[str, Any]:
    kind = next((kind for kind in type(error).__mro__ if kind in _CODES), None)
    code, words = _CODES[kind] if kind else (error.code, "")
    if isinstance(error, NotAuthenticated):  # The vendor's gateway answers it, which has one envelope only.
        return {"error_code": code, "error_msg": words}
    message = f"{words} {error.message}".lstrip()
    shown = "BadRequest" if _status(error) == 400 else error_type(error)
    return {
        "error": {"code": code, "message": message, "param": None, "type": shown},
        "error_code": code,
        "error_msg": message,
        "span_id": secrets.token_hex(16),
    }


def _status(error: LegatoError) -> int:
    return 400 if isinstance(error, KeyMissing) else error.status


SHAPE = Shape(error=_error, status=_status)


class _Message(MessageBody):
    role: _Role


class _PrefixMessage(_Message):
    prefix: bool | None = None


class PrefixChatDialect(ChatRoute):
    """`/v2/chat/completions`."""

    shape = SHAPE
    body = ChatBody[_PrefixMessage]

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        _check(body)
        read = read_body(self.body, body)
        return read.chat_request(is_marked=has_mark(read.messages, "prefix"))


class FlaggedChatDialect(ChatRoute):
    """`/openai/v1/chat/completions`."""

    shape = SHAPE
    body = FlaggedChatBody[_Message]

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        _check(body)
        read = read_body(self.body, body)
        return read.chat_request(is_marked=read.is_flagged)


def _check(body: Mapping[str, Any]) -> None:
    """Refuse in the vendor's words what it has words for."""
    for name in ("model", "messages"):
        if body.get(name) in (None, "", []):
            raise InvalidField(f"Failed to format request body, {name} is empty.", param=name)
    messages = body["messages"]
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, Mapping):
            continue
        role = message.get("role")
        if isinstance(role, str) and role not in _ROLES:
            raise InvalidField(
                f"Failed to format request body, messages[{index}].role is {role[:80]}, not one of {_ROLES}.",
                param="messages",
            )
        if role == "assistant" and message.get("content") is None and not message.get("tool_calls"):
            raise InvalidField(
                "Inference failed: request param validation error, Value error, "
                f"message[{index}] as 'assistant' must have 'content' or 'tool_calls'.",
                param="messages",
            )
