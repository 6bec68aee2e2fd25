"""llama.cpp's server: `/completion`, `/infill`, and what its clients ask beside.

It receives bodies that are JSON already and returns `CompletionRequest`s, frames and replies. Where it differs from
llama.cpp, docs/dialects/llamacpp.md says so.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from legato import __version__
from legato.dialects.base import Body, Catalogue, Encoder, Facts, Reply, read_body, unknown_fields
from legato.dialects.constraints import json_constraint, text_constraint
from legato.dialects.openai_requests import (
    MAX_CHOICES,
    ChatBody,
    GapBody,
    MessageBody,
    NumChoices,
    Penalty,
    Seed,
    Temperature,
    read_stops,
    sampling_options,
    stop_field,
)
from legato.errors import InvalidField, LegatoError, PromptTooLong, UnsupportedFeature
from legato.types import (
    REST_OF_CONTEXT,
    Accepted,
    Answer,
    Chat,
    CompletionRequest,
    ConstraintOptions,
    Delta,
    File,
    Finished,
    FinishReason,
    Infill,
    Output,
    RawPrompt,
    SamplingOptions,
    Source,
    Stops,
    Text,
    TextToken,
    Times,
    Usage,
)
from legato.wire import EVENTS, encode_event, encode_json

__all__ = [
    "CompletionDialect",
    "InfillDialect",
    "apply_template",
    "detokenize",
    "encode_llamacpp_error",
    "props",
    "tokenize",
]

MAX_BIAS = 10_000
_RANDOM_SEEDS = (-1, 2**32 - 1)
_PROMPT = "a text, a list of token ids and texts, or a list of such prompts, and not empty"
_BIAS = f"a list of pairs or an object: token ids or texts, each with a number, -{MAX_BIAS} to {MAX_BIAS}, or false"

NumTokens = Annotated[int, Field(ge=-1)]
NumProbs = Annotated[int, Field(ge=0, le=20)]


class _GenerationBody(Body):
    """Fields that both routes take."""

    model: str = ""
    stream: bool = False
    n_predict: NumTokens = -1
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    stop: Annotated[str | list[str] | None, stop_field()] = None
    ignore_eos: bool = False
    t_max_prompt_ms: Annotated[float, Field(ge=0)] = 0
    t_max_predict_ms: Annotated[float, Field(ge=0)] = 0
    seed: Seed = -1
    temperature: Temperature = 0.8
    top_k: Annotated[int, Field(ge=-1)] = 40
    top_p: Annotated[float, Field(gt=0, le=1, description="a number > 0 and <= 1")] = 0.95
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.05
    repeat_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    repeat_last_n: Annotated[int, Field(ge=-1)] = -1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[list[Any] | dict[str, Any] | None, Field(description=_BIAS)] = None
    n_cmpl: NumChoices = 1
    n: NumChoices | None = None
    n_probs: NumProbs = 0
    logprobs: NumProbs | None = None
    post_sampling_probs: bool = False
    return_tokens: bool = False
    cache_prompt: bool = True
    grammar: str = ""
    json_schema: Annotated[dict[str, Any] | bool | None, Field(description="a JSON schema")] = None
    constraint_start: Annotated[int, Field(ge=0)] | None = None

    def request(self, source: Source, *, ignored: Sequence[str] = ()) -> CompletionRequest:
        """Return the request, once the route has read its own fields."""
        if self.post_sampling_probs:
            raise UnsupportedFeature("`post_sampling_probs` is not built yet, got True", param="post_sampling_probs")
        constraint = self._constraint()
        if self.grammar and self.json_schema is not None:
            ignored = (*ignored, "json_schema")
        if constraint is None and self.constraint_start is not None:
            ignored = (*ignored, "constraint_start")
        if self.repeat_last_n > 0:
            ignored = (*ignored, "repeat_last_n")
        limits = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        limit = next(limit for limit in limits if limit is not None)
        num_probs = self.n_probs or self.logprobs
        return CompletionRequest(
            model=self.model,
            source=source,
            sampling=self._sampling(),
            max_tokens=REST_OF_CONTEXT if limit == -1 else limit,
            num_choices=self.n_cmpl if self.n is None else self.n,
            stops=Stops(strings=read_stops(self.stop)[0], ignore_end=self.ignore_eos),
            constraint=constraint and replace(constraint, start=self.constraint_start),
            output=Output(stream=self.stream, logprobs=num_probs or None, token_ids=self.stream or self.return_tokens),
            max_reading_s=self.t_max_prompt_ms / 1000 if self.t_max_prompt_ms else None,
            max_writing_s=self.t_max_predict_ms / 1000 if self.t_max_predict_ms else None,
            deterministic=not self.cache_prompt,
            ignored=(*unknown_fields(self), *ignored),
        )

    def _constraint(self) -> ConstraintOptions | None:
        if self.grammar:
            return text_constraint("grammar", self.grammar, "grammar")
        return None if self.json_schema is None else json_constraint(self.json_schema, "json_schema")

    def _sampling(self) -> SamplingOptions:
        has_penalties = self.repeat_last_n != 0
        return sampling_options(
            self,
            presence_penalty=self.presence_penalty if has_penalties else 0.0,
            frequency_penalty=self.frequency_penalty if has_penalties else 0.0,
            repetition_penalty=self.repeat_penalty if has_penalties else 1.0,
            logit_bias=_logit_bias(self.logit_bias or ()),
            seed=None if self.seed in _RANDOM_SEEDS else self.seed,
        )


def _logit_bias(bias: Sequence[Any] | Mapping[str, Any]) -> dict[int | str, float]:
    pairs: Sequence[Any] = bias if isinstance(bias, Sequence) else [[_id(key), value] for key, value in bias.items()]
    values: dict[int | str, float] = {}
    for pair in pairs:
        match pair:
            case [bool() | "", _]:
                raise _wrong_bias(pair)
            case [int(key) | str(key), False]:
                values[key] = -math.inf
            case [int(key) | str(key), int(value) | float(value)] if value is not True and abs(value) <= MAX_BIAS:
                values[key] = float(value)
            case _:
                raise _wrong_bias(pair)
    return values


def _wrong_bias(pair: Any) -> InvalidField:
    return InvalidField(f"`logit_bias` must be {_BIAS}, got {pair!r:.80}", param="logit_bias")


def _id(key: str) -> int | str:
    return int(key) if re.fullmatch("[0-9]{1,9}", key) else key


# ---------------------------------------------------------------------------------------------------------------------
# The two routes that generate


class _CompletionBody(_GenerationBody):
    prompt: Annotated[str | list[Any], Field(description=_PROMPT)]


class _Extra(Body):
    text: str
    filename: str = "tmp"


class _InfillBody(_GenerationBody, GapBody):
    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[_Extra] = Field([])
    n_indent: Annotated[int, Field(ge=0)] = 0


class _Dialect:
    """What both routes have in common."""

    stream_type = EVENTS

    def encoder(self, request: CompletionRequest) -> Encoder:
        """Return the writer for one answer."""
        return _Encoder(request)


class CompletionDialect(_Dialect):
    """`/completion`."""

    body = _CompletionBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        prompts = _prompts(read.prompt)
        request = read.request(Text(prompts))
        if len(prompts) * request.num_choices > MAX_CHOICES:
            raise InvalidField(
                f"`n_cmpl` times the number of prompts must be at most {MAX_CHOICES}, "
                f"got {request.num_choices} times {len(prompts)}",
                param="n_cmpl",
            )
        return request


def _prompts(prompt: str | Sequence[Any]) -> tuple[RawPrompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    has_ids = any(isinstance(item, int) for item in prompt)
    prompts = tuple(_parts(item) for item in ([prompt] if has_ids else prompt))
    if not prompts:
        raise InvalidField(f"`prompt` must be {_PROMPT}, got []", param="prompt")
    return prompts


def _parts(prompt: Any) -> RawPrompt:
    if isinstance(prompt, str):
        return prompt
    parts = tuple(prompt) if isinstance(prompt, list) else ()
    if not parts or not all(isinstance(part, int | str) and not isinstance(part, bool) for part in parts):
        raise InvalidField(f"`prompt` must be {_PROMPT}, got {prompt!r:.80}", param="prompt")
    return parts


class InfillDialect(_Dialect):
    """`/infill`."""

    body = _InfillBody

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """Read a request; see `Dialect.parse`."""
        read = read_body(self.body, body)
        files = tuple(File(extra.filename, extra.text) for extra in read.input_extra)
        ignored = [
            f"input_extra[{index}].{name}"
            for index, extra in enumerate(read.input_extra)
            for name in unknown_fields(extra)
        ]
        gap = read.gap(read.input_prefix, read.input_suffix, middle=read.prompt, files=files)
        return read.request(replace(gap, min_indent=read.n_indent), ignored=ignored)


@dataclass(slots=True)
class _Progress:
    """How far a streamed choice has come."""

    num_prompt: int = 0
    num_tokens: int = 0
    has_new_line: bool = False


class _Encoder:
    """Writes completion objects: a list of them, if there is more than one choice."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._progress: defaultdict[int, _Progress] = defaultdict(_Progress)

    def start(self) -> Iterator[bytes]:
        """Nothing comes before the text."""
        return iter(())

    def event(self, event: Accepted | Delta | Finished) -> Iterator[bytes]:
        """An object for each piece of text, and one for each end."""
        progress = self._progress[event.choice]
        match event:
            case Accepted(_, prompt_ids):
                progress.num_prompt = len(prompt_ids)
            case Delta(choice, text, tokens, token_ids):
                progress.num_tokens += len(token_ids)
                progress.has_new_line = progress.has_new_line or "\n" in text
                yield encode_event(
                    {
                        **self._piece(choice, text, tokens, token_ids),
                        "stop": False,
                        "tokens_predicted": progress.num_tokens,
                        "tokens_evaluated": progress.num_prompt,
                    }
                )
            case Finished(choice, reason, matched, usage, times):
                ended = self._end(choice, reason, matched, usage, times)
                piece = self._piece(choice, "", (), ())
                yield encode_event({**piece, **ended, "has_new_line": progress.has_new_line})

    def end(self, usage: Usage, facts: Facts) -> Iterator[bytes]:
        """Nothing comes after the ends of the choices."""
        return iter(())

    def failure(self, error: LegatoError) -> Iterator[bytes]:
        """One event that says what happened."""
        yield encode_event(_error(error))

    def whole(self, answers: tuple[Answer, ...], usage: Usage, facts: Facts) -> bytes:
        """The body of an answer that is not streamed."""
        objects = [
            {
                **self._piece(answer.choice, answer.text, answer.tokens, answer.token_ids),
                **self._end(answer.choice, answer.reason, answer.matched, answer.usage, answer.times),
                "has_new_line": "\n" in answer.text,
            }
            for answer in answers
        ]
        return encode_json(objects if len(objects) > 1 else objects[0])

    def _piece(
        self, choice: int, text: str, tokens: tuple[TextToken, ...], token_ids: tuple[int, ...]
    ) -> dict[str, Any]:
        piece = {"index": choice, "content": text, "tokens": token_ids, "id_slot": -1}
        if self._request.output.logprobs is None:
            return piece
        return {**piece, "completion_probabilities": [_scored(token) for token in tokens]}

    def _end(
        self, choice: int, reason: FinishReason, matched: str | None, usage: Usage, times: Times
    ) -> dict[str, Any]:
        request = self._request
        return {
            "stop": True,
            "model": request.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": _settings(request),
            "prompt": _shown(request, choice),
            "truncated": False,
            "stop_type": "limit" if reason == "length" else "eos" if matched is None else "word",
            "stopping_word": matched or "",
            "timings": _timings(usage, times),
        }


