"""From a gap in a text to what a model reads: which parts, in which order, cut to what fits.

It receives an `Infill` and returns what fits of it and, with the model's `InfillTokens`, a `Layout`, whose text
`prompting` cuts at the seam. It knows no engine and no wire format.

The text right before the cursor stands at the end of the prompt, behind the last marker, so that the answer joins it at
the seam like any other: the line that the cursor is in, and some before it. Typing then changes only the end of the
prompt, and all before it stays in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from legato.prompting.profiles import InfillTokens
from legato.types import File, Infill

__all__ = ["Layout", "fit", "lay_out"]

_PROJECT, _FILE = "project", "file"
"""What a repository and a file are called whose names nobody told."""
_MARKERS = 16
"""Tokens that are set aside for the markers, and for what stands around each file."""
_SUFFIX_SHARE = 4
"""Of what fits, the suffix gets one part in so many; what it does not need goes to the prefix, and back."""
_LONG = 16
"""A text of more characters per token than this is not tokenised as a whole: it would not fit."""
_BLOCK_LINES = 8
"""What is behind the last marker begins at a line that is a multiple of this: so it stays while lines are added."""
_CUT_LINES = 4 * _BLOCK_LINES
"""A prefix that is cut begins at a line that is a multiple of this, for the same reason."""

Encode = Callable[[str], list[int]]
"""Tokenises plain text."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt up to the text that is continued."""

    scaffold: tuple[int, ...]
    text: str
    """The end of the prefix, and what is in the gap already."""


def lay_out(infill: Infill, marks: InfillTokens, encode: Encode, *, heals: bool) -> Layout:
    """Lay out files, prefix and suffix around the markers.

    Args:
        infill: the gap.
        marks: the model's infill tokens.
        encode: its tokenizer, for plain text.
        heals: whether the end of the prefix may be moved behind the last marker.
    """
    head, tail = infill.prefix, infill.middle
    if marks.suffix_first:
        head, tail = "", head + tail
    elif heals:
        at = _anchor(head)
        head, tail = head[:at], head[at:] + tail
    ids = [*_files(infill.files, marks, encode)]
    if marks.middle is None:
        ids += [marks.suffix, *encode(infill.suffix), marks.prefix]
    elif marks.suffix_first:
        ids += [marks.prefix, marks.suffix, *encode(infill.suffix), marks.middle]
    else:
        ids += [marks.prefix, *encode(head), marks.suffix, *encode(infill.suffix), marks.middle]
    return Layout(tuple(ids), tail)


def _anchor(text: str) -> int:
    """Return where the block of lines begins that the end of a text is in; its line, if it is in the first block."""
    num = text.count("\n")
    return sum(map(len, _lines(text)[: num // _BLOCK_LINES * _BLOCK_LINES or num]))


def _files(files: Sequence[File], marks: InfillTokens, encode: Encode) -> Iterator[int]:
    """Lay out other files as a repository, or, where the model knows none, as plain text before the prefix."""
    if not files:
        return
    if marks.file is None:
        yield from encode("".join(f"{file.name}\n{file.text}\n\n" for file in files))
        return
    if marks.repo is not None:
        yield marks.repo
        yield from encode(f"{_PROJECT}{marks.repo_end}")
    for file in files:
        yield marks.file
        yield from encode(f"{file.name}\n{file.text}\n")
    yield marks.file
    yield from encode(f"{_FILE}\n")


# ---------------------------------------------------------------------------------------------------------------------
# What fits


def fit(infill: Infill, encode: Encode, *, room: int) -> tuple[Infill, tuple[tuple[str, int], ...]]:
    """Cut what has no room: of files, those that stand first; of prefix and suffix, the lines far from the gap.

    Args:
        infill: the gap.
        encode: the model's tokenizer, for plain text.
        room: the most tokens that all may have together.

    Returns the rest, and what was left out: characters of `prefix` and of `suffix`, number of `files`.
    """

    def count(text: str) -> int:
        return len(encode(text))

    room = max(0, room - _MARKERS - count(infill.middle))
    prefix, suffix = _fit(infill.prefix, infill.suffix, count, room)
    room -= count(prefix) + count(suffix)
    files: list[File] = []
    for file in reversed(infill.files):  # The last one stands next to the prefix: it is the first to be kept.
        size = _MARKERS + count(file.name) + count(file.text)
        if size <= room:
            files.insert(0, file)
            room -= size
    cut = (
        ("prefix", len(infill.prefix) - len(prefix)),
        ("suffix", len(infill.suffix) - len(suffix)),
        ("files", len(infill.files) - len(files)),
    )
    fitting = replace(infill, prefix=prefix, suffix=suffix, files=tuple(files))
    return fitting, tuple((name, num) for name, num in cut if num)


def _fit(prefix: str, suffix: str, count: Callable[[str], int], room: int) -> tuple[str, str]:
    """Return as much of both as fits, in whole lines, nearest to the gap."""
    if len(prefix) + len(suffix) <= _LONG * room and count(prefix) + count(suffix) <= room:
        return prefix, suffix
    after = _head(suffix, count, room // _SUFFIX_SHARE)
    before = _tail(prefix, count, room - count(after))
    if before == prefix and after != suffix:
        after = _head(suffix, count, room - count(before))
    return before, after


def _head(text: str, count: Callable[[str], int], room: int) -> str:
    """Return the first lines that fit; of a line that is too long by itself, its beginning."""
    kept = _kept(_lines(text), count, room)
    return "".join(kept) or _part(text, count, room, from_end=False)


def _tail(text: str, count: Callable[[str], int], room: int) -> str:
    """Return the last lines that fit, from a multiple of `_CUT_LINES` on if there is one among them."""
    lines = _lines(text)
    num = len(_kept(reversed(lines), count, room))
    first = len(lines) - num
    block = -(-first // _CUT_LINES) * _CUT_LINES
    if block < len(lines) - num // 2:
        first = block
    return "".join(lines[first:]) or _part(text, count, room, from_end=True)


def _lines(text: str) -> list[str]:
    return re.findall("[^\n]*\n|[^\n]+", text)


def _kept(lines: Iterable[str], count: Callable[[str], int], room: int) -> list[str]:
    kept = []
    for line in lines:
        room -= count(line)
        if room < 0:
            break
        kept.append(line)
    return kept


def _part(text: str, count: Callable[[str], int], room: int, *, from_end: bool) -> str:
    """Return as much as fits of a single line, in whole characters."""
    low, high = 0, min(len(text), room)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[len(text) - middle :] if from_end else text[:middle]) <= room:
            low = middle
        else:
            high = middle - 1
    return text[len(text) - low :] if from_end else text[:low]
