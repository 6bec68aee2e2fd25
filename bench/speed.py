"""How fast: decoding, the first token, many rounds instead of one, drafts, and the server without a model.

Each suite receives servers and a size and yields measures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import load
from bench.client import Answer, Server, alternate, at_once
from bench.measure import Measure, Size
from bench.texts import EDIT_TASK, EDITED, FILE, NOISE_WORDS

__all__ = ["decode", "drafts", "keys", "rounds", "streams", "warm"]

_SAMPLED = {"greedy": 0.0, "temperature 0.8": 0.8}
_fresh = itertools.count(int(time.time()))
"""Numbers that no earlier run of a server has seen: what begins with one is not in its cache."""


def decode(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Tokens per second of some streams together, from the first request to the last token."""

    def run(num: int, temperature: float, server: Server, _: int) -> float:
        prompts = [f"Log {next(_fresh)}. On the first day of the voyage, the crew of the" for _ in range(num)]
        start = time.perf_counter()
        answers = at_once([partial(server.stream, text, size.tokens, temperature=temperature) for text in prompts])
        return sum(answer.num_tokens for answer in answers) / (time.perf_counter() - start)

    for (kind, temperature), num in itertools.product(_SAMPLED.items(), size.streams):
        samples = alternate(servers, size.repeats, partial(run, num, temperature))
        yield Measure("decode", f"{num} stream{'s' * (num > 1)}, {kind}", "tokens/s", samples)


def warm(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Time to the first token of a long prompt: new, known, grown, and of two that share a head and alternate."""
    names = ("cold", "warm", "grown", "two prompts in turn", "one decode step", "warm over a decode step")

    def run(server: Server, turn: int) -> list[float]:
        rng = random.Random(turn)
        head = f"Inventory {next(_fresh)}: {' '.join(rng.choices(NOISE_WORDS, k=size.long_words))}. The next word is"
        cold = server.stream(head, size.tokens)
        known = server.stream(head, size.tokens)
        step_s = (known.total_s - known.first_s) / max(1, known.num_tokens - 1)
        grown = server.stream(f"{head}{known.text} and then", 2)
        in_turn = [server.stream(f"{head} {name}", 2) for name in ("Anna", "Boris", "Anna", "Boris")]
        return [cold.first_s, known.first_s, grown.first_s, in_turn[-1].first_s, step_s, known.first_s / step_s]

    results = alternate(servers, size.repeats, run)
    for index, name in enumerate(names):
        samples = {server: [result[index] for result in some] for server, some in results.items()}
        yield Measure("warm", name, "x" if " over " in name else "s", samples)


def keys(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Time to the first text while somebody types into a file of 400 lines and each request is left for the next."""
    lines = Path(argparse.__file__).read_text("utf-8").split("\n")[200:600]
    names = ("typed, first text", "plain and grown by as much, first text", "one decode step")

    def run(server: Server, turn: int) -> list[tuple[float, float, float]]:
        at = 200 + turn
        while len(lines[at].strip()) < 20:
            at += 1
        head, suffix = "\n".join([*lines[:at], ""]), "\n" + "\n".join(lines[at + 1 :])
        typed = lines[at][: size.keys]
        times = []
        server.stream(head, 1, suffix=suffix)
        server.stream(head, 1)
        for num in range(1, len(typed) + 1):
            gap = server.first_text(head + typed[:num], 64, suffix=suffix)
            plain = server.first_text(head + typed[:num], 64)
            times.append((gap, plain))
        known = server.stream(head + typed, 16)
        step_s = (known.total_s - known.first_s) / max(1, known.num_tokens - 1)
        return [(gap, plain, step_s) for gap, plain in times]

    able = [server for server in servers if server.fills_gaps()]
    results = {
        name: list(itertools.chain.from_iterable(some)) for name, some in alternate(able, size.repeats, run).items()
    }
    for index, name in enumerate(names):
        yield Measure("keys", name, "s", {server: [times[index] for times in some] for server, some in results.items()})
    more = {server: [(gap - plain) / step for gap, plain, step in some] for server, some in results.items()}
    yield Measure("keys", "typed minus plain, over a decode step", "x", more)


def rounds(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Eight requests, each for an eighth of the text and with all that was written before, against one for all."""

    def run(server: Server, _: int) -> tuple[float, float]:
        prompt = f"Diary, page {next(_fresh)}. This morning I walked to the"
        whole = server.stream(prompt, size.tokens)
        start = time.perf_counter()
        text = ""
        for _ in range(8):
            text += server.stream(prompt + text, size.tokens // 8).text
        return (time.perf_counter() - start) / whole.total_s, float(text == whole.text)

    results = alternate(servers, size.repeats, run).items()
    costs = {name: [cost for cost, _ in some] for name, some in results}
    equal = {name: [is_equal for _, is_equal in some] for name, some in results}
    yield Measure("rounds", "8 rounds over one run", "x", costs)
    yield Measure("rounds", "8 rounds, the same text", "%", equal)


def drafts(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Write a file of 60 lines anew with one change, with the old file as `prediction` and without it."""
    prediction = {"type": "content", "content": FILE}
    able = [server for server in servers if server.supports("prediction", prediction)]

    def run(fields: dict[str, Any], server: Server, _: int) -> Answer:
        return server.stream(EDIT_TASK, 5 * size.tokens, stop="```", **fields)

    plain = alternate(servers, size.repeats, partial(run, {}))
    drafted = alternate(able, size.repeats, partial(run, {"prediction": prediction}))
    for name, results in (("plain", plain), ("with the file as `prediction`", drafted)):
        speeds = {server: [answer.num_tokens / answer.total_s for answer in some] for server, some in results.items()}
        yield Measure("drafts", f"copy-edit, {name}", "tokens/s", speeds)
    same = {name: [float(answer.text == plain[name][0].text) for answer in some] for name, some in drafted.items()}
    yield Measure("drafts", "copy-edit, the same text with `prediction`", "%", same)
    right = {name: [float(answer.text == EDITED) for answer in some] for name, some in plain.items()}
    yield Measure("drafts", "copy-edit, as asked", "%", right)


def streams(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Events per second of Legato without a model: the scripted engine on one core, read by many clients."""
    with load.apart() as core, load.on_core(core) as (url, pid, _):
        found = [asyncio.run(load.streams(url, pid, size.clients, 0)) for _ in range(size.repeats)]
    rates = [each.events / each.seconds for each in found]
    yield Measure("streams", f"scripted engine, {size.clients} clients", "events/s", {servers[0].name: rates})
