"""Which brackets of a program are open, as its text comes.

It receives a program piece by piece and tells of each closing bracket which one it closes. What stands in strings and
comments is no code, and is passed over. Of languages it knows how they write these, and no more.

Each character is looked at once, whatever the pieces are. Where a piece ends in what may become another token with the
next one, such as half a comment's opening, it waits for that one: these are a few characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["LANGUAGES", "Brackets", "Mark"]

_PAIRS = {"(": ")", "[": "]", "{": "}", "${": "}"}
_CONTEXT = 64
"""Characters that are kept to be looked back at."""
_VALUE = re.compile(r"([\w$]+|[\])}\"'`]|\+\+|--|<)\s*\Z")
"""What stands before a slash that begins no regular expression; the last is the opening of a closing tag in JSX."""
_BEFORE_VALUES = frozenset(
    {"await", "case", "delete", "do", "else", "in", "instanceof", "new", "of", "return", "throw", "typeof", "void"}
    | {"yield"}
)


@dataclass(frozen=True, slots=True)
class _Text:
    """Something that is no code: a string, a comment, a regular expression."""

    close: str
    escapes: bool = False
    """Whether a backslash takes the next character along."""
    is_line: bool = False
    """Whether it is over with the line, closed or not."""
    opens: tuple[tuple[str, _Text | None], ...] = ()
    """What can begin inside it, by how it begins; None: code, up to a brace."""
    nests: str = ""
    """How one of its kind begins inside it."""


_LINE_COMMENT = _Text("\n", is_line=True)
_COMMENT = _Text("*/")
_NESTED_COMMENT = _Text("*/", nests="/*")
_COMMENTS = (_LINE_COMMENT, _COMMENT, _NESTED_COMMENT)
_STRING = _Text('"', escapes=True, is_line=True)
_CHARACTER = _Text("'", escapes=True, is_line=True)
_EXPRESSION = _Text("/", escapes=True, is_line=True, opens=(("[", _Text("]", escapes=True, is_line=True)),))
_TEMPLATE = _Text("`", escapes=True, opens=(("${", None),))


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How a language writes what is no code."""

    texts: Mapping[str, _Text]
    """By how they begin."""
    whole: str = "(?!)"
    """Matches tokens that have quotes in them and are over by themselves, and the openings of raw strings."""
    half: str = "/"
    """Matches what may be a part of these, or of a text's opening, at the end of a piece."""
    has_directives: bool = False
    """Whether a line that begins with `#` is a world of its own, in which backslashes join lines."""


_C = {"//": _LINE_COMMENT, "/*": _COMMENT, '"': _STRING, "'": _CHARACTER}
_NUMBER = r"\b\d(?:'?\w|\.)*"
_HALF_C = r"/|\\\r?|\b\d(?:'?\w|\.){0,64}'?"
_DIRECTIVE = "#"
_ECMASCRIPT = _Syntax({**_C, "/": _EXPRESSION, "`": _TEMPLATE})
_SYNTAXES = {
    "c": _Syntax(_C, _NUMBER, _HALF_C, has_directives=True),
    "cpp": _Syntax(
        _C,
        rf'{_NUMBER}|\b(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{{0,16}})\(',
        rf'{_HALF_C}|\b\w{{1,3}}|\b(?:u8|[uUL])?R"[^()\\\s]{{0,16}}',
        has_directives=True,
    ),
    "go": _Syntax({**_C, "`": _Text("`")}),
    "java": _Syntax({**_C, '"""': _Text('"""', escapes=True)}, '""(?!")', '/|"{1,2}'),
    "javascript": _ECMASCRIPT,
    "python": _Syntax(
        {
            "#": _LINE_COMMENT,
            '"': _STRING,
            "'": _CHARACTER,
            '"""': _Text('"""', escapes=True),
            "'''": _Text("'''", escapes=True),
        },
        "\"\"(?!\")|''(?!')",
        "\"{1,2}|'{1,2}",
    ),
    "rust": _Syntax(
        {"//": _LINE_COMMENT, "/*": _NESTED_COMMENT, '"': _Text('"', escapes=True)},
        r"""\b[bc]?r(?P<hashes>\#{0,16})"|'(?:\\[^\n][^'\n]{0,9}|[^\\'\n])'""",
        r"/|\b[bc]?r\#{0,16}|\b[bc]|'(?:\\(?:[^\n][^'\n]{0,9})?|[^\\'\n])?",
    ),
    "typescript": _ECMASCRIPT,
}
LANGUAGES = tuple(_SYNTAXES)
"""The languages that are known."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A closing bracket, or a semicolon, and where it stands: in characters from the beginning of the program."""

    at: int
    token: str
    opened: int | None
    """Where the bracket stands that it closes; None: it closes none."""
    depth: int
    """Brackets that are open behind it."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Something that is open: a bracket, or a text."""

    at: int
    token: str
    text: _Text | None = None


