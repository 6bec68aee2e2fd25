"""The servers of one model: who is asked, what is no answer, and who is asked then.

It receives the bodies of requests and returns the parts of answers. Servers are tried in turn until one has answered;
one that is gone, has no room, or sends garbage is left alone for a while. It knows no Jobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, NoReturn

from legato.engines.upstream.events import Part, message_of, read_part
from legato.engines.upstream.http import HttpClient
from legato.engines.upstream.replicas import Replicas
from legato.errors import ConfigError, GenerationFailed
from legato.wire import EVENTS, EventReader, encode_json

__all__ = ["BrokenOff", "Lost", "Proof", "Servers"]

_MAX_EVENT_BYTES = 2**20
_MAX_EMPTY = 1024
"""Events of an answer beyond one for each of its tokens."""
_MAX_REFUSAL_BYTES = 2**16
_MAX_LIST_BYTES = 2**24
_NOTHING = Part()


class Lost(Exception):
    """A server is gone, cannot answer now, or sends what is no answer; another may."""


class BrokenOff(Lost):
    """One was lost that had begun to answer: others were not asked."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a server must show before it gets anything else."""

    body: Mapping[str, Any]
    ids: Sequence[int]
    """The only right answer."""
    failure: str
    """What is wrong with a server that gives another one."""


class Servers:
    """Asks servers of the same model, at some addresses, with the same key. `make_proof` returns a new proof each time;
    None: nothing has to be shown.
    """

    def __init__(self, urls: Sequence[str], *, key: str, num_ids: int, make_proof: Callable[[], Proof] | None) -> None:
        bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self._client = HttpClient({"authorization": f"Bearer {key}"} if key else {})
        self._replicas = Replicas(bases, asyncio.get_running_loop().time)
        self._num_ids = num_ids
        self._make_proof = make_proof
        self._proven: set[str] = set()

    @property
    def num_failed(self) -> int:
        """How many are left alone now."""
        return self._replicas.num_failed

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def parts(self, ids: Sequence[int], body: Mapping[str, Any]) -> AsyncGenerator[Part, None]:
        """Yield the parts of an answer to a prompt, an empty one first.

        Raises:
            Lost: none answers.
            BrokenOff: the one that did is gone.
            GenerationFailed: one refuses the request for good.
        """
        reason = "there is none"
        for url in self._replicas.order(ids):
            is_answered = False
            try:
                if self._make_proof is not None and url not in self._proven:
                    await self._prove(url, self._make_proof())
                with self._replicas.running(url, ids):
                    async with aclosing(self._post(url, body)) as parts:
                        async for part in parts:
                            is_answered = is_answered or part != _NOTHING
                            yield part
                self._replicas.worked(url)
                return
            except (Lost, OSError) as error:
                self._replicas.failed(url)
                self._proven.discard(url)
                reason = f"{url}: {str(error) or type(error).__name__}"
                if is_answered:
                    raise BrokenOff(reason) from None
        raise Lost(reason)

    async def first_model(self) -> str:
        """Return the name of the first model that a server lists.

        Raises:
            ConfigError: none does.
        """
        reason = "no address is set"
        for url in self._replicas.order(()):
            try:
                with closing(await self._client.ask("GET", url, "/v1/models")) as answer:
                    if answer.status != 200:
                        raise OSError(f"status {answer.status}")
                    return str(json.loads(await answer.whole(_MAX_LIST_BYTES))["data"][0]["id"])
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                reason = f"{url}: {str(error) or type(error).__name__}"
        raise ConfigError(f"no server tells the name of its model, so set `upstream_model` ({reason})")

    async def _post(self, url: str, body: Mapping[str, Any]) -> AsyncGenerator[Part, None]:
        """Yield an empty part when a server takes a request on, and then those of its stream, which is read to its end
        so that its connection can be kept.

        Raises:
            Lost: it sends what is no answer.
            OSError: it is gone.
            GenerationFailed: it refuses the request.
        """
        reader = EventReader(_MAX_EVENT_BYTES, is_strict=True)
        with closing(await self._client.ask("POST", url, "/v1/completions", encode_json(body))) as answer:
            if answer.status != 200:
                _refuse(answer.status, await answer.whole(_MAX_REFUSAL_BYTES))
            if answer.kind not in ("", EVENTS):
                raise Lost(f"it answers with `{answer.kind}` where `{EVENTS}` was asked for")
            yield _NOTHING
            has_ended = False
            num_tokens, num_events = body["max_tokens"] + 1, body["max_tokens"] + _MAX_EMPTY
            while (piece := await answer.piece()) is not None:
                try:
                    for data in reader.feed(piece):
                        if data == b"[DONE]":
                            continue
                        part = read_part(data, self._num_ids)
                        num_tokens -= len(part.ids)
                        num_events -= 1
                        if num_tokens < 0 or num_events < 0:
                            raise ValueError("it is longer than what was asked for")
                        yield part
                        has_ended = has_ended or part.reason is not None
                except ValueError as error:
                    raise Lost(f"it sends what is no answer: {error}") from None
            if not has_ended:
                raise Lost("its stream ends before the answer")

    async def _prove(self, url: str, proof: Proof) -> None:
        """Put a server to the proof.

        Raises:
            Lost: it fails.
            OSError, GenerationFailed: as `_post`.
        """
        written: list[int] = []
        async with aclosing(self._post(url, proof.body)) as parts:
            async for part in parts:
                written += part.ids
        if written != list(proof.ids):
            raise Lost(proof.failure)
        self._proven.add(url)


def _refuse(status: int, body: bytes) -> NoReturn:
    """Raise what a server's refusal means.

    Raises:
        Lost: it cannot answer now, or says nothing that is an answer.
        GenerationFailed: it never will.
    """
    try:
        message = message_of(json.loads(body))
    except (ValueError, RecursionError):
        message = body[:200].decode("utf-8", "replace")
    if 400 <= status < 500 and status not in (408, 429):
        raise GenerationFailed(f"the model's server refuses the request ({status}): {message}")
    raise Lost(f"status {status}: {message}")
