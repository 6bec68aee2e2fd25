"""Where a block, a line or an indented part ends, whatever the text is cut into."""

from __future__ import annotations

import pytest

from legato.text.endings import LANGUAGES, Ending, Indent, Line, block


def run(ending: Ending, text: str, size: int) -> str:
    """Feed a text in parts of `size` characters; return what came out."""
    out = ""
    for at in range(0, len(text), size):
        out += ending.feed(text[at : at + size])
        if ending.is_over:
            return out
    return out + ending.flush()


C = 'if (x) {\n    y("}");\n  }\n  return 1;'
BLOCKS = [
    ("python", "def f(x):\n    y = 1\n    ", "\n\ndef g(): pass", "return [\n1,\n]\n\n    # c", "\n\ndef h():"),
    ("python", "def f(", "\n", 'x):\n    return """\nabc\n"""', "\n\n\nclass A: pass"),
    ("python", "if x:\n    ", "\n", "b = 2", "\nelse:\n    c()"),
    ("python", "if x:\n    a()\n", "\n", "b()", "\nprint(1)"),
    ("python", "if x:", "\n", "\n    b()\nelse:\n    c()", "\nprint(1)"),
    ("python", "a = [", "\n", "1,\n2,\n]", "\nb = 3"),
    ("c", "int f(int x) {\n  ", "\n}\n", C, "\n}\n\nint g() {"),
    ("c", "int f(int x) {\n  ", "\n", f"{C}\n}}", "\n\nint g() {"),
    ("c", "int f(", "\n", f"int x) {{\n  {C}\n}}", "\n\nint g() {"),
    ("c", "int ", "", "a = 1;", "\nint b;\n"),
    ("c", "int ", "", "f(int a) { // x;\n  return g(1,\n a); }", "  \n\nint b;\n"),
    ("c", "char *", "", 'a = ";\\\n;";', "\nint b;"),
    ("c", "#define M(x) do { \\\n  ", "", "f(x); \\\n}", " while (0)\nint b;"),
    ("c", "#define M(x) if (x) { \\\n  ", "", "f(x);", "\nint b;"),
    ("c", "int f() {\n#define M(x) if (x) {\n  ", "", "f(x);\n}", "\nint b;"),
    ("javascript", "const s = ", "", "`a;\n${b};\n`;", "\nf();\n"),
    ("javascript", "const f = (a) => {\n  return `x ${", "\n", "a}`;\n}", ";\nf()\n"),
    *((language, "f() {\n", "\n}\n", "a();", "\n}\nb();") for language in ("go", "java", "rust", "typescript", "cpp")),
]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("language", "before", "suffix", "shown", "rest"), BLOCKS)
def test_a_block_ends_where_its_language_says(
    language: str, before: str, suffix: str, shown: str, rest: str, size: int
) -> None:
    assert run(block(language, before, suffix), shown + rest, size) == shown


def test_what_is_over_stays_over() -> None:
    ending = block("python", "if x:\n    ", "")
    assert ending.feed("a()\nb()\n") == "a()"
    assert ending.is_over
    assert ending.feed("c()") + ending.flush() == ""


def test_much_before_the_gap_is_begun_where_no_string_goes_on() -> None:
    before = '"""It\'s long.\n\n' + "word (\n" * 6000 + '"""\n\n\ndef f():\n    '
    assert run(block("python", before, ""), "return 1\n\n\ndef g():\n", 1) == "return 1"
    for language in LANGUAGES:
        assert not block(language, before, "").is_over


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize(
    ("text", "shown"), [("ab\ncd", "ab"), ("ab\r\ncd", "ab"), ("\nab", ""), ("ab", "ab"), ("a\rb\n", "a\rb")]
)
def test_a_line_ends_before_its_line_end(text: str, shown: str, size: int) -> None:
    assert run(Line(), text, size) == shown


@pytest.mark.parametrize("size", [1, 100])
def test_an_indented_part_ends_before_a_line_that_is_indented_less(size: int) -> None:
    assert run(Indent(4), "x\n\n      y\n  z\n", size) == "x\n\n      y"
    assert run(Indent(4), "x\n\ty\n", size) == "x\n\ty\n"
