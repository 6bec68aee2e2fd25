"""Where the block ends that a gap is in: at its bracket, or at the line that is indented less.

It receives an answer's text piece by piece and returns what belongs to the block. It knows no tokens and no prompts.
"""

from __future__ import annotations

import re
from typing import Protocol

from legato.text.brackets import LANGUAGES, Brackets

__all__ = ["LANGUAGES", "Ending", "Indent", "Line", "block"]

_CONTINUED = re.compile(r"[)\]}]|(elif|else|except|finally|case)$")
"""How a line begins that belongs to the statement before it."""
_MAX_WORD = 7
"""A longer word is none of these."""
_PART = re.compile(r"\s+|\w+|[^\s\w]+")
_MAX_AROUND = 32768
"""Characters before the gap, and behind it, that are looked at."""
_APART = re.compile(r"\n\s*\n(?=\w)")
"""What stands before a line in which no string or comment is likely to go on."""


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
    """An ending that may leave out the blanks before it: they are held until it is known what follows."""

    def __init__(self) -> None:
        self.is_over = False
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """See `Ending.feed`."""
        released: list[str] = []
        for part in _PART.findall(text):
            if not self.is_over:
                self._take(part, released)
        return "".join(released)

    def flush(self) -> str:
        """See `Ending.flush`."""
        return "" if self.is_over else self._unheld()

    def _take(self, part: str, released: list[str]) -> None:
        """Add to `released` what belongs to the text for certain, now that a part has come: blanks, letters, or others.

        Where a piece is cut, more of the same may follow.
        """
        raise NotImplementedError

    def _unheld(self) -> str:
        """Return what was held."""
        held = "".join(self._held)
        self._held.clear()
        return held


class Indent(_Held):
    """Ends before the first line that is indented by less than `width` columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self._column: int | None = None
        """How far the line is indented, until its first word has come; None: it has, or there is no line end yet."""
        self._word = ""
        """This word, as far as it has come."""

    def flush(self) -> str:
        """See `Ending.flush`."""
        released: list[str] = []
        self._decide(released)
        return "".join(released) + super().flush()

    def _take(self, part: str, released: list[str]) -> None:
        if part.isspace():
            self._decide(released)
            self._indent(part)
            self._held.append(part)
        elif self._column is None:
            released += self._unheld(), part
        else:
            self._held.append(part)
            is_word = part[0].isalnum() or part[0] == "_"
            self._word = self._word + part if is_word else self._word or part[0]
            if not is_word or len(self._word) > _MAX_WORD:
                self._decide(released)

    def _indent(self, blanks: str) -> None:
        """Take note of blanks: of how far they indent a line."""
        _, newline, behind = blanks.rpartition("\n")
        if newline:
            self._column = 0
        for blank in behind:
            if self._column is not None:
                self._column = {" ": self._column + 1, "\t": self._column // 4 * 4 + 4}.get(blank)

    def _decide(self, released: list[str]) -> None:
        """Act on the first word of a line, if there is one."""
        if self._column is not None and self._word:
            self.is_over = self._ends(self._column, self._word)
            if not self.is_over:
                released.append(self._unheld())
            self._column, self._word = None, ""

    def _ends(self, column: int, word: str) -> bool:
        """Whether the text is over before a line that begins with a word there."""
        return column < self._width


class _Indented(Indent):
    """Python's: ends before the line that is indented less than the one the gap is in."""

    def __init__(self, before: str) -> None:
        line = before[before.rfind("\n") + 1 :]
        width = len(line[: len(line) - len(line.lstrip())].expandtabs(4))
        self._has_begun = bool(line.strip())
        head = before.rstrip()
        if not self._has_begun and head.endswith(":"):
            above = head[head.rfind("\n") + 1 :]
            width = max(width, len(above) - len(above.lstrip()) + 1)
        super().__init__(width)
        self._brackets = Brackets("python")
        self._brackets.feed(before)
        self._is_inside = False
        """Whether the line begins in a bracket or a string."""

    def _take(self, part: str, released: list[str]) -> None:
        if not self._word:
            self._is_inside = self._brackets.is_inside
        super()._take(part, released)
        self._brackets.feed(part)
        self._has_begun = self._has_begun or bool(released)

    def _ends(self, column: int, word: str) -> bool:
        is_next = self._has_begun and column == self._width == 0 and not _CONTINUED.match(word)
        return (column < self._width or is_next) and not self._is_inside


class _Braced(_Held):
    """Ends at the brace that closes the block the gap is in: before it, if the suffix has it, else behind it.

    Outside of all braces, it ends with the statement that the gap is in: at a line end behind a brace or a semicolon.
    """

    def __init__(self, language: str, before: str, suffix: str) -> None:
        super().__init__()
        self._brackets = Brackets(language)
        self._brackets.feed(before)
        self._num_fed = len(before)
        braces = [at for at, token in self._brackets.open if token == "{"]
        self._brace = braces[-1] if braces else None
        closed = Brackets(language).feed(suffix)
        self._is_closed = sum(mark.token == "}" and mark.opened is None for mark in closed) >= len(braces)
        self._may_end = False
        """Whether the statement is over with the line."""

    def flush(self) -> str:
        """See `Ending.flush`."""
        self.is_over = self.is_over or self._may_end
        return super().flush()

    def _take(self, part: str, released: list[str]) -> None:
        begin, marks = self._num_fed, self._brackets.feed(part)
        self._num_fed += len(part)
        if part.isspace():
            self.is_over = "\n" in part and (self._may_end or not self._is_open())
            self._held.append(part)
            return
        at = next((mark.at for mark in marks if mark.opened is not None and mark.opened == self._brace), None)
        if at is not None:
            self.is_over = True
            part = part[: max(0, at - begin) + (not self._is_closed)]
        last = marks[-1] if marks and self._brace is None and part[-1] in "};" else None
        self._may_end = last is not None and last.depth == 0 and last.at == self._num_fed - 1
        if part or not any("\n" in blanks for blanks in self._held):
            released += self._unheld(), part

    def _is_open(self) -> bool:
        """Whether the brace is open; a macro is over with its line, and all in it."""
        return self._brace is None or any(at == self._brace for at, _ in self._brackets.open)


def block(language: str, before: str, suffix: str) -> Ending:
    """Return what ends an answer with the block that the gap between `before` and `suffix` is in."""
    if len(before) > _MAX_AROUND:
        before = before[-_MAX_AROUND:]
        apart = _APART.search(before)
        before = before[apart.end() if apart else 0 :]
    return _Indented(before) if language == "python" else _Braced(language, before, suffix[:_MAX_AROUND])
