"""Servers of a model that send garbage, of every kind and at every place, on real sockets.

Another server goes on with the answer, which is the same text; or, if there is none, the answer ends with an error of
ours. The model behind them is a function of the tokens before, so that every server has the same.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.config import ModelSettings, Settings
from legato.decoding.sampling import Row, log_softmax
from legato.decoding.seam import Seam
from legato.engines.upstream.engine import UpstreamEngine
from legato.engines.upstream.plugin import Chooser, decode_request
from legato.engines.upstream.tokenizer import JsonTokenizer, read_profile
from legato.errors import EngineError
from legato.prompting.render import render
from legato.run.models import Models, load_models
from legato.types import CompletionRequest, Job, Sampling, Step, Text
from tests.conftest import NO_TLS, serve
from tests.tokenizers import write_small_tokenizer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@lru_cache
def folder() -> Path:
    """Where the tokenizer's files are."""
    path = Path(mkdtemp())
    write_small_tokenizer(path)
    return path


@lru_cache
def tokenizer() -> JsonTokenizer:
    return JsonTokenizer(folder())


@lru_cache
def seam() -> Seam:
    return Seam(tokenizer())


# ---------------------------------------------------------------------------------------------------------------------
# A server


def row_behind(ids: Sequence[int]) -> Row:
    """The model: mostly letters, and never an end."""
    data = b",".join(str(id).encode() for id in ids)
    seed = int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
    row = np.random.default_rng(seed).normal(size=len(tokenizer().pieces)).astype(np.float32)
    likely = [id for id, piece in enumerate(tokenizer().pieces) if piece.strip().isalpha() and piece.isascii()]
    row[likely] += 6
    row[-1] = -np.inf
    return row


def write(body: dict[str, Any]) -> Iterator[bytes]:
    """The events that a sound server answers a request with."""
    request = decode_request(body["vllm_xargs"])
    chooser = request and Chooser(*request, tokenizer(), seam(), body["prompt"])
    written: list[int] = []
    for num in range(body["max_tokens"]):
        row = row_behind([*body["prompt"], *written])
        logprobs = log_softmax(row)
        biased = row.copy()
        for id, bias in (body["logit_bias"] or {}).items():
            biased[int(id)] += bias
        written.append(chooser.choose(row, written) if chooser else int(biased.argmax()))
        name = f"token_id:{written[-1]}"
        choice: dict[str, Any] = {
            "index": 0,
            "text": tokenizer().pieces[written[-1]].decode("utf-8", "replace"),
            "token_ids": written[-1:],
            "finish_reason": "length" if num + 1 == body["max_tokens"] else None,
        }
        if body["logprobs"] is not None:
            logprob = max(-9999.0, float(logprobs[written[-1]]))
            choice["logprobs"] = {"tokens": [name], "token_logprobs": [logprob], "top_logprobs": [{name: logprob}]}
        yield event({"choices": [choice]})
    yield event({"choices": [], "usage": {}})
    yield event("[DONE]")


def event(value: Any) -> bytes:
    return b"data: " + (value.encode() if isinstance(value, str) else json.dumps(value).encode()) + b"\n\n"


@dataclass
class Fault:
    """What a server sends that it should not, and when."""

    data: bytes
    at: int
    """So many events, of all its answers, are sent before; 0: not even the head."""
    goes_on: bool = False
    """Whether it sends the rest of its answer behind that, rather than closing the connection."""
    repeats: int = 1
    """Sends the data so often."""
    is_raw: bool = False
    """Whether the data is no part of the body, but of HTTP itself."""


