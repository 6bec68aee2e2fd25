"""What the bodies of OpenAI-shaped requests have in common: their fields, their messages, the marks of a continuation.

It receives bodies that are JSON already and returns `CompletionRequest`s. It knows no vendor: what only one has stands
in that dialect's file, and a field or mark that a path does not have is declared by no body of it, so that it is named
as ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field

from legato.dialects.base import Body, unknown_fields
from legato.dialects.constraints import (
    SCHEMA,
    Choices,
    ResponseFormat,
    StructuredOutputs,
    constraints,
    only_constraint,
)
from legato.errors import InvalidField, UnsupportedFeature
from legato.text.endings import LANGUAGES
from legato.types import (
    Chat,
    CompletionRequest,
    ConstraintOptions,
    File,
    Infill,
    Mark,
    Message,
    Output,
    ReasoningOptions,
    Rounds,
    SamplingOptions,
    SeamOptions,
    Source,
    Stops,
)

__all__ = [
    "EFFORTS",
    "MAX_CHOICES",
    "MAX_STOPS",
    "MAX_STOP_BYTES",
    "ChatBody",
    "CommonBody",
    "FlaggedChatBody",
    "GapBody",
    "MessageBody",
    "NumChoices",
    "Penalty",
    "Seed",
    "Temperature",
    "has_mark",
    "read_stops",
    "sampling_options",
    "stop_field",
]

MAX_CHOICES = 64
MAX_STOPS = 32
MAX_STOP_BYTES = 256

EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.9, "max": 0.95}
"""The share of `max_tokens` that thinking may take, by `reasoning_effort`."""

Temperature = Annotated[float, Field(ge=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
NumChoices = Annotated[int, Field(ge=1, le=16)]


def stop_field(max_stops: int = MAX_STOPS) -> Any:
    """Return what a field says that takes texts which end an answer; `read_stops` holds it to that."""
    return Field(description=f"a text or a list of at most {max_stops} texts, each of 1 to {MAX_STOP_BYTES} bytes")


class StreamOptions(Body):
    include_usage: bool | None = None


class Part(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    type: Literal["content"]
    content: Annotated[str | list[Part], Field(description="a text or a list of text parts")]


class AutoContinue(Body):
    max_rounds: Annotated[int, Field(ge=1)] | None = None
    max_total_tokens: Annotated[int, Field(ge=1)] | None = None


class CommonBody(Body):
    """Fields that chats and completions take."""

    max_stops: ClassVar[int] = MAX_STOPS

    model: Annotated[str, Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Annotated[str | list[str] | None, stop_field()] = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="a number > 0 and <= 1")] = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[str | dict[str, Any] | bool | None, Field(description=SCHEMA)] = None
    guided_regex: str | None = None
    guided_choice: Choices = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
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
    constraint_start: Annotated[int, Field(ge=0)] | None = None
    timeout_s: Annotated[float | None, Field(gt=0, description="a number > 0")] = None
    prediction: Prediction | None = None
    deterministic: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    auto_continue: AutoContinue | None = None
    detect_loops: bool = False
    report: bool = False
    resumable: bool = False

    def request(
        self,
        source: Source,
        *,
        max_tokens: int | None,
        num_choices: int = 1,
        output: Output,
        ignored: Sequence[str] = (),
    ) -> CompletionRequest:
        """Return the request, once the dialect has read what is its own; `output` says what it wants shown."""
        if self.stream_options is not None and not self.stream:
            raise InvalidField("`stream_options` is only allowed when `stream` is true", param="stream_options")
        strings, token_ids = read_stops(self.stop, max_stops=self.max_stops)
        constraint = only_constraint(self._constraints())
        if constraint is not None:
            constraint = replace(constraint, start=self.constraint_start)
        return CompletionRequest(
            model=self.model,
            source=source,
            sampling=sampling_options(self, logit_bias=_logit_bias(self.logit_bias)),
            max_tokens=max_tokens,
            rounds=_rounds(self.auto_continue),
            num_choices=num_choices,
            stops=Stops(
                strings=strings,
                across_seam=self.stop_across_seam,
                token_ids=(*token_ids, *(self.stop_token_ids or ())),
                min_tokens=self.min_tokens,
                ignore_end=self.ignore_eos,
                at_cycle=self.detect_loops,
            ),
            constraint=constraint,
            seam=SeamOptions(heal=self.seam == "heal", canonical=self.canonical and self.seam == "heal"),
            output=replace(
                output,
                stream=self.stream,
                include_usage=bool(self.stream_options and self.stream_options.include_usage),
                token_ids=self.return_token_ids,
                report=self.report,
            ),
            timeout_s=self.timeout_s,
            prediction=_joined(self.prediction.content) if self.prediction else "",
            deterministic=self.deterministic,
            cache_salt=self.cache_salt or "",
            resumable=self.resumable,
            ignored=(*unknown_fields(self), *self._unused(constraint), *ignored),
        )

    def _constraints(self) -> Iterator[ConstraintOptions]:
        """Yield what the answer is to keep to, field by field."""
        if self.response_format is not None:
            yield from self.response_format.constraints()
        if self.structured_outputs is not None:
            yield self.structured_outputs.constraint()
        given = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        yield from constraints(given, "guided_{}", self.guided_whitespace_pattern)

    def _unused(self, constraint: ConstraintOptions | None) -> Iterator[str]:
        """Name what stands inside of fields and nothing reads, and what says how to constrain where nothing is."""
        for name in ("stream_options", "auto_continue", "response_format", "structured_outputs"):
            value = getattr(self, name)
            yield from (f"{name}.{inner}" for inner in unknown_fields(value)) if value is not None else ()
        for name in ("constraint_start", "guided_whitespace_pattern"):
            if constraint is None and getattr(self, name) is not None:
                yield name


def sampling_options(body: Body, **converted: Any) -> SamplingOptions:
    """Return a body's sampling: its fields that `SamplingOptions` has by the same name, and the `converted` ones."""
    names = [field.name for field in fields(SamplingOptions) if field.name in type(body).model_fields]
    return SamplingOptions(**{name: getattr(body, name) for name in names} | converted)


