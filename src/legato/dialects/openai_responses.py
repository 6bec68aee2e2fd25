"""How OpenAI-shaped dialects answer: completion and chat objects, usage, errors, and the ends of streams.

It receives events and returns frames and bodies. What a dialect writes differently is in its `Shape`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from legato.dialects.base import Encoder, Facts
from legato.errors import LegatoError
from legato.types import Accepted, Answer, Chat, CompletionRequest, Delta, Finished, Handle, Output, TextToken, Usage
from legato.wire import DONE, encode_event, encode_json

__all__ = [
    "OPENAI",
    "ChatEncoder",
    "ChatRoute",
    "CompletionsEncoder",
    "CompletionsRoute",
    "Shape",
    "error_type",
    "openai_usage",
]

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_type(error: LegatoError) -> str:
    """Return OpenAI's `type` of an error, which follows from its status."""
    return _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")


def openai_error(error: LegatoError) -> Mapping[str, Any]:
    """Return an error's body, with OpenAI's four keys."""
    body = {"message": error.message, "type": error_type(error), "param": error.param, "code": error.code}
    return {"error": body}


def openai_usage(usage: Usage) -> Mapping[str, Any]:
    """Return the `usage` object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """What a dialect writes differently."""

    error: Callable[[LegatoError], Mapping[str, Any]] = openai_error
    status: Callable[[LegatoError], int] = lambda error: error.status
    usage: Callable[[Usage], Mapping[str, Any]] = openai_usage
    head: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of every object."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of a whole message."""

    def encode_error(self, error: LegatoError) -> tuple[int, bytes]:
        """Return an error's status and body."""
        return self.status(error), encode_json(self.error(error))


OPENAI = Shape()


class _Route:
    """What the dialects of both forms have in common."""

    stream_type = "text/event-stream"
    shape = OPENAI


class CompletionsRoute(_Route):
    """A dialect that answers with `text_completion` objects, but for `parse`."""

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return CompletionsEncoder(request, self.shape)


class ChatRoute(_Route):
    """A dialect that answers with `chat.completion` objects, but for `parse`."""

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return ChatEncoder(request, self.shape)


