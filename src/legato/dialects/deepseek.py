"""DeepSeek's beta routes: chats whose last message is marked with `prefix`, and completions with a `suffix`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from legato.dialects.base import read_body
from legato.dialects.openai_requests import ChatBody, CommonBody, GapBody, MessageBody, has_mark, stop_field
from legato.dialects.openai_responses import ChatRoute, CompletionsRoute, Shape, error_type, openai_usage
from legato.errors import InvalidField, LegatoError
from legato.types import CompletionRequest, Output, Source, Text, Usage

__all__ = ["SHAPE", "ChatDialect", "CompletionsDialect"]

MAX_STOPS = 16
MAX_TOKENS = 393216


def _error(error: LegatoError) -> Mapping[str, Any]:
    kind = error_type(error)
    return {"error": {"message": error.message, "type": kind, "param": None, "code": kind}}


def _usage(usage: Usage) -> Mapping[str, Any]:
    hit = usage.cached_tokens
    return {
        **openai_usage(usage),
        "prompt_cache_hit_tokens": hit,
        "prompt_cache_miss_tokens": usage.prompt_tokens - hit,
    }


SHAPE = Shape(error=_error, usage=_usage, head={"system_fingerprint": "fp_legato"})


class _Limits(CommonBody):
    """The vendor's narrower limits."""

    max_stops: ClassVar[int] = MAX_STOPS

    max_tokens: Annotated[int | None, Field(description=f"a whole number, 1 to {MAX_TOKENS}")] = None
    stop: Annotated[str | list[str] | None, stop_field(MAX_STOPS)] = None

    @field_validator("max_tokens")
    @classmethod
    def _in_range(cls, max_tokens: int | None) -> int | None:
        if max_tokens is not None and not 1 <= max_tokens <= MAX_TOKENS:
            raise InvalidField(
                f"Invalid max_tokens value, the valid range of max_tokens is [1, {MAX_TOKENS}], got {max_tokens}",
                param="max_tokens",
            )
        return max_tokens


class _CompletionsBody(_Limits, GapBody):
    prompt: str
    suffix: str | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionsDialect(CompletionsRoute):
    """`/beta/completions`."""

    shape = SHAPE
    body = _CompletionsBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        source: Source = Text((read.prompt,)) if read.suffix is None else read.gap(read.prompt, read.suffix)
        output = Output(echo=read.echo, logprobs=read.logprobs)
        ignored = read.gap_fields() if read.suffix is None else ()
        return read.request(source, max_tokens=read.max_tokens, output=output, ignored=ignored)


class _Message(MessageBody):
    prefix: bool | None = None


class _ChatBody(_Limits, ChatBody[_Message]):
    """A chat within those limits."""


class ChatDialect(ChatRoute):
    """`/beta/chat/completions`."""

    shape = SHAPE
    body = _ChatBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        is_marked = has_mark(read.messages, "prefix")
        if read.switches.get("thinking") and not is_marked and read.messages[-1].role == "assistant":
            raise InvalidField(
                f"The last message of {read.model} must be a user message, or an assistant message with prefix mode on "
                "(refer to https://api-docs.deepseek.com/guides/chat_prefix_completion).",
                param="messages",
            )
        return read.chat_request(is_marked=is_marked)
