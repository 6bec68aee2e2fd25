"""Where the block ends that a gap is in: at its bracket, or at the line that is indented less.

It receives an answer's text piece by piece and returns what belongs to the block. What is a bracket and what is part of
a string or comment, tree-sitter tells. It knows no tokens and no prompts.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from legato.errors import UnsupportedFeature

__all__ = ["LANGUAGES", "Ending", "Indent", "Line", "block"]

LANGUAGES = {
    "c": ("tree_sitter_c", "language"),
    "cpp": ("tree_sitter_cpp", "language"),
    "go": ("tree_sitter_go", "language"),
    "java": ("tree_sitter_java", "language"),
    "javascript": ("tree_sitter_javascript", "language"),
    "python": ("tree_sitter_python", "language"),
    "rust": ("tree_sitter_rust", "language"),
    "typescript": ("tree_sitter_typescript", "language_typescript"),
}
"""The languages whose blocks are known, and where their grammars are."""

_PAIRS = {"(": ")", "[": "]", "{": "}", "${": "}", "string_start": "string_end"}
"""Node kinds of brackets; Python's strings count as such."""
_CONTINUED = re.compile(r"[)\\]}]|(elif|else|except|finally|case)\b")
"""How a line begins that belongs to the statement before it."""
_LINE = re.compile(r"\n([ \t]*)(?:[^\w\s]|\w+(?=\W))")
"""A line, up to the end of its first word."""
_UNDECIDED = re.compile(r"(?:\r?\n\s*\w*|\r)$")
_MAX_BEFORE = 32768
"""Bytes before the gap, and behind it, that are looked at."""


class Ending(Protocol):
    """Decides where a text is over. What it has returned it never takes back."""

    is_over: bool

    def feed(self, text: str) -> str:
        """Return what belongs to the text for certain."""

    def flush(self) -> str:
        """Return what is held at the end of the answer."""


class Line:
    """Ends before the first line end."""

    def __init__(self) -> None:
        self.is_over = False
        self._held = ""

    def feed(self, text: str) -> str:
        """See `Ending.feed`."""
        if self.is_over:
            return ""
        line, newline, _ = (self._held + text).partition("\n")
        self.is_over = bool(newline)
        self._held = "\r" if line.endswith("\r") and not newline else ""
        return line[:-1] if line.endswith("\r") else line

    def flush(self) -> str:
        """See `Ending.flush`."""
        held, self._held = self._held, ""
        return held


class _Held:
    """An ending that is decided with the first word of a line: the line end before it is held until then."""

    def __init__(self) -> None:
        self.is_over = False
        self._text = ""
        self._num_released = 0

    def feed(self, text: str) -> str:
        """See `Ending.feed`."""
        if self.is_over or not text:
            return ""
        self._text += text
        end = self._end(len(self._text) - len(text))
        if end is None:
            held = _UNDECIDED.search(self._text, self._num_released)
            end = held.start() if held else len(self._text)
        else:
            self.is_over = True
        released = self._text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return released

    def flush(self) -> str:
        """See `Ending.flush`."""
        if self.is_over:
            return ""
        num, self._text = len(self._text), f"{self._text}\n"
        end = self._end(num)
        self.is_over = end is not None
        return self._text[self._num_released : num if end is None else end]

    def _end(self, fed: int) -> int | None:
        """Return where the text is over, at or behind what was released; None: nowhere yet.

        `fed` is how much of it was looked at before.
        """
        raise NotImplementedError

    def _line_starts(self, fed: int) -> Iterator[tuple[int, int]]:
        """Yield where the lines begin whose first word was not there before, and how wide their indents are."""
        for match in _LINE.finditer(self._text):
            if match.end() >= fed:
                yield match.start() + 1, len(match[1].expandtabs(4))


class Indent(_Held):
    """Ends before the first line that is indented by less than `width` columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def _end(self, fed: int) -> int | None:
        for at, width in self._line_starts(fed):
            if width < self._width:
                return len(self._text[:at].rstrip())
        return None


class _Indented(_Held):
    """Python's: ends before the line that is indented less than the one the gap is in."""

    def __init__(self, grammar: _Grammar, before: str) -> None:
        super().__init__()
        self._grammar = grammar
        self._before = before
        line = before[before.rfind("\n") + 1 :]
        self._width = len(line[: len(line) - len(line.lstrip())].expandtabs(4))
        self._has_begun = bool(line.strip())
        head = before.rstrip()
        if not self._has_begun and head.endswith(":"):
            above = head[head.rfind("\n") + 1 :]
            self._width = max(self._width, len(above) - len(above.lstrip()) + 1)

    def _end(self, fed: int) -> int | None:
        for at, width in self._line_starts(fed):
            text = self._text[:at]
            is_next = width == self._width == 0 and not _CONTINUED.match(self._text[at:])
            has_begun = self._has_begun or bool(text.strip())
            if (width < self._width or (is_next and has_begun)) and not self._is_inside(text):
                return len(text.rstrip())
        return None

    def _is_inside(self, text: str) -> bool:
        """Whether a line behind `text` begins in a bracket or a string."""
        root = self._grammar.parse(f"{self._before}{text}_".encode())
        return bool(self._grammar.brackets(root).open)


