"""DashScope (Alibaba Model Studio), compatible mode: completions whose prompt is laid out with infill markers, and
chats in Partial Mode.

The markers are this dialect's spelling of an infill, not the model's tokens: any model with infill tokens serves them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from legato.dialects.base import read_body
from legato.dialects.openai_requests import MAX_STOP_BYTES, MAX_STOPS, ChatBody, CommonBody, MessageBody, has_mark
from legato.dialects.openai_responses import ChatRoute, CompletionsRoute, Shape, error_type
from legato.errors import InvalidField, LegatoError, NotAuthenticated, UnsupportedFeature
from legato.types import CompletionRequest, Infill, Output, Source, Text

__all__ = ["SHAPE", "ChatDialect", "CompletionsDialect"]


def _error(error: LegatoError) -> Mapping[str, Any]:
    message, kind, code = error.message, error_type(error), error.code
    if isinstance(error, NotAuthenticated):
        message, kind = "Incorrect API key provided. ", "invalid_request_error"
    elif error.status == 400:
        message, code = f"<400> InternalError.Algo.InvalidParameter: {message}", "invalid_parameter_error"
    return {
        "error": {"message": message, "type": kind, "param": None, "code": code},
        "request_id": str(uuid.uuid4()),
    }


SHAPE = Shape(error=_error, head={"system_fingerprint": None})

MaxTokens = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]

# ---------------------------------------------------------------------------------------------------------------------
# Completions

_MARKERS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_LAYOUT = re.compile(r"<\|fim_prefix\|>(.*?)<\|fim_suffix\|>(?:(.*?)<\|fim_middle\|>)?", re.DOTALL)


class _CompletionsBody(CommonBody):
    prompt: str
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float | None, Field(ge=0, lt=2, description="a number >= 0 and < 2")] = None
    seed: Seed | None = None
    stop: Annotated[
        str | list[str | Annotated[int, Field(ge=0)]] | None,
        Field(description=f"a text or a list of at most {MAX_STOPS} texts of 1 to {MAX_STOP_BYTES} bytes or token ids"),
    ] = None  # type: ignore[assignment]


class CompletionsDialect(CompletionsRoute):
    """`/compatible-mode/v1/completions`."""

    shape = SHAPE
    body = _CompletionsBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        return read.request(_source(read.prompt), max_tokens=read.max_tokens, output=Output())


def _source(prompt: str) -> Source:
    """Read a prompt that may be laid out with markers."""
    counts = [prompt.count(marker) for marker in _MARKERS]
    if not any(counts):
        return Text((prompt,))
    match = _LAYOUT.fullmatch(prompt)
    if match is None or max(counts) > 1:
        raise InvalidField(
            "`prompt` has infill markers, but is neither `<|fim_prefix|>PREFIX<|fim_suffix|>` nor "
            f"`<|fim_prefix|>PREFIX<|fim_suffix|>SUFFIX<|fim_middle|>`, got {prompt[:80]!r}",
            param="prompt",
        )
    prefix, suffix = match.groups()
    if suffix is None:
        return Text((prefix,))
    if not prefix:
        raise InvalidField(
            "`prompt` has nothing between `<|fim_prefix|>` and `<|fim_suffix|>`; what stands before a suffix cannot be "
            "written from the suffix alone",
            param="prompt",
        )
    return Infill(prefix, suffix)


# ---------------------------------------------------------------------------------------------------------------------
# Chat


class _Message(MessageBody):
    partial: bool | None = None


class _ChatBody(ChatBody[_Message]):
    max_tokens: MaxTokens | None = None
    seed: Seed | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    enable_thinking: bool | None = None

    @property
    def switches(self) -> dict[str, bool]:
        """The fields that turn thinking on or off."""
        return super().switches | ({} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking})


class ChatDialect(ChatRoute):
    """`/compatible-mode/v1/chat/completions`."""

    shape = SHAPE
    body = _ChatBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        if read.enable_thinking and any(message.partial for message in read.messages):
            raise UnsupportedFeature("Partial mode is not supported when enable_thinking is true", param="messages")
        return read.chat_request(is_marked=has_mark(read.messages, "partial"))
