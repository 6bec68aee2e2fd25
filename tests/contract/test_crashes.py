"""The worker is killed while it writes: clients see a pause, and the text that they would have had.

By default it dies at 12 moments; `pytest --crashes 50` says how many.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from bench.texts import KINDS
from legato.engines.llamacpp.binding import Vocabulary
from tests.conftest import SMALL, Process, children, serve_process, weights

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
SAMPLED = {"temperature": 0.8}
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """A server in a process of its own."""
    with serve_process("--model", SMALL) as process:
        yield process


def requests() -> list[dict[str, Any]]:
    """Eight streams, each with something that a crash could make it forget."""
    ends = sorted(Vocabulary.load(weights(SMALL)).end_ids)
    wants_to_end: dict[str, Any] = {"logit_bias": {str(id): 100 for id in ends}, "extra_body": {"min_tokens": 12}}
    return [
        {"prompt": KINDS["prose"]},
        {"prompt": KINDS["Python"], **SAMPLED, "logprobs": 2},
        {"prompt": KINDS["German"], **SAMPLED, "frequency_penalty": 0.8, "presence_penalty": 0.4},
        {"prompt": "One, two, three, four,", "stop": [" ten"], "max_tokens": 3 * NUM_TOKENS},
        {"prompt": "The capital of Fran", **wants_to_end},
        {"prompt": KINDS["Chinese"], **SAMPLED, "logprobs": 0},
        {"prompt": KINDS["JSON"], "echo": True, "logprobs": 1},
        {"prompt": "We visited the museum of natural his", **SAMPLED, "frequency_penalty": 0.5, "logprobs": 1},
    ]


class Progress:
    """Counts the events of all streams."""

    def __init__(self) -> None:
        self._num = 0
        self._changed = threading.Condition()

    @property
    def num(self) -> int:
        """Events so far."""
        return self._num

    def advance(self) -> None:
        """Count one more."""
        with self._changed:
            self._num += 1
            self._changed.notify_all()

    def wait(self, num: int) -> None:
        """Wait until there were so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num >= num, timeout=100)


@dataclass
class Answer:
    """All that a client learns from a stream."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)
    num_tokens: int = 0


def follow(client: openai.OpenAI, request: dict[str, Any], progress: Progress) -> Answer:
    """Read a stream to its end."""
    asked = {"temperature": 0, "max_tokens": NUM_TOKENS, "seed": 7, **request}
    answer = Answer()
    stream = client.completions.create(model=SMALL, stream=True, stream_options={"include_usage": True}, **asked)
    for event in stream:
        progress.advance()
        for choice in event.choices:
            answer.text += choice.text
            answer.finish = choice.finish_reason or answer.finish
            if choice.logprobs is not None:
                answer.tokens += choice.logprobs.tokens or []
                answer.scores += choice.logprobs.token_logprobs or []
                answer.top += choice.logprobs.top_logprobs or []
        if event.usage is not None:
            answer.num_tokens = event.usage.completion_tokens
    return answer


def kill(server: Process, number: signal.Signals = signal.SIGKILL) -> None:
    """End the worker."""
    (worker,) = children(server.pid)
    os.kill(worker, number)


def test_streams_end_as_if_the_worker_had_not_been_killed(server: Process, num_crashes: int) -> None:
    rng = random.Random(num_crashes)
    asked = requests()
    before = server.health()["restarts"]
    with server.client() as client, ThreadPoolExecutor(len(asked)) as pool:
        progress = Progress()
        quiet = [follow(client, request, progress) for request in asked]
        assert {answer.finish for answer in quiet} == {"length", "stop"}
        assert 12 <= quiet[4].num_tokens < NUM_TOKENS
        num_events = progress.num
        for number in itertools.islice(itertools.cycle(SIGNALS), num_crashes):
            progress = Progress()
            running = [pool.submit(follow, client, request, progress) for request in asked]
            moment = rng.randrange(num_events * 3 // 4)
            progress.wait(moment)
            time.sleep(rng.uniform(0, 0.02))
            assert not all(stream.done() for stream in running)
            kill(server, number)
            assert [stream.result() for stream in running] == quiet, (number, moment)
            assert server.is_running
    assert server.health()["restarts"] == before + num_crashes


def test_l2_a_text_cut_before_a_crash_goes_on_after_it(server: Process) -> None:
    with server.client() as client:
        for kind, temperature in (("prose", 0.0), ("German", 0.8)):
            start, fixed = KINDS[kind], {"temperature": temperature}
            whole = follow(client, {"prompt": start, **fixed}, Progress()).text
            for at in (1, len(whole) // 2):
                kill(server)
                rest = follow(client, {"prompt": start + whole[:at], **fixed}, Progress()).text
                assert rest.startswith(whole[at:])


def test_a_request_that_kills_the_worker_twice_ends_alone(server: Process) -> None:
    long, other = {"prompt": "It was a", "max_tokens": 1500}, {"prompt": KINDS["German"], **SAMPLED}
    with server.client() as client, ThreadPoolExecutor(2) as pool:
        quiet = follow(client, other, Progress())
        first, second = Progress(), Progress()
        failing = pool.submit(follow, client, long, first)
        first.wait(6)
        kill(server)
        first.wait(first.num + 6)
        surviving = pool.submit(follow, client, other, second)
        second.wait(6)
        kill(server)
        with pytest.raises(openai.APIError, match="died twice") as caught:
            failing.result()
        assert caught.value.code == "generation_failed"
        assert surviving.result() == quiet
        assert server.is_running