@dataclass
class Server:
    """A server, with a fault or without."""

    fault: Fault | None = None
    num_events: int = 0
    num_requests: int = 0
    _connections: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = field(default_factory=dict)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until one goes wrong."""
        self._connections[writer] = asyncio.current_task()
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(await read_request(reader), writer):
                await writer.drain()
        writer.close()

    async def aclose(self) -> None:
        """End all connections."""
        for writer, task in self._connections.items():
            writer.transport.abort()
            assert task is not None
            await task

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self.num_requests += 1
        if self._is_due(0) and not await self._fail(writer):
            return False
        writer.write(HEAD)
        self.num_events = max(1, self.num_events)
        for part in write(body):
            if self._is_due(self.num_events) and not await self._fail(writer):
                return False
            self.num_events += 1
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await asyncio.sleep(0)
        writer.write(END)
        return True

    def _is_due(self, at: int) -> bool:
        return self.fault is not None and self.fault.at == at == self.num_events

    async def _fail(self, writer: asyncio.StreamWriter) -> bool:
        """Send the fault, and say whether the answer goes on."""
        fault = self.fault
        assert fault is not None
        for _ in range(fault.repeats):
            writer.write(
                fault.data if fault.is_raw or not fault.at else b"%x\r\n%b\r\n" % (len(fault.data), fault.data)
            )
            await writer.drain()
        return fault.goes_on


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    body: dict[str, Any] = json.loads(await reader.readexactly(length))
    return body


@asynccontextmanager
async def listening(*servers: Server) -> AsyncIterator[list[str]]:
    """Run servers, and say where they are."""
    listeners = [await asyncio.start_server(server.connected, "127.0.0.1", 0) for server in servers]
    try:
        yield [f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}" for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()
        for server in servers:
            await server.aclose()


# ---------------------------------------------------------------------------------------------------------------------
# What is asked


def job_for(prompt: str, **fields: Any) -> Job:
    profile = read_profile(folder(), tokenizer(), 0)
    (rendered,) = render(CompletionRequest("m", Text((prompt,))), profile, tokenizer(), seam())
    return Job("a", 0, rendered, 6, Sampling(seed=7, temperature=0.0), **fields)


JOBS = {
    "writing": (job_for("once 1"), False),
    "scoring": (job_for("once 1", logprobs=1), False),
    "conditioning": (job_for("once in th"), False),
    "the plug-in": (job_for("once in th"), True),
}


async def answer(urls: Sequence[str], job: Job, has_plugin: bool) -> tuple[bytes, str | None, EngineError | None]:
    """What an engine in front of some servers writes, how that ends, and the error if it does not."""
    engine = await UpstreamEngine.start(urls, model="m", key="", folder=folder(), has_plugin=has_plugin)
    steps: list[Step] = []
    error = None
    try:
        async with asyncio.timeout(20):
            async for step in engine.generate(job):
                steps.append(step)
    except EngineError as failure:
        error = failure
    finally:
        await engine.aclose()
    assert engine.counters()["running"] == 0
    return b"".join(token.data for step in steps for token in step.tokens), steps[-1].finish if steps else None, error


@lru_cache
def whole(kind: str) -> tuple[bytes, str | None, int]:
    """The answer of a sound server, and how many events it takes."""

    async def ask() -> tuple[bytes, str | None, int]:
        server = Server()
        async with listening(server) as urls:
            data, finish, error = await answer(urls, *JOBS[kind])
        assert error is None
        return data, finish, server.num_events

    return asyncio.run(ask())


# ---------------------------------------------------------------------------------------------------------------------
# Garbage


@pytest.fixture(scope="module", autouse=True)
def _known() -> None:
    """What is right is known before anything runs."""
    for kind in JOBS:
        whole(kind)


def choice(**fields: Any) -> bytes:
    return event({"choices": [{"text": "x", "token_ids": [70], **fields}]})


def scored(**fields: Any) -> bytes:
    return choice(logprobs={"token_logprobs": [-1.0], "top_logprobs": [{"token_id:70": -1.0}], **fields})


NO_CHOICES: list[Any] = [None, {}, "x", 1, [1], [None], [[]], ["x"]]
NO_IDS: list[Any] = ["x", 1, {"0": 1}, ["a"], [1.5], [True], [None], [-1], [10**9], [10**30], [[1]]]
NO_TEXTS: list[Any] = [5, ["a"], {"a": 1}, "\ud800", True]
NO_REASONS: list[Any] = [5, {}, [], True, "error", "abort"]
NO_SCORES: list[Any] = ["x", 5, {"0": 1}, ["a"], [{}], [True], [5.0], [1e300], [10**400], [math.nan], [math.inf]]
NO_TOPS: list[Any] = ["x", 5, [1], ["x"], [[1]], [{"a": "b"}], [{"a": None}], [{"token_id:x": -1}]]
EVENTS = {
    "broken JSON": event('{"choices"'),
    "no JSON": event("<html>"),
    "no data": event(""),
    "only a colon": b"data:\n\n",
    "not UTF-8": b'data: {"choices": [{"text": "\xff\xfe"}]}\n\n',
    "UTF-16": b"data: " + '{"choices": []}'.encode("utf-16") + b"\n\n",
    "nested deep": event("[" * 100_000),
    "objects nested deep": event('{"choices":' * 50_000),
    "NaN": event('{"choices": NaN}'),
    "a number of 5,000 digits": event('{"choices": [{"token_ids": [%s]}]}' % ("9" * 5000)),
    **{f"the value {value}": event(value) for value in ("null", "1", "[]", '"x"', "{}", "true", '{"a": 1}')},
    **{f"choices {value!r}": event({"choices": value}) for value in NO_CHOICES},
    **{f"token_ids {value!r}": choice(token_ids=value) for value in NO_IDS},
    **{f"text {value!r}": choice(text=value) for value in NO_TEXTS},
    **{f"finish_reason {value!r}": choice(finish_reason=value) for value in NO_REASONS},
    **{f"logprobs {value!r}": choice(logprobs=value) for value in ("x", 1, [1], True)},
    **{f"token_logprobs {value!r}"[:40]: scored(token_logprobs=value) for value in NO_SCORES},
    **{f"top_logprobs {value!r}": scored(top_logprobs=value) for value in NO_TOPS},
    **{
        f"a token called {name:.20}": scored(top_logprobs=[{f"token_id:{name}": -1}])
        for name in ("", "-1", "99999", "9" * 30, "9" * 5000, "٣")
    },
    "an error": event({"error": {"message": "out of memory", "code": 500}}),
    "an error as text": event({"error": "out of memory"}),
    "an error of no form": event({"error": [1]}),
    "an error beside choices": event({"error": {"message": "x"}, "choices": []}),
}
BODIES = {
    **{name: Fault(data, 0) for name, data in EVENTS.items()},
    "nothing": Fault(b"", 0),
    "half of an event": Fault(b'data: {"choices": [{"te', 0),
    "an end": Fault(event("[DONE]"), 0),
    "binary": Fault(bytes(range(256)), 0),
    "an endless line": Fault(b"x" * 2**20, 0, repeats=40),
    "an endless event": Fault(b"data: x\n" * 2**17, 0, repeats=40),
    "endless events": Fault(event({"choices": []}) * 100, 0, repeats=40),
    "more than was asked for": Fault(choice(token_ids=[70] * 100), 0, repeats=40),
    "no chunk": Fault(b"zz\r\n", 0, is_raw=True),
    "a chunk of negative size": Fault(b"-1\r\nabc\r\n", 0, is_raw=True),
    "an early end of the body": Fault(END, 0, is_raw=True),
    "another answer": Fault(END + HEAD, 0, is_raw=True),
}
HEADS = {
    "no HTTP": b"garbage\r\n\r\n",
    "binary": bytes(range(256)) * 8,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "status 99": b"HTTP/1.1 99 x\r\n\r\n",
    "status 1000": b"HTTP/1.1 1000 x\r\n\r\n",
    "status 101": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nabc",
    "status 204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "status 302": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n",
    "status 500": b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}",
    "status 503 with garbage": b"HTTP/1.1 503 x\r\n\r\n" + b"[" * 50_000,
    "a page": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<html>",
    "an endless page": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n" + b"<html>" * 10_000,
    "JSON": b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"choices": [{"text": "x"}]}',
    "an empty stream": HEAD + END,
    "a length that is none": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\nab",
    "a length that is too long": b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\nab",
    "half of a head": b"HTTP/1.1 200 OK\r\nconte",
    "gzip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b\x08" + bytes(40),
}
ENDLESS_HEADS = {
    "an endless head": (b"HTTP/1.1 200 OK\r\n", b"x: " + b"y" * 4000 + b"\r\n"),
    "an endless field": (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 4000),
    "endless heads": (b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 100),
}
"""How they begin, and what follows again and again."""


async def check(fault: Fault, kind: str) -> None:
    """Beside a sound server nothing shows; alone, there is an error behind what is right."""
    data, finish, _ = whole(kind)
    broken = Server(fault)
    async with listening(broken, Server()) as urls:
        assert await answer(urls, *JOBS[kind]) == (data, finish, None), fault
    assert broken.num_requests, "it was not asked"
    broken.num_events = 0
    alone = Server(fault)
    async with listening(alone) as urls:
        begun, end, error = await answer(urls, *JOBS[kind])
    assert data.startswith(begun)
    assert (error is None) == (end is not None)
    assert error is None or error.message


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("name", BODIES)
def test_garbage_in_a_body_is_a_lost_server(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Before events of its answers, that is of the seam's requests as well: of each, some are taken, or all of them."""
    num_places: int = request.config.getoption("--places")

    async def everywhere() -> None:
        fault, num_events = BODIES[name], whole(kind)[2]
        cases = [(at, goes_on) for at in range(1, num_events + 1) for goes_on in (False, True)]
        random.Random(name).shuffle(cases)
        for at, goes_on in cases[: 2 if fault.repeats > 1 else num_places]:
            await check(Fault(fault.data, at, goes_on, fault.repeats, fault.is_raw), kind)

    asyncio.run(everywhere())


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("name", HEADS)
def test_garbage_in_place_of_an_answer_is_a_lost_server(name: str, kind: str) -> None:
    asyncio.run(check(Fault(HEADS[name], 0), kind))