class _Encoder:
    """What the writers of both forms have in common."""

    kind: str
    prefix: str

    def __init__(self, request: CompletionRequest, shape: Shape) -> None:
        self._request = request
        self._shape = shape
        handle = request.handle or Handle(f"{self.prefix}-{secrets.token_hex(12)}", int(time.time()))
        self._head = {
            "id": handle.id,
            "object": self.kind,
            "created": handle.created,
            "model": request.model,
            **shape.head,
        }

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """One event that says what happened, and the mark of the end."""
        return iter((encode_event(self._shape.error(error)), DONE))

    def _usage(self, usage: Usage) -> Mapping[str, Any]:
        return self._shape.usage(usage)

    def _end(self, head: Mapping[str, Any], empty: Mapping[str, Any], usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Close a stream: a chunk for what was asked beside the text, and the mark of the end.

        Only with usage has the chunk no choices, as OpenAI has it; otherwise an `empty` one: some clients read the
        first.
        """
        if self._request.output.include_usage:
            yield encode_event({**head, "choices": [], "usage": self._usage(usage), **_legato(facts)})
        elif facts:
            yield encode_event({**head, "choices": [empty], **_legato(facts)})
        yield DONE


# ---------------------------------------------------------------------------------------------------------------------
# Completions


class CompletionsEncoder(_Encoder):
    """Writes `text_completion` objects."""

    kind = "text_completion"
    prefix = "cmpl"

    def start(self) -> Iterator[bytes]:
        """Nothing comes before the text."""
        return iter(())

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """A chunk for the prompt's ids, for each piece of text, and one with the finish reason for each end."""
        match event:
            case Accepted(choice, prompt_ids) if prompt_ids:
                yield self._chunk({**self._choice(choice), **_prompt_ids(prompt_ids)})
            case Delta(choice, text, tokens, token_ids):
                yield self._chunk(self._choice(choice, text, tokens, token_ids))
            case Finished(choice, reason):
                yield self._chunk(self._choice(choice, reason=reason))

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Usage, if it was asked for, and the mark of the end."""
        return self._end(self._head, self._choice(0), usage, facts)

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {
                **self._choice(answer.choice, answer.text, answer.tokens, answer.token_ids, answer.reason),
                **_prompt_ids(answer.prompt_ids),
            }
            for answer in answers
        ]
        return encode_json({**self._head, "choices": choices, "usage": self._usage(usage), **_legato(facts)})

    def _chunk(self, choice: Mapping[str, Any]) -> bytes:
        usage = {"usage": None} if self._request.output.include_usage else {}
        return encode_event({**self._head, "choices": [choice], **usage})

    def _choice(
        self,
        choice: int,
        text: str = "",
        tokens: tuple[TextToken, ...] = (),
        token_ids: tuple[int, ...] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        output = self._request.output
        return {
            "text": text,
            "index": choice,
            "logprobs": None if output.logprobs is None else _completion_logprobs(tokens),
            "finish_reason": reason,
            **_token_ids(output, token_ids),
        }


def _completion_logprobs(tokens: tuple[TextToken, ...]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {_shown(scored.data): scored.logprob for scored in token.top}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Chat


class ChatEncoder(_Encoder):
    """Writes `chat.completion` objects."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def start(self) -> Iterator[bytes]:
        """The role of every choice."""
        for choice in range(self._request.num_choices):
            yield self._chunk(self._choice(choice, {"role": "assistant", "content": ""}))

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """A chunk for the prompt's ids, for each piece of text, and one with the finish reason for each end."""
        match event:
            case Accepted(choice, prompt_ids) if prompt_ids:
                yield self._chunk(self._choice(choice, {"content": ""}), **_prompt_ids(prompt_ids))
            case Delta(choice, text, tokens, token_ids, channel):
                name = "content" if channel == "content" else "reasoning_content"
                yield self._chunk(self._choice(choice, {name: text}, tokens, token_ids))
            case Finished(choice, reason):
                yield self._chunk(self._choice(choice, {"content": ""}, reason=reason))

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Usage, if it was asked for, and the mark of the end."""
        head = {**self._head, "object": "chat.completion.chunk"}
        return self._end(head, {"index": 0, "delta": {"content": ""}, "finish_reason": None}, usage, facts)

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {
                "index": answer.choice,
                "message": {
                    "role": "assistant",
                    "content": answer.text,
                    **self._thought(answer),
                    **self._shape.message,
                },
                "logprobs": self._logprobs(answer.tokens),
                "finish_reason": answer.reason,
                **_token_ids(self._request.output, answer.token_ids),
            }
            for answer in answers
        ]
        shared = {"usage": self._usage(usage), **_prompt_ids(answers[0].prompt_ids), **_legato(facts)}
        return encode_json({**self._head, "choices": choices, **shared})

    def _usage(self, usage: Usage) -> Mapping[str, Any]:
        details = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
        return {**super()._usage(usage), **(details if self._is_chat else {})}

    @property
    def _is_chat(self) -> bool:
        """Whether thinking is told: what is no chat, though it is answered like one, has none."""
        return isinstance(self._request.source, Chat)

    def _thought(self, answer: Answer) -> dict[str, Any]:
        return {"reasoning_content": answer.reasoning} if self._is_chat else {}

    def _chunk(self, choice: Mapping[str, Any], **shared: Any) -> bytes:
        usage = {"usage": None} if self._request.output.include_usage else {}
        return encode_event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage, **shared})

    def _choice(
        self,
        choice: int,
        delta: Mapping[str, str],
        tokens: tuple[TextToken, ...] = (),
        token_ids: tuple[int, ...] = (),
        reason: str | None = None,
    ) -> dict[str, Any]:
        output = self._request.output
        entry = {"index": choice, "delta": delta, "finish_reason": reason, **_token_ids(output, token_ids)}
        return entry if output.logprobs is None else {**entry, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: tuple[TextToken, ...]) -> dict[str, Any] | None:
        if self._request.output.logprobs is None:
            return None
        return {
            "content": [
                {
                    "token": token.text,
                    "logprob": token.logprob,
                    "bytes": list(token.data),
                    "top_logprobs": [
                        {"token": _shown(scored.data), "logprob": scored.logprob, "bytes": list(scored.data)}
                        for scored in token.top
                    ],
                }
                for token in tokens
            ]
        }


# ---------------------------------------------------------------------------------------------------------------------
# Shared


def _shown(data: bytes) -> str:
    """A token's bytes as text; those that are no text are spelled out, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_ids(output: Output, ids: tuple[int, ...]) -> dict[str, Any]:
    return {"token_ids": ids} if output.token_ids else {}


def _prompt_ids(ids: tuple[int, ...]) -> dict[str, Any]:
    return {"prompt_token_ids": ids} if ids else {}


def _legato(facts: Facts) -> dict[str, Any]:
    return {"legato": dict(facts)} if facts else {}
