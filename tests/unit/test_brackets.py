"""Which brackets are code, in each language, whatever the program is cut into."""

from __future__ import annotations

import io
import sysconfig
import tokenize
from pathlib import Path

import pytest

from legato.text.brackets import LANGUAGES, Brackets, Mark

PROGRAMS = [
    ("c", "f(a[1]); // )\n/* } */ {", "{"),
    ("c", "char *s = \"}\\\"}\"; char c = '}', d = '\\'', e = '\"'; (", "("),
    ("c", '#define OPEN(x) { /* }\n} */ "/*" \\\n {\n(', "("),
    ("c", "#if defined(X) // {\n(", "("),
    ("c", '#define A "\n#define OPEN(x) {', "{"),
    ("c", "int n = 1'000'000; {", "{"),
    ("c", "#error don't\n{", "{"),
    ("c", 's = "not closed }\n{', "{"),
    ("c", 's = "a\\\n}"; {', "{"),
    ("c", "x = a / b; {", "{"),
    ("cpp", 'auto s = R"(})" u8R"--()")" }")--"; {', "{"),
    ("cpp", 'auto s = R"""(}")""";{', "{"),
    ("cpp", "FOR\"}\" OR'}' 0xF'F {", "{"),
    ("go", "s := `a\\` + \"}\" + `\n}`; r := '}'; {", "{"),
    ("java", 's = """\n  "}" ""\n  \\""" } """; t = ""; {', "{"),
    ("javascript", "s = `a${f({b: `}`})}}`; {", "{"),
    ("javascript", "s = `${", "${"),
    ("javascript", "x = a / 2; y = (b) / 2; z = c[1] / i++ / 2; {", "{"),
    ("javascript", "x = /[/}]{/g; y = /\\//.test(`/`); return /}/ {", "{"),
    ("javascript", "// it (\n  /}/.test(a) {", "{"),
    ("javascript", "x = /* ( */ a /* b */ ; 'it\\'s }'; {", "{"),
    ("javascript", "<p>it's</p>\n<b>x</b> {", "{"),
    ("python", "f(\"}\", '}') # }\n{", "{"),
    ("python", '\'\'\'\n}\'\'\' """it\'s " "" \\""" }""" + "" + \'\' (', "("),
    ("python", 's = "not closed }\n(', "("),
    ("rust", "fn f<'a>(x: &'a str) -> char ['}' '\\'' '\\u{7d}' b'}']{", "{"),
    ("rust", 'r"\\" r#"}"# br##"}"#}"## r#type "\n}\\"}" {', "{"),
    ("rust", "/* } /* } */ } */ {", "{"),
    ("typescript", "type A = Array<{a: 1}>; // }\n{", "{"),
]


def opened(language: str, program: str, size: int) -> tuple[list[tuple[int, str]], list[Mark]]:
    """What is open behind a program that is fed in parts of so many characters, and what it has closed."""
    brackets = Brackets(language)
    marks = [mark for at in range(0, len(program), size) for mark in brackets.feed(program[at : at + size])]
    return brackets.open, marks


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(("language", "program", "last"), PROGRAMS)
def test_strings_and_comments_are_no_code(language: str, program: str, last: str, size: int) -> None:
    """Each program ends with its only bracket that is open."""
    found, marks = opened(language, program, size)
    assert found == [(len(program) - len(last), last)]
    assert marks == opened(language, program, 1000)[1]


def test_a_closing_bracket_knows_its_opening_one() -> None:
    assert opened("c", "a(b[0]; ) }", 1)[1] == [
        Mark(5, "]", 3, 1),
        Mark(6, ";", None, 1),
        Mark(8, ")", 1, 0),
        Mark(10, "}", None, 0),
    ]
    assert opened("c", "( [ ) ]", 1) == ([(0, "(")], [Mark(4, ")", None, 2), Mark(6, "]", 2, 1)])


def test_the_end_may_be_in_a_string_or_a_comment() -> None:
    for language, program in (("python", 'x = """\na'), ("c", "/* a"), ("go", "`"), ("rust", 'r#"a"'), ("c", "(")):
        brackets = Brackets(language)
        brackets.feed(program)
        assert brackets.is_inside, program
    for language in LANGUAGES:
        brackets = Brackets(language)
        brackets.feed("f(a);\n")
        assert not brackets.is_inside


def test_python_is_read_as_python_reads_it() -> None:
    """Over modules of its library, but those with brackets in f-strings, which are strings here."""
    library = Path(sysconfig.get_path("stdlib"))
    num = 0
    for path in sorted(library.glob("*.py")):
        program = path.read_text("utf-8")
        if 'f"' in program or "f'" in program or len(program) > 50_000:
            continue
        starts = [0]
        for line in program.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tokens = tokenize.generate_tokens(io.StringIO(program).readline)
        closing = [
            starts[token.start[0] - 1] + token.start[1]
            for token in tokens
            if token.type == tokenize.OP and token.string in ")]};"
        ]
        open, marks = opened("python", program, 4096)
        assert not open, path
        assert [mark.at for mark in marks] == closing, path
        num += 1
    assert num > 40