@pytest.mark.parametrize("name", ENDLESS_HEADS)
def test_a_head_that_does_not_end_is_a_lost_server(name: str) -> None:
    first, again = ENDLESS_HEADS[name]

    class Endless(Server):
        async def _fail(self, writer: asyncio.StreamWriter) -> bool:
            writer.write(first)
            while True:
                writer.write(again)
                await writer.drain()

    async def ask() -> None:
        async with listening(Endless(Fault(b"", 0)), Server()) as urls:
            assert await answer(urls, *JOBS["writing"]) == (*whole("writing")[:2], None)

    asyncio.run(ask())


class Mutated(Server):
    """A server one byte of whose first answer is another, or the last."""

    def __init__(self, at: int, byte: int | None) -> None:
        super().__init__()
        self._at = at
        self._byte = byte

    async def _answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        self.num_requests += 1
        data = bytearray(HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in write(body)) + END)
        at = self._at % len(data)
        if self._byte is None:
            del data[at:]
        else:
            data[at] = self._byte
        writer.write(data)
        return False


@settings(deadline=None)
@given(at=st.integers(0, 4000), kind=st.sampled_from(sorted(JOBS)))
def test_an_answer_that_is_cut_anywhere_goes_on_elsewhere(at: int, kind: str) -> None:
    async def ask() -> None:
        async with listening(Mutated(at, None), Server()) as urls:
            assert await answer(urls, *JOBS[kind]) == (*whole(kind)[:2], None)

    asyncio.run(ask())


