"""How a continuation is asked for and what is made of the answer, in each dialect: the client without its sockets.

It receives what is to be continued and yields what is to be done: what to send, how long to wait, what to tell the
caller. It is given what came back. It does no I/O, and knows nothing of models, engines or files.

    flow     rounds until the text is done; what breaks off is continued from what has come
    _round   one request, and the events of its stream
    _body    a request as its dialect spells it
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

from legato.errors import LegatoError, UnsupportedFeature
from legato.wire import EventReader, encode_json

__all__ = [
    "DIALECTS",
    "MAX_ROUNDS",
    "Asked",
    "Bounds",
    "ClientError",
    "Completion",
    "ConnectFailed",
    "Dialect",
    "DialectName",
    "Flow",
    "Head",
    "Message",
    "Options",
    "Read",
    "Send",
    "State",
    "StatusError",
    "StreamInterrupted",
    "Wait",
    "completion_of",
    "flow",
]

DialectName = Literal["legato", "maas", "moark", "dashscope", "kimi", "deepseek", "mistral", "vllm", "openai"]
Message = Mapping[str, Any]

_ROUND_TOKENS = 512
"""Of a round of `write` that continues a raw text, where a missing `max_tokens` would mean 16."""
MAX_ROUNDS = 1000
_MAX_WAIT_S = 120
"""A server that wants more time than this before it is asked again is not asked again."""
_TASK = "Continue the text. Write only what comes next."
"""What a chat is asked where a dialect has nothing else to continue a text with."""


# ---------------------------------------------------------------------------------------------------------------------
# Failures


class ClientError(LegatoError):
    """Something did not come back as it should."""

    code = "client_error"


class ConnectFailed(ClientError):
    """The server could not be reached."""

    code = "connect_failed"


class StatusError(ClientError):
    """The server refused: `status`, and the `code` and `param` that it named."""

    code = "status_error"

    def __init__(self, message: str, *, status: int, code: str | None, param: str | None, wait_s: float | None) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status
        self.retry_after_s = wait_s


class StreamInterrupted(ClientError):
    """The stream broke off. `partial` is what had come by then: it can be continued."""

    code = "stream_interrupted"
    partial: Completion


# ---------------------------------------------------------------------------------------------------------------------
# Dialects


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one vendor is asked to continue."""

    base_url: str
    key_variable: str
    """The environment variable that has the key, as the vendor names it."""
    mark: Literal["prefix", "partial", "flags"] | None
    """How the message that is to be continued is marked; None: there is no way."""
    completions: str | None = "/completions"
    """The path that continues raw text; None: there is none."""
    gap: Literal["suffix", "markers"] | None = None
    """How a text after the gap is sent there."""
    seed: str | None = "seed"
    takes_name: bool = False
    takes_thinking: bool = False
    """Whether thinking that was cut goes on, from the `reasoning_content` of the marked message."""
    takes_instructions: bool = False
    tells_usage: bool = True
    """Whether `stream_options` may ask for it."""
    replays: bool = False
    """Whether the answer of a chat begins with the prefix."""


DIALECTS: Mapping[str, Dialect] = {
    "legato": Dialect(
        "http://127.0.0.1:8080/v1",
        "OPENAI_API_KEY",
        "prefix",
        gap="suffix",
        takes_name=True,
        takes_thinking=True,
        takes_instructions=True,
    ),
    "maas": Dialect("https://api-ap-southeast-1.modelarts-maas.com/v2", "MAAS_API_KEY", "prefix", completions=None),
    "moark": Dialect("https://moark.ai/v1", "MOARK_API_KEY", None, takes_instructions=True, tells_usage=False),
    "dashscope": Dialect(
        "https://dashscope-intl.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY", "partial", gap="markers"
    ),
    "kimi": Dialect(
        "https://api.moonshot.ai/v1",
        "MOONSHOT_API_KEY",
        "partial",
        completions=None,
        seed=None,
        takes_name=True,
        takes_thinking=True,
    ),
    "deepseek": Dialect(
        "https://api.deepseek.com/beta", "DEEPSEEK_API_KEY", "prefix", gap="suffix", takes_thinking=True
    ),
    "mistral": Dialect(
        "https://api.mistral.ai/v1",
        "MISTRAL_API_KEY",
        "prefix",
        completions="/fim/completions",
        gap="suffix",
        seed="random_seed",
        tells_usage=False,
        replays=True,
    ),
    "vllm": Dialect("http://127.0.0.1:8000/v1", "OPENAI_API_KEY", "flags", gap="suffix", takes_thinking=True),
    "openai": Dialect("https://api.openai.com/v1", "OPENAI_API_KEY", None, gap="suffix"),
}
"""By name. The address is what comes before `/chat/completions`, as OpenAI's clients take it."""


