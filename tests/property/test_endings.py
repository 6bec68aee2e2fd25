"""Where an answer ends does not depend on how it is cut into pieces, and finding it costs as much as it is long."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.text.endings import LANGUAGES, Ending, Indent, Line, block
from tests.scaling import growth

WORDS = [
    "x", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\f", "\n    ", "{", "}", "(", ")", "};", ";", ";\n", "}\n",
    "else", "elif", "exceptional", ":\n",
    '"', '""', "'", "`", "${", "/", "//", "/*", "*/", "#", "\\", "\\\n", 'R"(', 'r#"',
    "'\\''", "'{'", "é", "_", "1",
]  # fmt: skip
PROGRAMS = st.lists(st.sampled_from(WORDS), max_size=24).map("".join)
ENDINGS: dict[str, Callable[[str, str], Ending]] = {
    "line": lambda before, suffix: Line(),
    "indent": lambda before, suffix: Indent(4),
    **{
        language: lambda before, suffix, language=language: block(language, before, suffix)  # type: ignore[misc]
        for language in LANGUAGES
    },
}


def run(ending: Ending, pieces: list[str]) -> tuple[str, bool]:
    """What comes out of an ending that is fed pieces, and whether it has ended them."""
    out = ""
    for piece in pieces:
        out += ending.feed(piece)
    return out + ending.flush(), ending.is_over


@pytest.mark.parametrize("kind", ENDINGS)
@given(before=PROGRAMS, suffix=PROGRAMS, text=PROGRAMS, cuts=st.sets(st.integers(1, 60)))
def test_the_pieces_make_no_difference(kind: str, before: str, suffix: str, text: str, cuts: set[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole, is_over = run(ENDINGS[kind](before, suffix), [text])
    assert run(ENDINGS[kind](before, suffix), pieces) == (whole, is_over)
    assert run(ENDINGS[kind](before, suffix), list(text)) == (whole, is_over)
    assert text == whole if not is_over else text.startswith(whole)


LONG = {
    "code": ["    a", " =", " b", "[1", "]", ";", "\n"],
    "braces": ["  if", " (x", ")", " {", " f", "();", " }", "\n"],
    "docstring": ['"""', *["a", "\n"] * 40, '"""', "\n    "],
    "one line": ["word", " "],
    "one word": ["word"],
    "one number": ["1"],
    "blanks": ["\n", "  "],
    "quotes": ['"'],
    "slashes": ["/ "],
}


@pytest.mark.alone
@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("kind", ENDINGS)
def test_four_times_the_text_takes_four_times_as_long(kind: str, text: str) -> None:
    def feed(num: int) -> None:
        ending = ENDINGS[kind]("f(x) {\n    ", "\n")
        for piece in (LONG[text] * num)[:num]:
            ending.feed(piece)

    assert growth(feed, 1000) < 10
