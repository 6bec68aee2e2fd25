"""The neutral surface: OpenAI's chat and completions, with the three marks of a continuation and Legato's own fields.

Serves `/v1/chat/completions`, `/v1/completions` and the clients of OpenAI, Kimi, MoArk, vLLM and SGLang. Where public
behaviour differs from server to server, docs/dialects/openai.md states what holds here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field

from legato.dialects.base import read_body
from legato.dialects.openai_requests import (
    MAX_CHOICES,
    CommonBody,
    FlaggedChatBody,
    GapBody,
    MessageBody,
    NumChoices,
    has_mark,
)
from legato.dialects.openai_responses import ChatRoute, CompletionsRoute
from legato.errors import InvalidField
from legato.types import CompletionRequest, Output, Source, Text

__all__ = ["ChatDialect", "CompletionsDialect"]

_Item = TypeVar("_Item")
_NotEmpty = Annotated[list[_Item], Field(min_length=1)]
_PROMPT = "a text, a list of texts, a list of token ids or a list of such lists, and not empty"


class _CompletionsBody(CommonBody, GapBody):
    prompt: Annotated[
        str | _NotEmpty[str] | _NotEmpty[int] | _NotEmpty[_NotEmpty[int]],
        Field(description=_PROMPT),
    ]
    suffix: str | None = None
    echo: bool = False
    n: NumChoices = 1
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None
    instructions: str | None = None

    @property
    def num_drawn(self) -> int | None:
        """`best_of`, where it is more than `n`."""
        if self.best_of is None or self.best_of == self.n:
            return None
        if self.best_of < self.n:
            raise InvalidField(f"`best_of` must be at least `n`, got {self.best_of} and {self.n}", param="best_of")
        if self.stream:
            raise InvalidField(
                f"`best_of` above `n` cannot be streamed, got {self.best_of} and {self.n}", param="best_of"
            )
        return self.best_of


class CompletionsDialect(CompletionsRoute):
    """`/v1/completions`."""

    body = _CompletionsBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        prompts = _prompts(read.prompt)
        source: Source = Text(prompts, read.instructions)
        if read.suffix is not None:
            if len(prompts) != 1 or not isinstance(prompts[0], str):
                raise InvalidField("`suffix` needs `prompt` to be one text", param="suffix")
            if read.instructions is not None:
                raise InvalidField("`suffix` and `instructions` cannot be used together", param="instructions")
            source = read.gap(prompts[0], read.suffix)
        num_drawn = read.num_drawn
        for name, num in (("n", read.n), ("best_of", num_drawn or 0)):
            if len(prompts) * num > MAX_CHOICES:
                raise InvalidField(
                    f"`{name}` times the number of prompts must be at most {MAX_CHOICES}, "
                    f"got {num} times {len(prompts)}",
                    param=name,
                )
        output = Output(echo=read.echo, logprobs=read.logprobs)
        ignored = read.gap_fields() if read.suffix is None else ()
        request = read.request(source, max_tokens=read.max_tokens, num_choices=read.n, output=output, ignored=ignored)
        return replace(request, num_drawn=num_drawn)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    prompts: tuple[str | tuple[int, ...], ...]
    if all(isinstance(item, int) for item in prompt):
        prompts = (tuple(item for item in prompt if isinstance(item, int)),)
    else:
        prompts = tuple(item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int))
    if len(prompts) > MAX_CHOICES:
        raise InvalidField(f"`prompt` may have at most {MAX_CHOICES} prompts, got {len(prompts)}", param="prompt")
    return prompts


# ---------------------------------------------------------------------------------------------------------------------
# Chat


class _Message(MessageBody):
    prefix: bool | None = None
    partial: bool | None = None


class _ChatBody(FlaggedChatBody[_Message]):
    echo: bool = False


class ChatDialect(ChatRoute):
    """`/v1/chat/completions`."""

    body = _ChatBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        return read.chat_request(is_marked=_is_marked(read), echo=read.echo)


def _is_marked(body: _ChatBody) -> bool:
    """Whether the last message is to be continued: one of the three marks is enough, and none may contradict."""
    marks = [has_mark(body.messages, name) for name in ("prefix", "partial")]
    is_flagged = body.is_flagged
    if not any(marks):
        return is_flagged
    last = body.messages[-1]
    if False in (last.prefix, last.partial):
        at = len(body.messages) - 1
        raise InvalidField(f"`messages[{at}]` has `prefix` and `partial` contradict each other", param="messages")
    for name, value, contrary in (
        ("continue_final_message", body.continue_final_message, False),
        ("add_generation_prompt", body.add_generation_prompt, True),
    ):
        if value is contrary:
            raise InvalidField(
                f"`messages[{len(body.messages) - 1}]` is marked to be continued, but `{name}` is {str(value).lower()}",
                param=name,
            )
    return True
