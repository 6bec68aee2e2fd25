"""How well a text goes on at a cut: the server's own texts, texts that people wrote, and gaps inside a word.

Each suite receives servers and a size and yields measures.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from bench.client import Refused, Server, company
from bench.measure import Measure, Size
from bench.texts import KINDS, PASSAGES

__all__ = ["cut_places", "goes_on", "human", "infill", "seam"]

_HORIZON = 16
"""Characters behind a cut that are compared: of a text that the server wrote,"""
_HUMAN_HORIZON = 6
"""and of one that people wrote,"""
_DENSE_HORIZON = 2
"""in Chinese and Japanese."""
_LEAST_CONTEXT = 120
"""Characters before a cut in a text that people wrote."""
_DENSE = "between Chinese or Japanese characters"
_SOURCES = Path(__file__).parents[1] / "src" / "legato"


def goes_on(text: str, wanted: str) -> bool:
    """Whether a continuation begins as it should, as far as both go; an unfinished character is nobody's."""
    text, wanted = text.rstrip("\ufffd"), wanted.rstrip("\ufffd")
    num = min(len(text), len(wanted))
    return text[:num] == wanted[:num] and (num > 0 or not wanted)


def cut_places(text: str, num: int, *, most: int) -> list[int]:
    """Return character positions of a text, most of them inside words and numbers or at punctuation."""
    rng = random.Random(text)
    places = list(range(1, min(most, len(text))))
    inside = [at for at in places if not text[at].isspace() and not text[at - 1].isspace()]
    some = rng.sample(inside, min(len(inside), num - num // 4))
    rest = [at for at in places if at not in some]
    return sorted(some + rng.sample(rest, min(len(rest), num - len(some))))


def seam(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Each server goes on with its own text, cut at characters, alone and beside 7 other streams."""
    kinds = dict(itertools.islice(KINDS.items(), size.kinds))
    for temperature, others in itertools.product((0.0, 0.8), (0, 7)):
        hits: dict[str, dict[str, list[float]]] = {kind: {server.name: [] for server in servers} for kind in kinds}
        for (kind, prompt), server in itertools.product(kinds.items(), servers):
            whole = server.complete(prompt, size.tokens, temperature=temperature).text.split("\ufffd")[0]
            with company(server, others) if others else nullcontext():
                for at in cut_places(whole, size.cuts, most=len(whole) - _HORIZON):
                    rest = server.complete(prompt + whole[:at], 24, temperature=temperature).text
                    hits[kind][server.name].append(goes_on(rest[:_HORIZON], whole[at : at + _HORIZON]))
        where = f"{f'temperature {temperature:g}' if temperature else 'greedy'}{', beside 7 streams' * bool(others)}"
        if not others:
            for kind in kinds:
                yield Measure("seam", f"{kind}, {where}", "%", hits[kind])
        together = {s.name: [hit for kind in kinds for hit in hits[kind][s.name]] for s in servers}
        yield Measure("seam", f"all, {where}", "%", together)


def _place(before: str, after: str) -> str | None:
    """Name the place between two characters."""
    if "\u3040" <= before <= "\u9fff" and after.isalpha():
        return _DENSE
    if before.isalpha():
        return "inside a word" if after.isalpha() else "at a word's end"
    return "after a space" if before == " " and after.isalpha() else None


def human(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """The next characters of texts that people wrote, greedy, healed and with `seam: "none"`."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for text in itertools.chain.from_iterable(PASSAGES.values()):
        for at in range(min(_LEAST_CONTEXT, len(text) // 3), len(text) - _HUMAN_HORIZON):
            if place := _place(text[at - 1], text[at]):
                num = _DENSE_HORIZON if place == _DENSE else _HUMAN_HORIZON
                found[place].append((text[:at], text[at : at + num]))
    able = [server for server in servers if server.supports("seam", "none")]
    for place, cuts in found.items():
        cuts = sorted(random.Random(place).sample(cuts, min(size.positions, len(cuts))))
        hits: dict[str, list[float]] = {server.name: [] for server in servers}
        plain: dict[str, list[float]] = {server.name: [] for server in able}
        for prompt, wanted in cuts:
            for server in servers:
                hits[server.name].append(server.complete(prompt, 8).text.startswith(wanted))
            for server in able:
                plain[server.name].append(server.complete(prompt, 8, seam="none").text.startswith(wanted))
        yield Measure("human", place, "%", hits)
        yield Measure("human", f'{place}, `seam: "none"`', "%", plain)
        more = {name: [ours - theirs for ours, theirs in zip(hits[name], plain[name], strict=True)] for name in plain}
        yield Measure("human", f'{place}, healed minus `seam: "none"`', "points", more)


def infill(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """The rest of a line of Legato's own sources, cut inside a word: by `suffix`, and by raw markers in the prompt."""
    gaps = _gaps(max(4, size.positions // 4))
    raw: dict[str, list[float]] = {server.name: [] for server in servers}
    healed: dict[str, list[float]] = {server.name: [] for server in servers if server.supports("seam", "none")}
    for before, wanted, after in gaps:
        for server in servers:
            markers = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
            raw[server.name].append(server.complete(markers, 40, stop="\n").text.rstrip() == wanted)
        for server in servers:
            if server.name in healed:
                try:
                    text = server.complete(before, 40, stop="\n", suffix=after).text
                except Refused:  # The model has no infill tokens.
                    return
                healed[server.name].append(text.rstrip() == wanted)
    yield Measure("infill", "the rest of a line, cut inside a word, `suffix`", "%", healed)
    yield Measure("infill", "the rest of a line, cut inside a word, raw markers", "%", raw)


def _gaps(num: int) -> list[tuple[str, str, str]]:
    """Return what stands before a gap inside a word of a line of code, the rest of the line, and what follows."""
    rng = random.Random(29)
    files = sorted(_SOURCES.rglob("*.py"))
    gaps: list[tuple[str, str, str]] = []
    while len(gaps) < num:
        lines = rng.choice(files).read_text("utf-8").split("\n")
        if len(lines) < 40:
            continue
        index = rng.randrange(15, len(lines) - 12)
        line = lines[index]
        places = [at for at in range(3, len(line) - 5) if line[at - 2 : at + 2].isalpha()]
        if len(line.strip()) >= 20 and places and line.strip()[0] not in "\"'#":
            at = rng.choice(places)
            before = "\n".join([*lines[max(0, index - 25) : index], line[:at]])
            gaps.append((before, line[at:].rstrip(), "\n" + "\n".join(lines[index + 1 : index + 11])))
    return gaps
