"""A server as the measures see it: an address that answers OpenAI's completions.

It receives prompts and returns `Answer`s with their times. It knows no measure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx2

from bench.texts import KINDS

__all__ = ["Answer", "Refused", "Server", "alternate", "at_once", "company", "serving"]

T = TypeVar("T")


class Refused(Exception):
    """The server answered with an error."""


@dataclass(frozen=True)
class Answer:
    """A continuation, and how long it took."""

    text: str
    num_tokens: int
    first_s: float
    """Until the first text; of an answer that is not streamed, until its end."""
    total_s: float


@dataclass(frozen=True)
class Server:
    """One model behind one address."""

    name: str
    url: str
    """With the version: `http://127.0.0.1:8080/v1`."""
    model: str
    _client: httpx2.Client = field(repr=False, compare=False)

    @classmethod
    def at(cls, name: str, url: str, *, key: str = "none") -> Server:
        """Reach a server and take the first model that it serves."""
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        limits = httpx2.Limits(max_connections=None)
        client = httpx2.Client(headers={"Authorization": f"Bearer {key}"}, timeout=600, limits=limits)
        return cls(name, base, client.get(f"{base}/models").raise_for_status().json()["data"][0]["id"], client)

    def complete(self, prompt: str, max_tokens: int, *, temperature: float = 0, **fields: Any) -> Answer:
        """Continue a prompt with one answer."""
        start = time.perf_counter()
        answer = self._post(prompt, max_tokens, temperature, fields).json()
        total_s = time.perf_counter() - start
        return Answer(answer["choices"][0]["text"], answer["usage"]["completion_tokens"], total_s, total_s)

    def stream(
        self,
        prompt: str,
        max_tokens: int,
        *,
        temperature: float = 0,
        until: threading.Event | None = None,
        **fields: Any,
    ) -> Answer:
        """Continue a prompt with a stream, left early once `until` is set."""
        body = self._body(prompt, max_tokens, temperature, fields)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        first_s, parts, num_tokens = 0.0, [], 0
        with self._client.stream("POST", f"{self.url}/completions", json=body) as response:
            if response.status_code != 200:
                raise Refused(response.read().decode("utf-8", "replace"))
            for event in _events(response):
                if until is not None and until.is_set():
                    break
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                if event.get("choices") and event["choices"][0]["text"]:
                    first_s = first_s or time.perf_counter() - start
                    parts.append(event["choices"][0]["text"])
        total_s = time.perf_counter() - start
        return Answer("".join(parts), num_tokens, first_s or total_s, total_s)

    def first_text(self, prompt: str, max_tokens: int, **fields: Any) -> float:
        """Return the seconds until the first text of a stream (its end, if it has none), and leave it there."""
        body = self._body(prompt, max_tokens, 0, fields) | {"stream": True}
        start = time.perf_counter()
        with self._client.stream("POST", f"{self.url}/completions", json=body) as response:
            if response.status_code != 200:
                raise Refused(response.read().decode("utf-8", "replace"))
            for event in _events(response):
                if event.get("choices") and event["choices"][0]["text"]:
                    break
        return time.perf_counter() - start

    def fills_gaps(self) -> bool:
        """Whether its model has infill tokens."""
        try:
            self.complete("a", 1, suffix="b")
        except Refused:
            return False
        return True

    def supports(self, name: str, value: object) -> bool:
        """Whether this is a Legato that knows a field, and can do it: it reports or refuses those that it cannot."""
        try:
            headers = self._post("The", 1, 0, {name: value}).headers
        except Refused:
            return False
        return "legato-seed" in headers and name not in headers.get("legato-ignored", "")

    def _post(self, prompt: str, max_tokens: int, temperature: float, fields: dict[str, Any]) -> httpx2.Response:
        body = self._body(prompt, max_tokens, temperature, fields)
        response = self._client.post(f"{self.url}/completions", json=body)
        if response.status_code != 200:
            raise Refused(response.text)
        return response

    def _body(self, prompt: str, max_tokens: int, temperature: float, fields: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": 7}
        return {**body, **fields}


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield a stream's events; lines end at line feeds only."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line[5:])


def alternate(servers: Sequence[Server], num: int, run: Callable[[Server, int], T]) -> dict[str, list[T]]:
    """Run something `num` times on each server, in turn, so that a busy moment of the machine meets all of them."""
    results: dict[str, list[T]] = {server.name: [] for server in servers}
    for turn in range(num):
        for server in servers if turn % 2 else reversed(servers):
            results[server.name].append(run(server, turn))
    return results


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all calls at the same time, each in its thread."""
    results: dict[int, T] = {}

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[index] for index in range(len(calls))]


@contextmanager
def company(server: Server, num: int) -> Iterator[None]:
    """Keep `num` other streams busy on a server."""
    over = threading.Event()
    prompts = list(KINDS.values())

    def write(index: int) -> None:
        while not over.is_set():
            server.stream(f"{index}. {prompts[index % len(prompts)]}", 256, temperature=0.8, until=over)

    threads = [threading.Thread(target=write, args=(index,)) for index in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def serving(*command: str) -> Iterator[tuple[str, int]]:
    """Run a Python module that serves on a free port and says its address in its first line; yield the address, and
    the process.
    """
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if " at http" not in line:
            raise Refused(f"{' '.join(command)} said: {line}{process.stderr.read()}")
        yield line.split(" at ")[1].strip(), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)
