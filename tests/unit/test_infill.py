"""How gaps are laid out for the known families of models, and what is cut where not all of it fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.prompting.infill import fit, lay_out
from legato.prompting.profiles import InfillTokens, profile_from_metadata
from legato.types import File, Infill

GAP = Infill("import a\ndef f(x):\n    ret", "rn x\n", files=(File("a.py", "A"), File("b.py", "B")))

FAMILIES = {
    "Qwen2.5-Coder": (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>"),
        "<|repo_name|>project\n<|file_sep|>a.py\nA\n<|file_sep|>b.py\nB\n<|file_sep|>file\n"
        "<|fim_prefix|>import a\ndef f(x):\n<|fim_suffix|>rn x\n<|fim_middle|>    ret",
    ),
    "CodeGemma": (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_separator|>"),
        "<|file_separator|>a.py\nA\n<|file_separator|>b.py\nB\n<|file_separator|>file\n"
        "<|fim_prefix|>import a\ndef f(x):\n<|fim_suffix|>rn x\n<|fim_middle|>    ret",
    ),
    "StarCoder2": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<repo_name>", "<file_sep>"),
        "<repo_name>project<file_sep>a.py\nA\n<file_sep>b.py\nB\n<file_sep>file\n"
        "<fim_prefix><fim_suffix>rn x\n<fim_middle>import a\ndef f(x):\n    ret",
    ),
    "Granite Code": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<reponame>", "<filename>"),
        "<reponame>project<filename>a.py\nA\n<filename>b.py\nB\n<filename>file\n"
        "<fim_prefix><fim_suffix>rn x\n<fim_middle>import a\ndef f(x):\n    ret",
    ),
    "Code Llama": (
        ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
        "a.py\nA\n\nb.py\nB\n\n▁<PRE>▁<SUF>rn x\n▁<MID>import a\ndef f(x):\n    ret",
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "a.py\nA\n\nb.py\nB\n\n<｜fim▁begin｜>import a\ndef f(x):\n<｜fim▁hole｜>rn x\n<｜fim▁end｜>    ret",
    ),
    "Codestral": (
        ("[SUFFIX]", "[PREFIX]", "[MIDDLE]"),
        "a.py\nA\n\nb.py\nB\n\n[SUFFIX]rn x\n[PREFIX]import a\ndef f(x):\n    ret",
    ),
}


def encode(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode())


def marks_of(names: tuple[str, ...]) -> InfillTokens:
    """What is read of a vocabulary with these control tokens."""
    pieces = {300 + index: name.encode() for index, name in enumerate(names)}
    marks = profile_from_metadata({}, pieces, 100).infill
    assert marks is not None
    return marks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gets_its_published_form(family: str) -> None:
    names, expected = FAMILIES[family]
    layout = lay_out(GAP, marks_of(names), encode, heals=True)
    text = b"".join(bytes([id]) if id < 256 else names[id - 300].encode() for id in layout.scaffold)
    assert text.decode() + layout.text == expected


def test_ids_that_the_metadata_states_come_before_names() -> None:
    stated = {f"tokenizer.ggml.fim_{key}_token_id": str(id) for key, id in (("pre", 7), ("suf", 8), ("mid", 9))}
    assert profile_from_metadata(stated, {}, 100).infill == InfillTokens(7, 8, 9)
    assert profile_from_metadata({}, {1: b"<|fim_prefix|>"}, 100).infill is None


def test_unhealed_the_whole_prefix_stands_before_the_suffix() -> None:
    layout = lay_out(Infill("a\nb", "c"), InfillTokens(300, 301, 302), encode, heals=False)
    assert layout.scaffold == (300, *b"a\nb", 301, *b"c", 302)
    assert layout.text == ""


@pytest.mark.parametrize(
    ("prefix", "text"),
    [
        ("a\nb", "b"),
        ("a\nb\n", ""),
        ("a\nb\n\n    ", "    "),
        ("a\r\nb", "b"),
        ("ab", "ab"),
        ("", ""),
        ("a\n" * 8 + "b", "b"),
        ("a\n" * 8 + "b\nc\nd", "b\nc\nd"),
        ("a\n" * 15 + "b", "a\n" * 7 + "b"),
        ("a\n" * 16, ""),
    ],
)
def test_typing_changes_only_what_stands_behind_the_markers(prefix: str, text: str) -> None:
    layout = lay_out(Infill(prefix, "c"), InfillTokens(300, 301, 302), encode, heals=True)
    assert layout.text == text
    assert bytes(layout.scaffold[1 : len(prefix) - len(text) + 1]).decode() + text == prefix


LINES = st.lists(st.text("ab é", max_size=12), max_size=40).map("\n".join)


@given(LINES, LINES, st.integers(0, 300))
def test_what_fits_is_whole_lines_nearest_the_gap(prefix: str, suffix: str, room: int) -> None:
    fitting, cut = fit(Infill(prefix, suffix), encode, room=room)
    assert prefix.endswith(fitting.prefix)
    assert suffix.startswith(fitting.suffix)
    assert len(encode(fitting.prefix)) + len(encode(fitting.suffix)) <= room
    told = dict(cut)
    assert told.get("prefix", 0) == len(prefix) - len(fitting.prefix)
    assert told.get("suffix", 0) == len(suffix) - len(fitting.suffix)
    if "prefix" in told and "\n" in fitting.prefix[:-1]:
        assert prefix[: told["prefix"]].endswith("\n")
    if "suffix" in told and "\n" in fitting.suffix:
        assert fitting.suffix.endswith("\n")


def test_a_prefix_that_grows_keeps_its_beginning_for_a_while() -> None:
    lines = [f"line {index}\n" for index in range(400)]
    starts = set()
    for num in range(300, 332):
        fitting, _ = fit(Infill("".join(lines[:num]), ""), encode, room=1500)
        starts.add(fitting.prefix.partition("\n")[0])
    assert len(starts) == 2


def test_files_are_left_out_first_and_the_nearest_stays_longest() -> None:
    files = tuple(File(name, "x" * 50) for name in ("a", "b", "c"))
    fitting, cut = fit(Infill("p" * 40, "s" * 40, files=files), encode, room=260)
    assert [file.name for file in fitting.files] == ["b", "c"]
    assert cut == (("files", 1),)