def _scored(token: TextToken) -> dict[str, Any]:
    top = [_probability(scored.id, scored.data, scored.logprob) for scored in token.top]
    return {**_probability(token.id, token.data, token.logprob), "token": token.text, "top_logprobs": top}


def _probability(id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"id": id, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def _settings(request: CompletionRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "n_predict": request.max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": request.stops.strings,
        "ignore_eos": request.stops.ignore_end,
        "n_probs": request.output.logprobs or 0,
        "stream": request.output.stream,
    }


def _shown(request: CompletionRequest, choice: int) -> RawPrompt:
    """Return the prompt of a choice, as it was given."""
    match request.source:
        case Text(prompts):
            return prompts[choice // request.num_choices]
        case Infill(prefix, _, middle):
            return prefix + middle
        case Chat():
            return ""


def _timings(usage: Usage, times: Times) -> dict[str, Any]:
    return {
        "cache_n": usage.cached_tokens,
        **_speed("prompt", usage.prompt_tokens - usage.cached_tokens, times.reading_s),
        **_speed("predicted", usage.completion_tokens, times.writing_s),
    }


def _speed(name: str, num: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / num if num else 0.0,
        f"{name}_per_second": num / seconds if seconds else 0.0,
    }


# ---------------------------------------------------------------------------------------------------------------------
# What is answered without an engine


class _TokenizeBody(Body):
    model: str = ""
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


def tokenize(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/tokenize`: the ids of a text."""
    read = read_body(_TokenizeBody, body)
    tokenizer = catalogue.find(read.model).tokenizer
    ids = tokenizer.encode(read.content.encode(), special=read.parse_special)
    if read.add_special and tokenizer.start_id is not None:
        ids = [tokenizer.start_id, *ids]
    tokens = [{"id": id, "piece": _piece(tokenizer.pieces[id])} for id in ids] if read.with_pieces else ids
    return Reply({"tokens": tokens}, unknown_fields(read))


def _piece(data: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


class _DetokenizeBody(Body):
    model: str = ""
    tokens: Annotated[list[int], Field(description="a list of token ids")]


def detokenize(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/detokenize`: the text of ids."""
    read = read_body(_DetokenizeBody, body)
    pieces = catalogue.find(read.model).tokenizer.pieces
    for index, id in enumerate(read.tokens):
        if not 0 <= id < len(pieces):
            raise InvalidField(
                f"`tokens[{index}]` must be a token id, 0 to {len(pieces) - 1}, got {id}", param="tokens"
            )
    data = b"".join(pieces[id] for id in read.tokens)
    return Reply({"content": data.decode("utf-8", "replace")}, unknown_fields(read))


class _TemplateBody(ChatBody[MessageBody]):
    model: str = ""


def apply_template(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/apply-template`: the prompt of a chat, in which an assistant's last message is left open."""
    known = {name: body[name] for name in ("model", "messages", "tools") if body.get(name) is not None}
    read = read_body(_TemplateBody, {**known, **({"tool_choice": "none"} if known.get("tools") else {})})
    is_open = read.messages[-1].role == "assistant"
    if is_open and len(read.messages) > 1 and read.messages[-2].role == "assistant":
        raise InvalidField("`messages` cannot have 2 or more assistant messages at its end", param="messages")
    request = read.chat_request(is_marked=is_open)
    assert isinstance(request.source, Chat)
    prompt = catalogue.find(request.model).open_turn(request.source)
    ignored = [name for name, value in body.items() if name not in known and value is not None]
    return Reply({"prompt": prompt}, (*ignored, *request.ignored))


def props(body: dict[str, Any], catalogue: Catalogue) -> Reply:
    """`/props`: what clients want to know of the first model."""
    model = catalogue.find("")
    defaults = _settings(_GenerationBody().request(Text(())))
    return Reply(
        {
            "default_generation_settings": {"n_ctx": model.profile.context_length, "params": {**defaults, "seed": -1}},
            "total_slots": model.num_places,
            "model_alias": model.name,
            "model_path": model.name,
            "chat_template": model.profile.chat_template or "",
            "bos_token": model.profile.start_text,
            "eos_token": model.profile.end_text,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"legato {__version__}",
        }
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def _status(error: LegatoError) -> int:
    return 501 if isinstance(error, UnsupportedFeature) else error.status


def _error(error: LegatoError) -> dict[str, Any]:
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"code": status, "message": error.message, "type": kind}
    if isinstance(error, PromptTooLong):
        body |= {
            "type": "exceed_context_size_error",
            "n_prompt_tokens": error.num_tokens,
            "n_ctx": error.context_length,
        }
    return {"error": body}


def encode_llamacpp_error(error: LegatoError) -> tuple[int, bytes]:
    """Return an error's status and body; its code is a number."""
    return _status(error), encode_json(_error(error))
