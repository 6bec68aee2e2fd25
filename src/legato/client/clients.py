"""The Python client: continues texts and chats through Legato or through the vendors' own APIs, and goes on after a
break.

It receives texts and messages, and returns what follows. `Client` and `AsyncClient` send, read and wait as `asking`
says, which knows the dialects. Every answer is streamed, so that a break costs nothing of what was written.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, Unpack, overload

import httpx2

from legato.client.protocol import (
    DIALECTS,
    MAX_ROUNDS,
    Asked,
    Bounds,
    ClientError,
    Completion,
    ConnectFailed,
    DialectName,
    Flow,
    Head,
    Message,
    Options,
    Read,
    Send,
    State,
    StreamInterrupted,
    Wait,
    completion_of,
    flow,
)
from legato.errors import InvalidField, UnsupportedFeature

__all__ = ["AsyncClient", "AsyncWriting", "Client", "Writing"]


class _Document(Protocol):
    """A pydantic model, as a class."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any: ...


Parsed = TypeVar("Parsed", bound=_Document)


# ---------------------------------------------------------------------------------------------------------------------
# What both clients have in common


class _Common:
    """Settings, and what is made of a method's arguments."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        dialect: DialectName = "legato",
        api_key: str | None = None,
        model: str = "",
        max_retries: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        if dialect not in DIALECTS:
            raise InvalidField(f"`dialect` must be one of {', '.join(DIALECTS)}, got {dialect!r}", param="dialect")
        self._dialect = DIALECTS[dialect]
        self._model = model
        self._max_retries = max_retries
        self._base_url = (base_url or self._dialect.base_url).rstrip("/")
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = httpx2.Timeout(timeout_s, connect=5.0)

    def _asked(self, options: Options, **given: Any) -> Asked:
        unknown = options.keys() - Options.__annotations__
        if unknown:
            raise TypeError(
                f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(Options.__annotations__)}, and "
                "`extra` takes any field of the dialect"
            )
        dialect = self._dialect
        if "seed" in options and dialect.seed is None:
            raise UnsupportedFeature("this dialect takes no `seed`", param="seed")
        if "seed" not in options:  # Rounds, and what follows a break, are one text only under one seed.
            options = {**options, "seed": secrets.randbits(31)}
        model = options.get("model") or self._model
        return Asked(dialect, model, options, **given)

    def _text(self, text: str, instructions: str | None, schema: type[_Document] | None, options: Options) -> Asked:
        return self._asked(options, prefix=text, instructions=instructions, schema=_schema(schema))

    def _chat(
        self,
        messages: Sequence[Message],
        prefix: str,
        reasoning: str | None,
        name: str | None,
        schema: type[_Document] | None,
        options: Options,
    ) -> Asked:
        told = {"prefix": prefix, "reasoning": reasoning, "name": name, "schema": _schema(schema)}
        return self._asked(options, messages=tuple(messages), **told)

    def _gap(self, prefix: str, suffix: str, options: Options) -> Asked:
        if self._dialect.completions is None or self._dialect.gap is None:
            raise UnsupportedFeature("this dialect fills no gaps", param="suffix")
        return self._asked(options, prefix=prefix, suffix=suffix)

    def _once(self, asked: Asked) -> Bounds:
        """A document that was begun is of use only when it is finished: it may take rounds."""
        max_rounds = 1 if asked.schema is None else MAX_ROUNDS
        return Bounds(max_rounds=max_rounds, max_retries=self._max_retries, is_resumed=asked.schema is not None)

    def _until_done(self, max_rounds: int, max_total_tokens: int | None) -> Bounds:
        return Bounds(max_rounds, max_total_tokens, self._max_retries, is_resumed=True)


def _schema(model: type[_Document] | None) -> Mapping[str, Any] | None:
    if model is None:
        return None
    schema = _closed(model.model_json_schema())
    return {"name": getattr(model, "__name__", "document"), "schema": schema, "strict": True}


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than it names, unless it says what those are.

    Otherwise a model may write properties without an end.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(part) for key, part in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


@dataclass
class _Progress:
    """What both writings tell."""

    _asked: Asked
    _bounds: Bounds
    _state: State = field(default_factory=State)

    @property
    def completion(self) -> Completion:
        """What has been written so far."""
        return completion_of(self._asked, self._state)


# ---------------------------------------------------------------------------------------------------------------------
# Synchronous


class Writing(_Progress):
    """A text that is being written; iterate over it once. `completion` is what there is of it at any time."""

    def __init__(self, client: Client, asked: Asked, bounds: Bounds) -> None:
        super().__init__(asked, bounds)
        self._client = client

    def __iter__(self) -> Iterator[str]:
        return self._client._run(flow(self._asked, self._state, self._bounds))


class Client(_Common):
    """Continues texts and chats. Keep one, and close it or use it in a `with` statement.

    Args:
        base_url: what comes before `/chat/completions`; by default the vendor's own address.
        dialect: whose API it is.
        api_key: sent as a bearer token.
        model: the model, where a call names none.
        max_retries: how often in a row something is tried again that brought nothing.
        timeout_s: seconds of silence after which the server is given up.

    Raises:
        InvalidField, UnsupportedFeature: the dialect cannot do what is asked.
        ConnectFailed, StatusError: nothing was written, also after retries.
        StreamInterrupted: something was, and then the stream broke off.
    """

    @overload
    def continue_text(
        self, text: str, *, instructions: str | None = None, response_model: None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    def continue_text(
        self, text: str, *, instructions: str | None = None, response_model: type[Parsed], **options: Unpack[Options]
    ) -> Parsed: ...

    def continue_text(
        self,
        text: str,
        *,
        instructions: str | None = None,
        response_model: type[Parsed] | None = None,
        **options: Unpack[Options],
    ) -> Completion | Parsed:
        """Continue a text, as `instructions` say. With a pydantic model, the text is the beginning of a JSON document,
        and its instance is returned.
        """
        return self._finish(self._text(text, instructions, response_model, options), response_model)

    @overload
    def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: None = None,
        **options: Unpack[Options],
    ) -> Completion: ...

    @overload
    def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: type[Parsed],
        **options: Unpack[Options],
    ) -> Parsed: ...

    def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: type[Parsed] | None = None,
        **options: Unpack[Options],
    ) -> Completion | Parsed:
        """Continue the assistant's message that begins with `prefix`, or begin one.

        `reasoning` is its thinking so far, `name` who speaks; neither is returned. With a pydantic model, the message
        is a JSON document, and its instance is returned.
        """
        return self._finish(self._chat(messages, prefix, reasoning, name, response_model, options), response_model)

    def infill(self, prefix: str, suffix: str, **options: Unpack[Options]) -> Completion:
        """Return what stands between two texts."""
        return self._collect(self._gap(prefix, suffix, options))

    def write(
        self,
        source: str | Sequence[Message],
        prefix: str = "",
        *,
        instructions: str | None = None,
        name: str | None = None,
        max_rounds: int = MAX_ROUNDS,
        max_total_tokens: int | None = None,
        **options: Unpack[Options],
    ) -> Writing:
        """Continue a text, or the message of a chat that begins with `prefix`, until it is done.

        Where an answer is cut by its limit the next request goes on from there, and where a stream breaks off, too:
        what was yielded is never yielded again. It ends with the model or a stop, after `max_rounds` requests or
        `max_total_tokens` tokens, or with a request that brings nothing.
        """
        if isinstance(source, str):
            asked = self._text(source + prefix, instructions, None, options)
        else:
            asked = self._chat(source, prefix, None, name, None, options)
        return Writing(self, asked, self._until_done(max_rounds, max_total_tokens))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @cached_property
    def _http(self) -> httpx2.Client:
        return httpx2.Client(headers=self._headers, timeout=self._timeout)

    def _collect(self, asked: Asked) -> Completion:
        writing = Writing(self, asked, self._once(asked))
        for _ in writing:
            pass
        return writing.completion

    def _finish(self, asked: Asked, model: type[Parsed] | None) -> Completion | Parsed:
        completion = self._collect(asked)
        return completion if model is None else _instance(model, completion)

    def _run(self, steps: Flow) -> Iterator[str]:
        """Do what a flow says."""
        answer: Any = None
        failure: ClientError | None = None
        chunks: Iterator[bytes] = iter(())
        with ExitStack() as open_responses, closing(steps):
            while True:
                try:
                    step = steps.send(answer) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                answer = failure = None
                try:
                    match step:
                        case str():
                            yield step
                        case Wait(seconds):
                            open_responses.close()
                            time.sleep(seconds)
                        case Send(path, body):
                            open_responses.close()
                            response = open_responses.enter_context(
                                self._http.stream("POST", self._base_url + path, content=body)
                            )
                            chunks = response.iter_bytes()
                            answer = Head(response.status_code, response.headers)
                        case Read():
                            answer = next(chunks, b"")
                except httpx2.HTTPError as error:
                    failure = _broken(step, self._base_url, error)


# ---------------------------------------------------------------------------------------------------------------------
# Asynchronous


class AsyncWriting(_Progress):
    """As `Writing`, with `async for`."""

    def __init__(self, client: AsyncClient, asked: Asked, bounds: Bounds) -> None:
        super().__init__(asked, bounds)
        self._client = client

    def __aiter__(self) -> AsyncGenerator[str, None]:
        return self._client._run(flow(self._asked, self._state, self._bounds))


class AsyncClient(_Common):
    """As `Client`, to be awaited."""

    @overload
    async def continue_text(
        self, text: str, *, instructions: str | None = None, response_model: None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    async def continue_text(
        self, text: str, *, instructions: str | None = None, response_model: type[Parsed], **options: Unpack[Options]
    ) -> Parsed: ...

    async def continue_text(
        self,
        text: str,
        *,
        instructions: str | None = None,
        response_model: type[Parsed] | None = None,
        **options: Unpack[Options],
    ) -> Completion | Parsed:
        """As `Client.continue_text`."""
        return await self._finish(self._text(text, instructions, response_model, options), response_model)

    @overload
    async def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: None = None,
        **options: Unpack[Options],
    ) -> Completion: ...

    @overload
    async def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: type[Parsed],
        **options: Unpack[Options],
    ) -> Parsed: ...

    async def continue_chat(
        self,
        messages: Sequence[Message],
        prefix: str = "",
        *,
        reasoning: str | None = None,
        name: str | None = None,
        response_model: type[Parsed] | None = None,
        **options: Unpack[Options],
    ) -> Completion | Parsed:
        """As `Client.continue_chat`."""
        return await self._finish(
            self._chat(messages, prefix, reasoning, name, response_model, options), response_model
        )

    async def infill(self, prefix: str, suffix: str, **options: Unpack[Options]) -> Completion:
        """As `Client.infill`."""
        return await self._collect(self._gap(prefix, suffix, options))

    def write(
        self,
        source: str | Sequence[Message],
        prefix: str = "",
        *,
        instructions: str | None = None,
        name: str | None = None,
        max_rounds: int = MAX_ROUNDS,
        max_total_tokens: int | None = None,
        **options: Unpack[Options],
    ) -> AsyncWriting:
        """As `Client.write`."""
        if isinstance(source, str):
            asked = self._text(source + prefix, instructions, None, options)
        else:
            asked = self._chat(source, prefix, None, name, None, options)
        return AsyncWriting(self, asked, self._until_done(max_rounds, max_total_tokens))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.aclose()

    @cached_property
    def _http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(headers=self._headers, timeout=self._timeout)

    async def _collect(self, asked: Asked) -> Completion:
        writing = AsyncWriting(self, asked, self._once(asked))
        async for _ in writing:
            pass
        return writing.completion

    async def _finish(self, asked: Asked, model: type[Parsed] | None) -> Completion | Parsed:
        completion = await self._collect(asked)
        return completion if model is None else _instance(model, completion)

    async def _run(self, steps: Flow) -> AsyncGenerator[str, None]:
        """Do what a flow says."""
        answer: Any = None
        failure: ClientError | None = None
        chunks: AsyncIterator[bytes]
        with closing(steps):
            async with AsyncExitStack() as open_responses:
                while True:
                    try:
                        step = steps.send(answer) if failure is None else steps.throw(failure)
                    except StopIteration:
                        return
                    answer = failure = None
                    try:
                        match step:
                            case str():
                                yield step
                            case Wait(seconds):
                                await open_responses.aclose()
                                await asyncio.sleep(seconds)
                            case Send(path, body):
                                await open_responses.aclose()
                                response = await open_responses.enter_async_context(
                                    self._http.stream("POST", self._base_url + path, content=body)
                                )
                                chunks = response.aiter_bytes()
                                answer = Head(response.status_code, response.headers)
                            case Read():
                                answer = await anext(chunks, b"")
                    except httpx2.HTTPError as error:
                        failure = _broken(step, self._base_url, error)


def _broken(step: Send | Read | Wait | str, base_url: str, error: httpx2.HTTPError) -> ClientError:
    """Translate a failure of the connection by what was being done."""
    reason = str(error) or type(error).__name__
    if isinstance(step, Send):
        return ConnectFailed(f"{base_url} cannot be reached: {reason}")
    return StreamInterrupted(f"the connection broke off: {reason}")


def _instance(model: type[Parsed], completion: Completion) -> Parsed:
    parsed: Parsed = model.model_validate_json(completion.whole)
    return parsed
