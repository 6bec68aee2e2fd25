"""The neutral surface: OpenAI's chat and completions, with the three marks of a continuation and Legato's own fields.

Serves `/v1/chat/completions`, `/v1/completions` and the clients of OpenAI, Kimi, MoArk, vLLM and SGLang. Where public
behaviour differs from server to server, docs/dialects/openai.md states what holds here.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from legato.dialects.base import Body, Encoder, Facts, read_body, unknown_fields
from legato.errors import InvalidField, LegatoError, UnsupportedFeature
from legato.types import (
    Accepted,
    Answer,
    Chat,
    CompletionRequest,
    Delta,
    Finished,
    Infill,
    Mark,
    Message,
    Output,
    SamplingOptions,
    SeamOptions,
    Source,
    Stops,
    Text,
    TextToken,
    Usage,
)
from legato.wire import DONE, encode_event, encode_json

__all__ = ["ChatDialect", "CompletionsDialect", "encode_openai_error"]

MAX_CHOICES = 64
MAX_STOPS = 32
MAX_STOP_BYTES = 256

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _StreamOptions(Body):
    include_usage: bool | None = None


class _Part(Body):
    type: Literal["text"]
    text: str


class _Prediction(Body):
    type: Literal["content"]
    content: Annotated[str | list[_Part], Field(description="a text or a list of text parts")]


class _Common(Body):
    """Fields that both routes take."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] = 1
    stop: Annotated[
        str | list[str] | None,
        Field(description=f"a text or a list of at most {MAX_STOPS} texts, each of 1 to {MAX_STOP_BYTES} bytes"),
    ] = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1, description="a number > 0 and <= 1")] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    echo: bool = False
    response_format: dict[str, Any] | None = None
    # vLLM's.
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]] | None,
        Field(max_length=MAX_STOPS, description=f"a list of at most {MAX_STOPS} token ids"),
    ] = None
    return_token_ids: bool = False
    # Legato's own.
    seam: Literal["heal", "none"] = "heal"
    canonical: bool = True
    stop_across_seam: bool | None = None
    timeout_s: Annotated[float | None, Field(gt=0, description="a number > 0")] = None
    prediction: _Prediction | None = None
    deterministic: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    detect_loops: bool = False
    report: bool = False

    def request(
        self,
        source: Source,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        ignored: Sequence[str],
        num_drawn: int | None = None,
    ) -> CompletionRequest:
        """Return the request, once the route has read its own fields."""
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise UnsupportedFeature(
                f"`response_format` must be {{'type': 'text'}}, got {str(self.response_format)[:80]}: "
                "constrained answers are not built yet",
                param="response_format",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidField("`stream_options` is only allowed when `stream` is true", param="stream_options")
        options = unknown_fields(self.stream_options) if self.stream_options else ()
        return CompletionRequest(
            model=self.model,
            source=source,
            sampling=SamplingOptions(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=_logit_bias(self.logit_bias),
                seed=self.seed,
            ),
            max_tokens=max_tokens,
            num_choices=self.n,
            num_drawn=num_drawn,
            stops=Stops(
                strings=_stops(self.stop),
                across_seam=self.stop_across_seam,
                token_ids=tuple(self.stop_token_ids or ()),
                min_tokens=self.min_tokens,
                ignore_end=self.ignore_eos,
                at_cycle=self.detect_loops,
            ),
            seam=SeamOptions(heal=self.seam == "heal", canonical=self.canonical and self.seam == "heal"),
            output=Output(
                stream=self.stream,
                include_usage=bool(self.stream_options and self.stream_options.include_usage),
                echo=self.echo,
                logprobs=logprobs,
                token_ids=self.return_token_ids,
                report=self.report,
            ),
            timeout_s=self.timeout_s,
            prediction=_joined(self.prediction.content) if self.prediction else "",
            deterministic=self.deterministic,
            cache_salt=self.cache_salt or "",
            ignored=(*unknown_fields(self), *(f"stream_options.{name}" for name in options), *ignored),
        )


def _joined(content: str | list[_Part]) -> str:
    """Join parts with nothing between them."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidField(f"`stop` takes at most {MAX_STOPS} texts, got {len(stops)}", param="stop")
    for index, text in enumerate(stops):
        size = len(text.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidField(f"`stop[{index}]` must have 1 to {MAX_STOP_BYTES} bytes, got {size}", param="stop")
    return stops


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    values = {}
    for key, value in (bias or {}).items():
        if not re.fullmatch("[0-9]{1,9}", key):
            raise InvalidField(f"`logit_bias` must have token ids as its keys, got {key!r}", param="logit_bias")
        values[int(key)] = value
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Completions

_PROMPT = "a text, a list of texts, a list of token ids or a list of such lists, and not empty"


class _CompletionsBody(_Common):
    prompt: Annotated[str | list[str] | list[int] | list[list[int]], Field(description=_PROMPT)]
    suffix: str | None = None
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


class CompletionsDialect:
    """`/v1/completions`."""

    stream_type = "text/event-stream"

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(_CompletionsBody, body)
        prompts = _prompts(read.prompt)
        source: Source = Text(prompts, read.instructions)
        if read.suffix is not None:
            if len(prompts) != 1 or not isinstance(prompts[0], str):
                raise InvalidField("`suffix` needs `prompt` to be one text", param="suffix")
            if read.instructions is not None:
                raise InvalidField("`suffix` and `instructions` cannot be used together", param="instructions")
            source = Infill(prompts[0], read.suffix)
        num_drawn = read.num_drawn
        for name, num in (("n", read.n), ("best_of", num_drawn or 0)):
            if len(prompts) * num > MAX_CHOICES:
                raise InvalidField(
                    f"`{name}` times the number of prompts must be at most {MAX_CHOICES}, "
                    f"got {num} times {len(prompts)}",
                    param=name,
                )
        return read.request(source, max_tokens=read.max_tokens, logprobs=read.logprobs, ignored=(), num_drawn=num_drawn)

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return _CompletionsEncoder(request)

    def encode_error(self, error: LegatoError) -> bytes:
        """Write an error's body."""
        return encode_openai_error(error)


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    prompts: tuple[str | tuple[int, ...], ...]
    if prompt and all(isinstance(item, int) for item in prompt):
        prompts = (tuple(item for item in prompt if isinstance(item, int)),)
    else:
        prompts = tuple(item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int))
    if not prompts or () in prompts:
        raise InvalidField(f"`prompt` must be {_PROMPT}, got {prompt}", param="prompt")
    if len(prompts) > MAX_CHOICES:
        raise InvalidField(f"`prompt` may have at most {MAX_CHOICES} prompts, got {len(prompts)}", param="prompt")
    return prompts