class _Braced(_Held):
    """Ends at the brace that closes the block the gap is in: before it, if the suffix has it, else behind it.

    Outside of all braces, it ends with the statement that the gap is in.
    """

    def __init__(self, grammar: _Grammar, before: str, suffix: str) -> None:
        super().__init__()
        self._grammar = grammar
        self._before = before.encode()
        braces = [at for at, kind in self._brackets(self._before).open if kind == "{"]
        self._brace = braces[-1] if braces else None
        closed = self._brackets(suffix.encode()[:_MAX_BEFORE]).closed
        self._is_closed = sum(kind == "}" for _, kind in closed) >= len(braces)

    def _brackets(self, data: bytes) -> _Brackets:
        return self._grammar.brackets(self._grammar.parse(data))

    def _end(self, fed: int) -> int | None:
        new = self._text[max(0, fed - 1) :]
        if "}" not in new and "\n" not in new:
            return None
        data = self._text.encode()
        brackets = self._brackets(self._before + data)
        if self._brace is None:
            return self._statement_end(brackets, data)
        at = next((closed for opened, closed in brackets.pairs if opened == self._brace), -1) - len(self._before)
        if at < 0:
            return None
        body = data[:at].decode()
        if not self._is_closed:
            return len(body) + 1
        told = body.rstrip()
        return len(told) if "\n" in body[len(told) :] else len(body)

    def _statement_end(self, brackets: _Brackets, data: bytes) -> int | None:
        """Return the first line end outside of all brackets behind a brace or a semicolon."""
        end = brackets.open[0][0] - len(self._before) if brackets.open else len(data)
        for match in re.finditer(rb"[};][ \t]*\r?\n", data[: max(0, end)]):
            at = len(self._before) + match.start()
            if not any(opened < at < closed for opened, closed in brackets.pairs):
                return len(data[: match.start() + 1].decode())
        return None


def block(language: str, before: str, suffix: str) -> Ending:
    """Return what ends an answer with the block that the gap between `before` and `suffix` is in.

    Raises:
        UnsupportedFeature: the language's grammar is not installed.
    """
    before = before.encode()[-_MAX_BEFORE:].decode(errors="ignore")
    grammar = _grammar(language)
    return _Indented(grammar, before) if language == "python" else _Braced(grammar, before, suffix)


@dataclass(frozen=True, slots=True)
class _Brackets:
    """The brackets of a text, which are in no string and no comment, each with the byte where it begins."""

    pairs: list[tuple[int, int]]
    open: list[tuple[int, str]]
    """Those that are never closed."""
    closed: list[tuple[int, str]]
    """Those that were never opened."""


class _Grammar:
    """A language's parser."""

    def __init__(self, tree_sitter: Any, language: Any) -> None:
        self._tree_sitter = tree_sitter
        self._parser = tree_sitter.Parser(language)
        kinds = sorted({*_PAIRS, *_PAIRS.values()})
        patterns = [json.dumps(kind) for kind in kinds if language.id_for_node_kind(kind, False)]
        patterns += [f"({kind})" for kind in kinds if language.id_for_node_kind(kind, True)]
        self._query = tree_sitter.Query(language, f"[{' '.join(patterns)}] @bracket")

    def parse(self, data: bytes) -> Any:
        """Return the root of a text's tree."""
        return self._parser.parse(data).root_node

    def brackets(self, root: Any) -> _Brackets:
        """Match the brackets of a tree."""
        found = _Brackets([], [], [])
        captures = self._tree_sitter.QueryCursor(self._query).captures(root).get("bracket", [])
        for at, kind in sorted((node.start_byte, node.type) for node in captures if node.end_byte > node.start_byte):
            if kind in _PAIRS:
                found.open.append((at, kind))
            elif found.open and _PAIRS[found.open[-1][1]] == kind:
                found.pairs.append((found.open.pop()[0], at))
            else:
                found.closed.append((at, kind))
        return found


@lru_cache(maxsize=len(LANGUAGES))
def _grammar(language: str) -> _Grammar:
    module, name = LANGUAGES[language]
    try:
        tree_sitter = importlib.import_module("tree_sitter")
        grammar = importlib.import_module(module)
    except ImportError:
        raise UnsupportedFeature(
            "`infill_end` \"block\" needs grammars that are not installed: `pip install 'legato[code]'`",
            param="infill_end",
        ) from None
    return _Grammar(tree_sitter, tree_sitter.Language(getattr(grammar, name)()))