class Options(TypedDict, total=False):
    """What every method takes beside its text."""

    model: str
    max_tokens: int
    """Of an answer; of `write`: of a round."""
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int
    extra: Mapping[str, Any]
    """Further fields of the request, as the dialect spells them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be continued."""

    dialect: Dialect
    model: str
    options: Options
    messages: tuple[Message, ...] | None = None
    """None: a raw text."""
    prefix: str = ""
    suffix: str | None = None
    reasoning: str | None = None
    name: str | None = None
    instructions: str | None = None
    schema: Mapping[str, Any] | None = None

    def as_chat(self) -> Asked:
        """Turn a raw text into a chat where the dialect, or what is asked for, leaves no other way."""
        dialect = self.dialect
        is_told = bool(self.instructions) and not dialect.takes_instructions
        # Of a raw text, servers constrain the answer alone; of a marked message, all of it.
        is_shaped = self.schema is not None and dialect.mark is not None
        if self.messages is not None or (dialect.completions and not is_told and not is_shaped):
            return self
        system = ({"role": "system", "content": self.instructions},) if self.instructions else ()
        return replace(self, messages=(*system, {"role": "user", "content": _TASK}), instructions=None)


@dataclass(slots=True)
class State:
    """What has been written so far."""

    texts: list[str] = field(default_factory=list)
    """Piece by piece."""
    thoughts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0
    num_rounds: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The thinking before it."""
        return "".join(self.thoughts)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prefix and what follows it."""

    prefix: str
    text: str
    """What follows, without the prefix."""
    reasoning: str | None
    """The thinking before the text, as far as it is not part of what was given; None if there was none."""
    finish_reason: str | None
    """`length`: it can go on. None: it broke off."""
    num_tokens: int
    """As the server counts; where it does not, events."""
    num_rounds: int
    ignored: tuple[str, ...]
    """Fields that the server says had no effect."""

    @property
    def whole(self) -> str:
        """The prefix and what follows, as one text."""
        return self.prefix + self.text


def _body(asked: Asked, state: State, max_tokens: int | None) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the request that continues behind what is written."""
    dialect, options = asked.dialect, asked.options
    known: dict[str, Any] = {key: value for key, value in options.items() if key not in ("extra", "seed", "max_tokens")}
    body: dict[str, Any] = {"model": asked.model, **known, "stream": True}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if "seed" in options and dialect.seed:
        body[dialect.seed] = options["seed"]
    if dialect.tells_usage:
        body["stream_options"] = {"include_usage": True}
    if asked.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": asked.schema}
    prefix = asked.prefix + state.text
    if asked.messages is None:
        path = dialect.completions or ""
        body |= _prompt(asked, prefix)
        if asked.instructions:
            body["instructions"] = asked.instructions
    else:
        path = "/chat/completions"
        is_thinking = dialect.takes_thinking and (asked.reasoning is not None or bool(state.reasoning))
        thought = (asked.reasoning or "") + state.reasoning if is_thinking else None
        is_open = bool(prefix or asked.name) or is_thinking
        body["messages"] = [*asked.messages, *([_marked(asked, prefix, thought)] if is_open else [])]
        if is_open and dialect.mark == "flags":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    return path, body | dict(options.get("extra", {}))


def _prompt(asked: Asked, prefix: str) -> dict[str, Any]:
    """Return the fields of a raw text, or of what is around a gap."""
    dialect, suffix = asked.dialect, asked.suffix
    if dialect.gap == "markers":
        end = "" if suffix is None else f"{suffix}<|fim_middle|>"
        return {"prompt": f"<|fim_prefix|>{prefix}<|fim_suffix|>{end}"}
    return {"prompt": prefix} if suffix is None else {"prompt": prefix, "suffix": suffix}


def _marked(asked: Asked, prefix: str, thought: str | None) -> dict[str, Any]:
    """Return the assistant's message so far, marked as the dialect wants it."""
    dialect = asked.dialect
    if dialect.mark is None:
        raise UnsupportedFeature("this dialect has no way to continue a message; `vllm` has the flags of most servers")
    message: dict[str, Any] = {"role": "assistant", "content": _shown(asked, prefix)}
    if dialect.mark != "flags":
        message[dialect.mark] = True
    if thought is not None:
        message["reasoning_content"] = thought
    if asked.name and dialect.takes_name:
        message["name"] = asked.name
    return message