def _rounds(asked: AutoContinue | None) -> Rounds | None:
    return None if asked is None else Rounds(asked.max_rounds, asked.max_total_tokens)


def _joined(content: str | list[Part]) -> str:
    """Join parts with nothing between them."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def read_stops(
    stop: str | Sequence[str | int] | None, *, max_stops: int = MAX_STOPS
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts and the token ids that end an answer."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > max_stops:
        raise InvalidField(f"`stop` takes at most {max_stops} texts, got {len(stops)}", param="stop")
    for index, text in enumerate(stops):
        size = len(text.encode()) if isinstance(text, str) else 1
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidField(f"`stop[{index}]` must have 1 to {MAX_STOP_BYTES} bytes, got {size}", param="stop")
    return tuple(s for s in stops if isinstance(s, str)), tuple(s for s in stops if isinstance(s, int))


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int | str, float]:
    values: dict[int | str, float] = {}
    for key, value in (bias or {}).items():
        if not re.fullmatch("[0-9]{1,9}", key):
            raise InvalidField(f"`logit_bias` must have token ids as its keys, got {key!r}", param="logit_bias")
        values[int(key)] = value
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Infill


class GapBody(Body):
    """Legato's own fields of a path that fills gaps."""

    infill: Literal["markers", "prompted"] | None = None
    infill_end: Literal["suffix", "line", "block"] | None = None
    language: Literal["c", "cpp", "go", "java", "javascript", "python", "rust", "typescript"] | None = None

    def gap(self, prefix: str, suffix: str, *, middle: str = "", files: Sequence[File] = ()) -> Infill:
        """Return the gap, with how it is filled."""
        if self.infill_end == "block" and self.language is None:
            raise InvalidField(
                f'`infill_end` "block" needs `language`, one of {", ".join(LANGUAGES)}', param="language"
            )
        return Infill(
            prefix,
            suffix,
            middle=middle,
            files=tuple(files),
            end=self.infill_end or "suffix",
            language=self.language or "",
            is_prompted=self.infill == "prompted",
        )

    def gap_fields(self) -> tuple[str, ...]:
        """Name what was said about a gap where there is none."""
        return tuple(name for name in GapBody.model_fields if getattr(self, name) is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Chat


class MessageBody(Body):
    """A message without marks."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[Part] | None, Field(description="a text or a list of text parts")] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content."""
        return _joined(self.content or "")


_Message = TypeVar("_Message", bound=MessageBody)


class Thinking(Body):
    type: Literal["enabled", "disabled"]


class ChatBody(CommonBody, Generic[_Message]):
    """A chat, without marks beside the messages."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    n: NumChoices = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    thinking: Thinking | None = None

    def chat_request(self, *, is_marked: bool, echo: bool = False, ignored: Sequence[str] = ()) -> CompletionRequest:
        """Return the request, in which the last message is continued if it is marked."""
        if self.tools and self.tool_choice != "none":
            raise UnsupportedFeature(
                '`tools` are only taken with `tool_choice` "none": new tool calls are not built yet', param="tools"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        named = [name for index, message in enumerate(self.messages) for name in _ignored(index, message)]
        if self.tool_choice is not None and not self.tools:
            named.append("tool_choice")
        if self.thinking is not None:
            named += [f"thinking.{name}" for name in unknown_fields(self.thinking)]
        last = len(self.messages) - 1
        mark = _mark(last, self.messages[last]) if is_marked else None
        closed = self.messages[:last] if is_marked else self.messages
        for index, message in enumerate(closed):
            _check_content(index, message)
        request = self.request(
            Chat(tuple(_message(message) for message in closed), mark, tuple(self.tools or ())),
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            num_choices=self.n,
            output=Output(echo=echo, logprobs=(self.top_logprobs or 0) if self.logprobs else None),
            ignored=(*named, *ignored),
        )
        return replace(request, reasoning=self._reasoning())

    @property
    def switches(self) -> dict[str, bool]:
        """The fields that turn thinking on or off."""
        return {} if self.thinking is None else {"thinking": self.thinking.type == "enabled"}

    def _reasoning(self) -> ReasoningOptions:
        effort = None if self.reasoning_effort is None else EFFORTS[self.reasoning_effort]
        bounds = {"reasoning_effort": effort, "thinking_budget": self.thinking_budget}
        told = {name: bound > 0 for name, bound in bounds.items() if bound is not None} | self.switches
        if self.reasoning_effort is not None and self.thinking_budget is not None:
            raise InvalidField(
                "`thinking_budget` and `reasoning_effort` cannot be used together, "
                f"got {self.thinking_budget} and {self.reasoning_effort!r}",
                param="thinking_budget",
            )
        on, off = ([name for name in told if told[name] is way] for way in (True, False))
        if on and off:
            raise InvalidField(f"`{on[0]}` turns thinking on, but `{off[0]}` turns it off", param=off[0])
        if off and self.thinking_budget is None:
            effort = 0.0
        return ReasoningOptions(effort, self.thinking_budget, fields=tuple(told))


class FlaggedChatBody(ChatBody[_Message], Generic[_Message]):
    """A chat whose last message may be marked beside the messages."""

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def is_flagged(self) -> bool:
        """Whether the flags say that the last message is to be continued."""
        if not self.continue_final_message:
            return False
        if self.add_generation_prompt:
            raise InvalidField(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                param="add_generation_prompt",
            )
        last = self.messages[-1]
        if last.role != "assistant":
            raise InvalidField(
                f"`continue_final_message` is true, but the role of `messages[{len(self.messages) - 1}]` is "
                f"`{last.role}`; only `assistant` can be continued",
                param="continue_final_message",
            )
        return True

    def chat_request(self, *, is_marked: bool, echo: bool = False, ignored: Sequence[str] = ()) -> CompletionRequest:
        """Return the request; a flag that marks nothing is named as ignored."""
        if self.add_generation_prompt is False and not is_marked:
            ignored = (*ignored, "add_generation_prompt")
        return super().chat_request(is_marked=is_marked, echo=echo, ignored=ignored)


def has_mark(messages: Sequence[MessageBody], name: str) -> bool:
    """Whether the last message carries the mark `name`, which may stand on an assistant's last message only."""
    last = len(messages) - 1
    for index, message in enumerate(messages):
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
    return getattr(messages[last], name) is True


def _ignored(index: int, message: MessageBody) -> Iterator[str]:
    """Name what a message has and nothing reads."""
    for name in unknown_fields(message):
        yield f"messages[{index}].{name}"
    for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
        for name in unknown_fields(part):
            yield f"messages[{index}].content[{at}].{name}"


def _mark(index: int, message: MessageBody) -> Mark:
    if message.tool_calls:
        raise InvalidField(f"`messages[{index}]` has `tool_calls`, which cannot be continued", param="messages")
    if message.content is None and message.reasoning_content is None:
        raise InvalidField(f'`messages[{index}].content` is required to be continued; it may be ""', param="messages")
    return Mark(message.text, message.name, message.reasoning_content)


def _check_content(index: int, message: MessageBody) -> None:
    if message.content is None and not message.tool_calls:
        raise InvalidField(f"`messages[{index}].content` is required", param="messages")
    if message.tool_calls and message.role != "assistant":
        raise InvalidField(f"`messages[{index}].tool_calls` is only allowed with role `assistant`", param="messages")


def _message(message: MessageBody) -> Message:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    return Message(
        role=role,
        content=message.text,
        name=message.name,
        reasoning=message.reasoning_content,
        tool_calls=tuple(message.tool_calls or ()),
        tool_call_id=message.tool_call_id,
    )
