"""The second law, condition by condition: which share of continuations is equal to the uncut text.

`python -m bench.equality` asks servers of both models of the catalogue, one request at a time but for the streams
that some conditions put beside it. The uncut text is written once: alone, at once and without a stream.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click

from bench.client import Server, company, serving
from bench.fidelity import cut_places
from bench.measure import SIZES, Measure, Size
from bench.report import write
from bench.texts import KINDS, PASSAGES

__all__ = ["CONDITIONS", "Condition", "equality"]


@dataclass(frozen=True)
class Condition:
    """A way to write the text that should make no difference."""

    name: str
    rounds: int = 0
    """Requests of equal length that write it from the beginning; 0: the text is cut at characters, and one request
    writes the rest.
    """
    is_streamed: bool = False
    is_cold: bool = False
    """Nothing of the text is in the cache."""
    is_long: bool = False
    """A passage stands before the prompt, so that it is too long to be always read exactly."""
    num_choices: int = 1
    others: int = 0
    """Streams beside it."""
    is_deterministic: bool = False
    """Asked for, of the uncut text as well."""


CONDITIONS = (
    Condition("written again", rounds=1),
    Condition("4 rounds", rounds=4),
    Condition("16 rounds", rounds=16),
    Condition("16 rounds, streamed", rounds=16, is_streamed=True),
    Condition("16 rounds, beside 7 streams", rounds=16, others=7),
    Condition("cut"),
    Condition("cut, streamed", is_streamed=True),
    Condition("cut, cold", is_cold=True),
    Condition("cut, first of `n` = 4", num_choices=4),
    Condition("cut, beside 7 streams", others=7),
    Condition("cut, cold, beside 7 streams", is_cold=True, others=7),
    Condition("long, 16 rounds", is_long=True, rounds=16),
    Condition("long, cut", is_long=True),
    Condition("long, cut, cold", is_long=True, is_cold=True),
    Condition("long, cut, cold, beside 7 streams", is_long=True, is_cold=True, others=7),
    Condition("long, cut, `deterministic`", is_long=True, is_deterministic=True),
    Condition("long, cut, cold, `deterministic`", is_long=True, is_cold=True, is_deterministic=True),
    Condition(
        "long, cut, cold, beside 7 streams, `deterministic`",
        is_long=True,
        is_cold=True,
        others=7,
        is_deterministic=True,
    ),
)


def equality(servers: Sequence[Server], size: Size, conditions: Sequence[Condition] = CONDITIONS) -> Iterator[Measure]:
    """Compare each server's continuations with its own uncut texts."""
    for condition, temperature in itertools.product(conditions, (0.0, 0.8)):
        samples = {s.name: _equal(s, condition, temperature, size) for s in servers if _can(s, condition)}
        where = f"temperature {temperature:g}" if temperature else "greedy"
        yield Measure("equality", f"{condition.name}, {where}", "%", samples)


def _can(server: Server, condition: Condition) -> bool:
    """Whether a server knows the fields that a condition needs."""
    can_be_cold = not condition.is_cold or server.supports("cache_salt", "any")
    return can_be_cold and (not condition.is_deterministic or server.supports("deterministic", True))


def _equal(server: Server, condition: Condition, temperature: float, size: Size) -> list[float]:
    """Return, for each continuation, whether it is the rest of the uncut text."""
    equal: list[float] = []
    num_tokens = max(16, size.tokens // 2)
    fixed: dict[str, Any] = {"temperature": temperature}
    if condition.is_deterministic:
        fixed["deterministic"] = True
    starts = list(KINDS.values())
    starts = [starts[index * len(starts) // size.kinds] for index in range(size.kinds)]
    for start, passage in zip(starts, itertools.cycle(PASSAGES["English"]), strict=False):
        prompt = f"{passage}\n\n{start}" if condition.is_long else start
        uncut = _uncut(server, prompt, num_tokens, **fixed)
        with company(server, condition.others) if condition.others else nullcontext():
            if condition.rounds:
                text = _in_rounds(server, condition, prompt, len(uncut), num_tokens // condition.rounds, fixed)
                equal.append(text[: len(uncut)] == uncut)
                continue
            for at in cut_places(uncut, size.cuts // 2, most=len(uncut)):
                rest = _write(server, condition, prompt + uncut[:at], num_tokens, fixed)
                equal.append(rest[: len(uncut) - at] == uncut[at:])
    return equal


@cache
def _uncut(server: Server, prompt: str, num_tokens: int, **fixed: Any) -> str:
    """Write a text; bytes that are no character end it, as they cannot be sent back."""
    return server.complete(prompt, num_tokens, **fixed).text.split("\ufffd")[0]


def _in_rounds(
    server: Server, condition: Condition, prompt: str, length: int, num_tokens: int, fixed: dict[str, Any]
) -> str:
    """Write so many characters. A round that ends inside a character gives it up, and the next must be larger."""
    text, size = "", num_tokens
    while len(text) < length and size <= 16 * num_tokens:
        part = _write(server, condition, prompt + text, size, fixed)
        size = num_tokens if part else 2 * size
        text += part
    return text


def _write(server: Server, condition: Condition, prompt: str, max_tokens: int, fixed: dict[str, Any]) -> str:
    salt = {"cache_salt": secrets.token_hex(8)} if condition.is_cold else {}
    ask = server.stream if condition.is_streamed else server.complete
    return ask(prompt, max_tokens, **{**fixed, **salt, "n": condition.num_choices}).text


@click.command()
@click.argument("urls", nargs=-1)
@click.option("--model", "models", multiple=True, help="Model to serve.  [default: both of the catalogue]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-equality"), show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="full", show_default=True)
@click.option("--kinds", type=click.IntRange(1, len(KINDS)), help="Kinds of texts.  [default: as the size says]")
@click.option("--only", multiple=True, type=click.Choice([item.name for item in CONDITIONS]), metavar="CONDITION")
def main(
    urls: tuple[str, ...], models: tuple[str, ...], out: Path, size: str, kinds: int | None, only: tuple[str, ...]
) -> None:
    """Measure the servers at URLS, or serve models to measure."""
    with ExitStack() as served:
        if not urls:
            names = models or ("smollm2-135m", "qwen2.5-coder-0.5b")
            urls = tuple(
                served.enter_context(serving("legato", "serve", "--port", "0", "--model", name))[0] for name in names
            )
        servers = [Server.at(url, url) for url in urls]
        servers = [Server.at(server.model, server.url) for server in servers]
        chosen = replace(SIZES[size], kinds=kinds or SIZES[size].kinds)
        conditions = [item for item in CONDITIONS if not only or item.name in only]
        write(out, servers, chosen, equality(servers, chosen, conditions))


if __name__ == "__main__":
    main()