class _CompletionsEncoder:
    """Writes `text_completion` objects."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

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
        return _end(self._head, self._choice(0), self._request.output, usage, facts)

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """One event that says what happened, and the mark of the end."""
        return iter((encode_event(_error(error)), DONE))

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {
                **self._choice(answer.choice, answer.text, answer.tokens, answer.token_ids, answer.reason),
                **_prompt_ids(answer.prompt_ids),
            }
            for answer in answers
        ]
        return encode_json({**self._head, "choices": choices, "usage": _usage(usage), **_legato(facts)})

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


def _shown(data: bytes) -> str:
    """A token's bytes as text; those that are no text are spelled out, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# ---------------------------------------------------------------------------------------------------------------------
# Chat


class _MessageBody(Body):
    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[_Part] | None, Field(description="a text or a list of text parts")] = None
    name: str | None = None
    prefix: bool | None = None
    partial: bool | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content."""
        return _joined(self.content or "")


class _ChatBody(_Common):
    messages: list[_MessageBody]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class ChatDialect:
    """`/v1/chat/completions`."""

    stream_type = "text/event-stream"

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(_ChatBody, body)
        if not read.messages:
            raise InvalidField("`messages` must have at least one message, got an empty list", param="messages")
        if read.tools and read.tool_choice != "none":
            raise UnsupportedFeature(
                '`tools` are only taken with `tool_choice` "none": new tool calls are not built yet', param="tools"
            )
        if read.top_logprobs is not None and not read.logprobs:
            raise InvalidField("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        ignored = [name for index, message in enumerate(read.messages) for name in _ignored(index, message)]
        if read.tool_choice is not None and not read.tools:
            ignored.append("tool_choice")
        is_marked = _is_marked(read)
        if read.add_generation_prompt is False and not is_marked:
            ignored.append("add_generation_prompt")
        closed = read.messages[:-1] if is_marked else read.messages
        mark = None
        if is_marked:
            last = read.messages[-1]
            mark = Mark(last.text, last.name)
            if last.reasoning_content:
                ignored.append(f"messages[{len(read.messages) - 1}].reasoning_content")
        for index, message in enumerate(closed):
            _check_content(index, message)
        chat = Chat(tuple(_message(message) for message in closed), mark, tuple(read.tools or ()))
        limit = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
        logprobs = (read.top_logprobs or 0) if read.logprobs else None
        return read.request(chat, max_tokens=limit, logprobs=logprobs, ignored=ignored)

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return _ChatEncoder(request)

    def encode_error(self, error: LegatoError) -> bytes:
        """Write an error's body."""
        return encode_openai_error(error)


def _ignored(index: int, message: _MessageBody) -> Iterator[str]:
    """Name what a message has and nothing reads."""
    for name in unknown_fields(message):
        yield f"messages[{index}].{name}"
    for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
        for name in unknown_fields(part):
            yield f"messages[{index}].content[{at}].{name}"