def _shown(asked: Asked, prefix: str) -> str:
    """Return the content so far; a name that has no field of its own stands before it, as Legato puts it."""
    return f"{asked.name}: {prefix}" if asked.name and not asked.dialect.takes_name else prefix


# ---------------------------------------------------------------------------------------------------------------------
# The flow: what is sent and what is made of what comes back


@dataclass(frozen=True, slots=True)
class Send:
    """Post a body, and give back a `Head`."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """Give back the next bytes of the answer; none at its end."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Head:
    """How an answer begins."""

    status: int
    headers: Mapping[str, str]


Flow = Generator[Send | Read | Wait | str, Any, None]
"""Yields what is to be done, and texts for the caller."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a writing goes."""

    max_rounds: int = 1
    max_total_tokens: int | None = None
    max_retries: int = 2
    is_resumed: bool = False
    """Whether a stream that broke off is continued from what it has brought."""


def flow(asked: Asked, state: State, bounds: Bounds) -> Flow:
    """Write until it is done: round after round, and again after a failure, until one brings nothing new.

    A failure is tried again at most `max_retries` times in a row; whatever brings text begins to count anew.
    """
    asked = asked.as_chat()
    num_failures = 0
    while bounds.max_total_tokens is None or state.num_tokens < bounds.max_total_tokens:
        before = _progress(asked, state)
        path, body = _body(asked, state, _room(asked, state, bounds))
        state.finish_reason = None
        try:
            yield from _round(asked, state, Send(path, encode_json(body)))
        except (ConnectFailed, StatusError, StreamInterrupted) as error:
            if state.finish_reason is None:  # Otherwise nothing is missing but the count.
                has_progress = _progress(asked, state) > before
                num_failures = 0 if has_progress else num_failures + 1
                wait_s = _wait_s(error, num_failures)
                if (has_progress and not bounds.is_resumed) or num_failures > bounds.max_retries or wait_s is None:
                    if isinstance(error, StreamInterrupted):
                        error.partial = completion_of(asked, state)
                    raise
                if num_failures:
                    yield Wait(wait_s)
                continue
        num_failures = 0
        state.num_rounds += 1
        is_cut = state.finish_reason == "length" and _progress(asked, state) > before
        if not is_cut or state.num_rounds >= bounds.max_rounds:
            return
    state.finish_reason = "length"


def _progress(asked: Asked, state: State) -> int:
    """Count the characters that the next round begins with; thinking is among them only where it can go on."""
    return len(state.text) + (len(state.reasoning) if asked.dialect.takes_thinking else 0)


def _room(asked: Asked, state: State, bounds: Bounds) -> int | None:
    """Return the `max_tokens` of the next round; None: as the server has it."""
    limits = [limit for limit in (asked.options.get("max_tokens"),) if limit is not None]
    if bounds.max_rounds > 1 and asked.messages is None and not limits:
        limits = [_ROUND_TOKENS]
    if bounds.max_total_tokens is not None:
        limits.append(bounds.max_total_tokens - state.num_tokens)
    return min(limits, default=None)


def _wait_s(error: ClientError, num_failures: int) -> float | None:
    """Return how long to wait before the next try; None: another one would be answered the same."""
    if isinstance(error, StatusError):
        if error.status not in (408, 409, 425, 429) and error.status < 500:
            return None
        if error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= _MAX_WAIT_S else None
    return min(8.0, 0.25 * 2.0**num_failures)