@settings(deadline=None)
@given(at=st.integers(0, 4000), byte=st.integers(0, 255), kind=st.sampled_from(sorted(JOBS)))
def test_whatever_byte_is_another_no_error_but_ours_comes_of_it(at: int, byte: int, kind: str) -> None:
    """A digit of a token's id may be another, and then it is another text."""

    async def ask() -> None:
        async with listening(Mutated(at, byte), Server()) as urls:
            _, finish, error = await answer(urls, *JOBS[kind])
            assert (finish is None) == (error is not None)

    asyncio.run(ask())


# ---------------------------------------------------------------------------------------------------------------------
# In every dialect


@contextmanager
def behind(server: Server) -> Iterator[str]:
    """Run a server in a thread, and say where it is."""
    ready = threading.Event()
    started: list[Any] = []

    async def main() -> None:
        async with listening(server) as urls:
            stop = asyncio.Event()
            started.extend([*urls, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    ready.wait(20)
    url, loop, stop = started
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


CHAT = {"messages": [{"role": "user", "content": "once"}, {"role": "assistant", "content": "1", "prefix": True}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "once 1", "stream": True},
    "/v1/chat/completions": {**CHAT, "stream": True},
    "/v2/chat/completions": {**CHAT, "stream": True},
    "/beta/chat/completions": {**CHAT, "stream": True},
    "/completion": {"prompt": "once 1", "stream": True},
    "/api/generate": {"prompt": "once 1", "raw": True, "stream": True},
}


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("path", ROUTES)
def test_a_stream_ends_with_an_error_of_its_dialect(path: str, at: int) -> None:
    """Before the first token and behind it; nothing is torn, or httpx2 would say so."""

    async def load(url: str) -> Models:
        options = ModelSettings(engine="upstream", urls=(url,), tokenizer=str(folder()), upstream_model="m")
        return await load_models(Settings(models={"front": options}))

    class Broken(Server):
        def _is_due(self, at: int) -> bool:
            return at == fault.at

        async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.num_events = 0
            await super().connected(reader, writer)

    fault = Fault(event('{"choices"'), at)
    with behind(Broken(fault)) as url, serve(lambda: load(url)) as served:
        body = {"model": "front", "max_tokens": 6, **ROUTES[path]}
        response = httpx2.post(served.url + path, json=body, timeout=60, verify=NO_TLS)
        last = response.text.replace("data: [DONE]", "").strip().split("\n")[-1].removeprefix("data: ")
        assert "servers were lost" in json.dumps(json.loads(last)), response.text
        assert response.status_code == 200
