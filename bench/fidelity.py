"""How well a text goes on at a cut: the server's own texts, texts that people wrote, and gaps inside a word.

Each suite receives servers and a size and yields measures.
"""

from __future__ import annotations

import itertools
import random
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.client import Server, company
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
_CODE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_@({[")
"""What lines begin with that are no comments."""


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


@dataclass(frozen=True)
class _Gap:
    """A gap in a file that people wrote."""

    before: str
    wanted: str
    after: str
    is_inside: bool
    """Whether the gap begins inside a word."""
    is_rest: bool
    """Whether it is the rest of its line."""


def infill(servers: Sequence[Server], size: Size) -> Iterator[Measure]:
    """Gaps in files of four languages, by `suffix` and by raw markers in the prompt: filled as the author did."""
    able = [server for server in servers if server.fills_gaps()]
    gaps = {language: _gaps(files, max(4, size.positions // 4)) for language, files in _languages().items()}
    filled: dict[str, dict[str, list[float]]] = defaultdict(lambda: {server.name: [] for server in able})
    for language, gap in [(language, gap) for language, some in gaps.items() for gap in some]:
        markers = f"<|fim_prefix|>{gap.before}<|fim_suffix|>{gap.after}<|fim_middle|>"
        head = gap.after.strip()[:20]
        for server in able:
            for way, text in (
                ("`suffix`", server.complete(gap.before, 40, stop="\n", suffix=gap.after).text),
                ("raw markers", server.complete(markers, 40, stop="\n").text),
            ):
                is_right = float(text.rstrip() == gap.wanted.rstrip())
                filled[f"all, {way}"][server.name].append(is_right)
                filled[f"{language}, {way}"][server.name].append(is_right)
                where = "the rest of a line" if gap.is_rest else "a part of a line"
                filled[f"{where}, {way}"][server.name].append(is_right)
                if gap.is_inside:
                    filled[f"from inside a word, {way}"][server.name].append(is_right)
                filled[f"the suffix is repeated, {way}"][server.name].append(float(bool(head) and head in text))
    for name in sorted(filled):
        yield Measure("infill", name, "%", filled[name])


def _languages() -> dict[str, list[Path]]:
    """Return files that come with Python and with what the bench needs anyway, by language."""
    packages = {name: Path(str(find_spec(name).origin)).parent for name in ("matplotlib", "numpy")}  # type: ignore[union-attr]
    return {
        "Python": sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")),
        "C": sorted(packages["numpy"].glob("**/*.[ch]")),
        "JavaScript": sorted(packages["matplotlib"].glob("**/*.js")),
        "Cython": sorted(packages["numpy"].glob("**/*.p[yx][xd]")),
    }


def _gaps(files: Sequence[Path], num: int) -> list[_Gap]:
    """Return gaps in lines of code: half to the line's end and half of one to four words, most from inside a word."""
    rng = random.Random(29)
    texts = [path.read_text("utf-8", errors="replace").split("\n") for path in files]
    texts = [lines for lines in texts if len(lines) >= 40]
    gaps: list[_Gap] = []
    while len(gaps) < num:
        lines = rng.choice(texts)
        index = rng.randrange(15, len(lines) - 12)
        line = lines[index].rstrip()
        indent = len(line) - len(line.lstrip())
        if len(line) - indent < 20 or len(line) > 160 or line.lstrip()[0] not in _CODE:
            continue
        start = rng.randrange(indent + 3, len(line) - 6)
        end = len(line) if len(gaps) % 2 else rng.randrange(start + 3, min(start + 24, len(line)) + 1)
        before = "\n".join([*lines[max(0, index - 25) : index], line[:start]])
        after = "\n".join([line[end:], *lines[index + 1 : index + 11]])
        is_inside = line[start - 1].isalnum() and line[start].isalnum()
        gaps.append(_Gap(before, line[start:end], after, is_inside, end == len(line)))
    return gaps