class Brackets:
    """Follows the brackets of one program."""

    def __init__(self, language: str) -> None:
        self._syntax = _SYNTAXES[language]
        self._code = _code_pattern(language)
        self._frames: list[_Frame] = []
        self._buffer = ""
        """What is left to be looked at, and a little before it."""
        self._next = 0
        """Where in it to go on."""
        self._offset = 0
        """Where it begins."""
        self._code_from = 0
        """Where the last comment has ended."""

    @property
    def is_inside(self) -> bool:
        """Whether the end of the program is in a bracket, a string or a comment."""
        return bool(self._frames)

    @property
    def open(self) -> list[tuple[int, str]]:
        """The brackets that are open, the outermost first: where they stand, and what they are."""
        return [(frame.at, frame.token) for frame in self._frames if frame.token in _PAIRS]

    def feed(self, program: str) -> list[Mark]:
        """Return the closing brackets and semicolons that a piece brings."""
        self._buffer += program
        marks: list[Mark] = []
        while match := self._pattern.search(self._buffer, self._next):
            if match.lastgroup == "half":
                self._next = match.start()
                break
            self._next = match.end()
            self._take(match, marks)
        else:
            self._next = len(self._buffer)
        if (num := self._next - _CONTEXT) > 0:
            self._buffer = self._buffer[num:]
            self._next -= num
            self._offset += num
        return marks

    @property
    def _pattern(self) -> re.Pattern[str]:
        text = self._frames[-1].text if self._frames else None
        return self._code if text is None else _text_pattern(text)

    def _take(self, match: re.Match[str], marks: list[Mark]) -> None:
        """Act on a token."""
        token, at = match[0], self._offset + match.start()
        text = self._frames[-1].text if self._frames else None
        if text is not None:
            self._take_in_text(text, token, at)
        elif token in self._syntax.texts and not (token == "/" and self._divides(match.start())):
            self._frames.append(_Frame(at, token, self._syntax.texts[token]))
        elif token in _PAIRS or token == _DIRECTIVE:
            self._frames.append(_Frame(at, token))
        elif token == "\n":
            self._end_line()
        elif token in _PAIRS.values() or token == ";":
            opened = None
            if self._frames and _PAIRS.get(self._frames[-1].token) == token:
                opened = self._frames.pop().at
            marks.append(Mark(at, token, opened, len(self._frames)))
        elif match.lastgroup is not None:  # The opening of a raw string.
            close = f'"{match["hashes"]}' if match.lastgroup == "hashes" else f'){match["delimiter"]}"'
            self._frames.append(_Frame(at, token, _Text(close)))

    def _take_in_text(self, text: _Text, token: str, at: int) -> None:
        if token == text.close or (token == "\n" and text.is_line):
            if text in _COMMENTS:
                self._code_from = at + len(token)
            self._frames.pop()
            if token == "\n":
                self._end_line()
        elif token == text.nests:
            self._frames.append(_Frame(at, token, text))
        elif token in (opens := dict(text.opens)):
            self._frames.append(_Frame(at, token, opens[token]))

    def _end_line(self) -> None:
        """End what is over with the line: texts that go no further, and a directive with all that it has opened."""
        while self._frames and (text := self._frames[-1].text) and text.is_line:
            self._frames.pop()
        for num, frame in enumerate(self._frames):
            if frame.token == _DIRECTIVE and frame.text is None:
                del self._frames[num:]
                break

    def _divides(self, at: int) -> bool:
        """Whether a slash is a division, or ends a tag."""
        value = _VALUE.search(self._buffer, max(0, at - _CONTEXT, self._code_from - self._offset), at)
        return value is not None and value[1] not in _BEFORE_VALUES


def _code_pattern(language: str) -> re.Pattern[str]:
    """Return what matches the tokens of code that matter."""
    syntax = _SYNTAXES[language]
    openings = "|".join(map(re.escape, sorted(syntax.texts, key=len, reverse=True)))
    lines = r"\\\r?\n|[\n#]|" if syntax.has_directives else ""
    return re.compile(rf"(?P<half>(?:{syntax.half})\Z)|{syntax.whole}|{openings}|{lines}[()\[\]{{}};]")


@lru_cache(maxsize=256)
def _text_pattern(text: _Text) -> re.Pattern[str]:
    """Return what matches the tokens of a text that matter."""
    tokens = [text.close, *(token for token, _ in text.opens), *([text.nests] if text.nests else [])]
    halves = [re.escape(token[:num]) for token in tokens for num in range(1, len(token))]
    parts = [*map(re.escape, tokens)]
    if text.escapes:
        halves.append(r"\\\r?")
        parts.insert(0, r"\\(?:\r\n|.)")
    if text.is_line:
        parts.append("\n")
    return re.compile(rf"(?P<half>(?:{'|'.join(halves) or '(?!)'})\Z)|{'|'.join(parts)}", re.DOTALL)