def _is_marked(body: _ChatBody) -> bool:
    """Whether the last message is to be continued: one of the three marks is enough, and none may contradict."""
    messages = body.messages
    last = len(messages) - 1
    marked = False
    for index, message in enumerate(messages):
        for name in ("prefix", "partial"):
            if getattr(message, name) is not True:
                continue
            if index != last:
                raise InvalidField(
                    f"`messages[{index}].{name}` is true, but only the last message (index {last}) can be continued",
                    param="messages",
                )
            if message.role != "assistant":
                raise InvalidField(
                    f"`messages[{index}].{name}` is true, but its role is `{message.role}`, not `assistant`",
                    param="messages",
                )
            marked = True
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidField(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="add_generation_prompt",
        )
    if marked and False in (messages[-1].prefix, messages[-1].partial):
        raise InvalidField(f"`messages[{last}]` has `prefix` and `partial` contradict each other", param="messages")
    if marked and body.continue_final_message is False:
        raise InvalidField(
            f"`messages[{last}]` is marked to be continued, but `continue_final_message` is false",
            param="continue_final_message",
        )
    if marked and body.add_generation_prompt:
        raise InvalidField(
            f"`messages[{last}]` is marked to be continued, but `add_generation_prompt` is true",
            param="add_generation_prompt",
        )
    if body.continue_final_message and messages[-1].role != "assistant":
        raise InvalidField(
            f"`continue_final_message` is true, but the role of `messages[{last}]` is `{messages[-1].role}`; "
            "only `assistant` can be continued",
            param="continue_final_message",
        )
    marked = marked or bool(body.continue_final_message)
    if marked and messages[-1].tool_calls:
        raise InvalidField(f"`messages[{last}]` has `tool_calls`, which cannot be continued", param="messages")
    if marked and messages[-1].content is None:
        raise InvalidField(f'`messages[{last}].content` is required to be continued; it may be ""', param="messages")
    return marked


def _check_content(index: int, message: _MessageBody) -> None:
    if message.content is None and not message.tool_calls:
        raise InvalidField(f"`messages[{index}].content` is required", param="messages")
    if message.tool_calls and message.role != "assistant":
        raise InvalidField(f"`messages[{index}].tool_calls` is only allowed with role `assistant`", param="messages")


def _message(message: _MessageBody) -> Message:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    return Message(
        role=role,
        content=message.text,
        name=message.name,
        reasoning=message.reasoning_content,
        tool_calls=tuple(message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
    )


class _ChatEncoder:
    """Writes `chat.completion` objects."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def start(self) -> Iterator[bytes]:
        """The role of every choice."""
        for choice in range(self._request.num_choices):
            yield self._chunk(self._choice(choice, {"role": "assistant", "content": ""}))

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """A chunk for the prompt's ids, for each piece of text, and one with the finish reason for each end."""
        match event:
            case Accepted(choice, prompt_ids) if prompt_ids:
                yield self._chunk(self._choice(choice, {"content": ""}), **_prompt_ids(prompt_ids))
            case Delta(choice, text, tokens, token_ids):
                yield self._chunk(self._choice(choice, {"content": text}, tokens, token_ids))
            case Finished(choice, reason):
                yield self._chunk(self._choice(choice, {"content": ""}, reason=reason))

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Usage, if it was asked for, and the mark of the end."""
        head = {**self._head, "object": "chat.completion.chunk"}
        return _end(
            head, {"index": 0, "delta": {"content": ""}, "finish_reason": None}, self._request.output, usage, facts
        )

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """One event that says what happened, and the mark of the end."""
        return iter((encode_event(_error(error)), DONE))

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        choices = [
            {
                "index": answer.choice,
                "message": {"role": "assistant", "content": answer.text},
                "logprobs": self._logprobs(answer.tokens),
                "finish_reason": answer.reason,
                **_token_ids(self._request.output, answer.token_ids),
            }
            for answer in answers
        ]
        shared = {"usage": _usage(usage), **_prompt_ids(answers[0].prompt_ids), **_legato(facts)}
        return encode_json({**self._head, "choices": choices, **shared})

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
# Shared shapes


def _token_ids(output: Output, ids: tuple[int, ...]) -> dict[str, Any]:
    return {"token_ids": ids} if output.token_ids else {}


def _prompt_ids(ids: tuple[int, ...]) -> dict[str, Any]:
    return {"prompt_token_ids": ids} if ids else {}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _end(
    head: Mapping[str, Any], empty: Mapping[str, Any], output: Output, usage: Usage, facts: Facts
) -> Iterator[bytes]:
    """Close a stream: a chunk for what was asked beside the text, and the mark of the end.

    Only with usage has the chunk no choices, as OpenAI has it; otherwise an `empty` one: some clients read the first.
    """
    if output.include_usage:
        yield encode_event({**head, "choices": [], "usage": _usage(usage), **_legato(facts)})
    elif facts:
        yield encode_event({**head, "choices": [empty], **_legato(facts)})
    yield DONE


def _legato(facts: Facts) -> dict[str, Any]:
    return {"legato": dict(facts)} if facts else {}


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def _error(error: LegatoError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def encode_openai_error(error: LegatoError) -> bytes:
    """Write an error with OpenAI's four keys."""
    return encode_json(_error(error))
