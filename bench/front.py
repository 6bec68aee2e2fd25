"""What a Legato in front of another server costs, and whether answers survive one of two servers behind it.

Each suite receives servers and a size and yields measures.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench.client import Answer, Server, alternate, at_once
from bench.measure import Measure, Size
from bench.texts import KINDS

__all__ = ["cost", "killed"]

_PROMPT = "On the first day of the voyage, the crew of the"
_STREAMS = 8
_FIRST_TOKENS = 6
"""First tokens that are timed for each repetition."""


def cost(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Time to the first token, one request after the other, and per token of 8 streams; the same work for all."""
    same: dict[str, Any] = {"seam": "none", "ignore_eos": True}

    def first(server: Server, _: int) -> float:
        return server.stream(_PROMPT, 1, **same).total_s

    def per_token(server: Server, _: int) -> float:
        calls = [partial(server.stream, f"{num}. {_PROMPT}", size.tokens, **same) for num in range(_STREAMS)]
        answers: list[Answer] = at_once(calls)
        return sum((one.total_s - one.first_s) / (one.num_tokens - 1) for one in answers) / _STREAMS

    for server in servers:
        server.stream(_PROMPT, 1, **same)  # Into the cache.
    yield Measure("cost", "first token", "s", alternate(servers, _FIRST_TOKENS * size.repeats, first))
    yield Measure("cost", f"per token, {_STREAMS} streams", "s", alternate(servers, size.repeats, per_token))


def killed(server: Server, kill: Callable[[], None], size: Size) -> Iterator[Measure]:
    """Kill one of two servers behind another one under 8 streams: which share of texts is what it would have been."""
    prompts = list(itertools.islice(KINDS.values(), _STREAMS))
    for temperature in (0.0, 0.8):
        calls = [partial(server.stream, prompt, size.tokens, temperature=temperature) for prompt in prompts]
        start = time.perf_counter()
        whole = at_once(calls)
        if temperature:
            threading.Timer((time.perf_counter() - start) / 2, kill).start()
        again = at_once(calls)
        hits = [float(one.text == other.text) for one, other in zip(whole, again, strict=True)]
        name = "one of two servers killed, sampled" if temperature else "written again, greedy"
        yield Measure("killed", f"{name}: the same text", "%", {server.name: hits})