def _round(asked: Asked, state: State, send: Send) -> Flow:
    """Send one request and take its stream apart.

    Raises:
        StatusError: it was refused.
        StreamInterrupted: it ended without saying why, or with an error.
    """
    head: Head = yield send
    if head.status != 200:
        raise _refusal(head, (yield from _rest()))
    state.ignored = tuple(name.strip() for name in head.headers.get("legato-ignored", "").split(",") if name.strip())
    if not (state.texts or asked.dialect.takes_thinking):
        state.thoughts.clear()  # It thinks anew.
    told = 0
    replay = _Replay(_shown(asked, asked.prefix + state.text) if _is_replayed(asked) else "")
    reader = EventReader()
    counted: int | None = None
    while data := (yield Read()):
        for event in _events(reader, data):
            if event.startswith(b"[DONE]"):  # Some send comments behind it, and never end.
                return _count(state, counted, told)
            value = _parse(event)
            choice = (value.get("choices") or [{}])[0]
            counted = _counted(value, choice, counted)
            piece = choice.get("delta") or choice.get("message") or choice
            thought = piece.get("reasoning_content") or piece.get("reasoning") or ""
            if thought:
                state.thoughts.append(thought)
            text = replay.feed(piece.get("content") or piece.get("text") or "")
            told += bool(text or thought)
            state.num_tokens += bool(text or thought)
            state.finish_reason = choice.get("finish_reason") or state.finish_reason
            if state.finish_reason:
                text += replay.flush()
            if text:
                state.texts.append(text)
                yield text
    return _count(state, counted, told)


def _count(state: State, counted: int | None, told: int) -> None:
    """End a round, and count as the server does, if it says so."""
    if state.finish_reason is None:
        raise StreamInterrupted("the stream ended without a finish reason")
    if counted is not None:
        state.num_tokens += counted - told


def _events(reader: EventReader, data: bytes) -> list[bytes]:
    try:
        return reader.feed(data)
    except ValueError as error:
        raise StreamInterrupted(f"the stream cannot be read: {error}") from None


def _rest() -> Generator[Read, bytes, bytes]:
    pieces = []
    while data := (yield Read()):
        pieces.append(data)
    return b"".join(pieces)


def _is_replayed(asked: Asked) -> bool:
    return asked.messages is not None and asked.dialect.replays


class _Replay:
    """Leaves out the prefix where an answer begins with it. One that begins otherwise is passed on as it is."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._num_held = 0
        """Characters of it that have come, and were not passed on."""

    def feed(self, text: str) -> str:
        if not self._prefix:
            return text
        if self._prefix.startswith(text, self._num_held):
            self._num_held += len(text)
            return ""
        rest = (self._prefix[: self._num_held] + text).removeprefix(self._prefix)
        self._prefix, self._num_held = "", 0
        return rest

    def flush(self) -> str:
        held = self._prefix[: self._num_held] if self._num_held < len(self._prefix) else ""
        self._prefix, self._num_held = "", 0
        return held


def _parse(event: bytes) -> dict[str, Any]:
    try:
        value = json.loads(event)
    except ValueError:
        raise StreamInterrupted(f"the stream has an event that is not JSON: {event[:80]!r}") from None
    error = value.get("error") if isinstance(value, dict) else {"message": "an event is no object"}
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise StreamInterrupted(f"the server broke off: {message}")
    return dict(value)


def _counted(value: Mapping[str, Any], choice: Mapping[str, Any], before: int | None) -> int | None:
    usage = value.get("usage") or choice.get("usage") or {}
    num: int | None = usage.get("completion_tokens", before)
    return num


def _refusal(head: Head, body: bytes) -> StatusError:
    """Read an error in any of the shapes that dialects have."""
    message, code, param = body.decode("utf-8", "replace")[:500], None, None
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        if isinstance(error, dict):
            detail = error.get("detail")
            if isinstance(detail, list) and detail:
                error = {"message": detail[0].get("msg"), "code": detail[0].get("type")}
            message = error.get("message") or error.get("error_msg") or message
            code, param = error.get("code") or error.get("error_code"), error.get("param")
        else:
            message = str(error)
    wait = head.headers.get("retry-after", "")
    return StatusError(
        f"the server said {head.status}: {message}",
        status=head.status,
        code=None if code is None else str(code),
        param=param,
        wait_s=float(wait) if wait.isdecimal() else None,
    )


def completion_of(asked: Asked, state: State) -> Completion:
    return Completion(
        asked.prefix,
        state.text,
        state.reasoning or None,
        state.finish_reason,
        state.num_tokens,
        state.num_rounds,
        state.ignored,
    )
