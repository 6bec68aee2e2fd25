"""Text assembly: what is held, what is cut, and what never changes with the chunking."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.errors import GenerationFailed
from legato.text.assembler import Assembler, Channels, Heal, Piece, Stop, Utf8
from legato.text.endings import Indent
from legato.types import TextToken, Token
from tests.scaling import growth

MIXED = st.text(alphabet="ab日本語한글🦊é\u200d\r\n <|", max_size=40)


def run_pieces(chunks: list[bytes], *, is_cut: bool = False, **options: object) -> tuple[list[Piece], Assembler]:
    """Feed chunks as tokens; return what comes out, and the assembler."""
    assembler = Assembler(**options)  # type: ignore[arg-type]
    pieces: list[Piece] = []
    for index, chunk in enumerate(chunks):
        pieces += assembler.feed(Token(index, chunk, -0.5))
        if assembler.matched is not None:
            break
    return [*pieces, *assembler.flush(is_cut=is_cut)], assembler


def run(chunks: list[bytes], **options: object) -> tuple[str, list[TextToken], Assembler]:
    """Feed chunks as tokens; return the text, the tokens and the assembler."""
    pieces, assembler = run_pieces(chunks, **options)  # type: ignore[arg-type]
    return "".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens], assembler


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data at places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


@given(MIXED, st.lists(st.integers(0, 200)))
def test_c020_any_split_gives_the_same_text(text: str, cuts: list[int]) -> None:
    assert run(split(text.encode(), cuts))[0] == text


@given(st.binary(max_size=40), st.lists(st.integers(0, 200)))
def test_without_stops_the_text_is_the_bytes_decoded_but_for_an_unfinished_end(data: bytes, cuts: list[int]) -> None:
    text = run(split(data, cuts))[0]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    assert text == decoder.decode(data)
    assert data.decode("utf-8", "replace").startswith(text)


@given(MIXED, st.lists(st.text(alphabet="ab日<| ", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 200)))
def test_c025_stops_do_not_depend_on_chunks_and_never_show(text: str, stops: list[str], cuts: list[int]) -> None:
    whole = run([text.encode()], stops=stops)[0]
    assert run(split(text.encode(), cuts), stops=stops)[0] == whole
    assert run([bytes([byte]) for byte in text.encode()], stops=stops)[0] == whole
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)
    if not any(stop in text for stop in stops):
        assert whole == text


@given(MIXED, st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=2, max_size=2))
def test_c028_the_order_of_stops_does_not_matter(text: str, stops: list[str]) -> None:
    assert run([text.encode()], stops=stops)[0] == run([text.encode()], stops=stops[::-1])[0]


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [(["abcd", "bc"], "xa", "bc"), (["bcd", "abcd"], "x", "abcd"), (["b", "abcd"], "xa", "b"), (["d"], "xabc", "d")],
)
def test_c028_the_stop_that_completes_first_wins_and_then_the_longest(
    stops: list[str], text: str, matched: str
) -> None:
    for order in (stops, stops[::-1]):
        got, _, assembler = run([b"xa", b"bcd", b"e"], stops=order)
        assert (got, assembler.matched) == (text, matched)


@pytest.mark.parametrize("stop", ["<", ".", ".*", "\\n", "&lt;", "[", "(", "a<b && c>d"])
def test_c031_stops_are_literal(stop: str) -> None:
    text = "Write: a<b && c>d .* \\n (x) [y] &lt;"
    expected = text[: text.find(stop)] if stop in text else text
    assert run([text.encode()], stops=[stop])[0] == expected


def test_only_what_may_become_a_stop_is_held() -> None:
    stop = Stop(["</s>"])
    assert stop.feed("ab</") == "ab"
    assert stop.feed("x") == "</x"
    assert stop.feed("<") == ""
    assert stop.flush() == "<"


def test_a_stop_may_begin_before_the_seam_but_not_end_there() -> None:
    assert run([b"``", b"`\nmore"], stops=["```"], before="code `")[0] == ""
    assert run([b"x``"], stops=["```"], before="code ```")[0] == "x``"
    assert run([b"x``"], stops=["```"], before="`")[0] == "x``"


def test_healed_bytes_are_dropped_and_must_be_there() -> None:
    text, _, assembler = run([b" Fr", b"ance", b" is"], heal=b" Fran")
    assert (text, assembler.num_tokens) == ("ce is", 2)
    with pytest.raises(GenerationFailed):
        Heal(b"abc").feed(b"ax")


@given(st.binary(min_size=1, max_size=6), st.lists(st.integers(0, 20)))
def test_healing_counts_every_byte_once(heal: bytes, cuts: list[int]) -> None:
    rest = b"after"
    assert run(split(heal + rest, cuts), heal=heal)[0] == "after"


def test_c021_an_unfinished_character_is_left_out_but_its_bytes_are_told() -> None:
    text, tokens, _ = run([b"a", b"\xf0\x9f", b"\xa6"])
    assert text == "a"
    assert [token.data for token in tokens] == [b"a", b"\xf0\x9f", b"\xa6"]
    assert "".join(token.text for token in tokens) == "a"


def test_a_replacement_character_of_the_model_passes() -> None:
    assert run(["\ufffd".encode()])[0] == "\ufffd"
    utf8 = Utf8()
    assert utf8.feed(b"\xff") == "\ufffd"


@given(MIXED, st.text(alphabet="ab日<", min_size=1, max_size=4), st.lists(st.integers(0, 200)))
def test_c032_tokens_are_cut_with_their_text(text: str, stop: str, cuts: list[int]) -> None:
    chunks = split(text.encode(), cuts)
    shown, tokens, _ = run(chunks, stops=[stop], offset=5)
    assert "".join(token.text for token in tokens) == shown
    at = 5
    for token in tokens:
        assert token.offset == at
        at += len(token.text)


@given(MIXED, st.lists(st.integers(0, 200)), st.integers(0, 8))
def test_a_stop_does_not_complete_in_the_first_tokens(text: str, cuts: list[int], min_tokens: int) -> None:
    chunks = split(text.encode(), cuts)
    num_bytes = sum(map(len, chunks[:min_tokens]))
    early = len(text.encode()[:num_bytes].decode("utf-8", "ignore"))
    ends = [at + 2 for at in range(len(text) - 1) if text[at : at + 2] == "ab" and at + 2 > early]
    shown, _, assembler = run(chunks, stops=["ab"], min_tokens=min_tokens)
    assert shown == (text[: ends[0] - 2] if ends else text)
    assert assembler.matched == ("ab" if ends else None)


def test_a_stop_may_begin_in_the_first_tokens() -> None:
    assert run([b"xab", b"a", b"b", b"c"], stops=["ab"], min_tokens=2)[0] == "xab"
    assert run([b"xab", b"a", b"b", b"c"], stops=["ab"], min_tokens=3)[0] == "xababc"


def test_nothing_counts_after_a_match() -> None:
    assembler = Assembler(stops=["b"])
    assembler.feed(Token(1, b"ab"))
    assert assembler.feed(Token(2, b"c")) == ()
    assert assembler.num_tokens == 1


# ---------------------------------------------------------------------------------------------------------------------
# Thinking

TURN = st.text(alphabet="ab日\n<>/think", max_size=12)
THINK = st.tuples(TURN, TURN).map(lambda parts: f"<think>{parts[0]}</think>{parts[1]}")


def channels(before: str = "", *, is_opened: bool = False) -> Channels:
    """Those of the usual tags."""
    return Channels(b"<think>", b"</think>", is_opened=is_opened, before=before.encode())


def told(chunks: list[bytes], *, is_cut: bool = False, **options: object) -> tuple[str | None, str]:
    """The thinking (None: there is none) and the content of what is fed."""
    pieces, _ = run_pieces(chunks, is_cut=is_cut, **{"channels": channels(), **options})
    thought = [piece.text for piece in pieces if piece.channel == "reasoning"]
    said = [piece.text for piece in pieces if piece.channel == "content"]
    return "".join(thought) if thought else None, "".join(said)


def expected(turn: str) -> tuple[str | None, str]:
    """What a whole turn says, read at leisure."""
    if not turn.startswith("<think>"):
        return None, turn
    thought, _, said = turn.removeprefix("<think>").partition("</think>")
    return thought, said


@given(st.one_of(TURN, THINK), st.lists(st.integers(0, 200)))
def test_any_split_gives_the_same_channels(turn: str, cuts: list[int]) -> None:
    assert told(split(turn.encode(), cuts)) == expected(turn)
    assert told([bytes([byte]) for byte in turn.encode()]) == expected(turn)


@given(THINK, st.integers(0, 200))
def test_what_a_cut_leaves_out_of_a_tag_is_written_again(turn: str, at: int) -> None:
    at %= len(turn) + 1
    thought, said = told([turn[:at].encode()], is_cut=True)
    so_far = said if thought is None else f"<think>{thought}" + (f"</think>{said}" if said else "")
    assert turn.startswith(so_far)
    more, rest = told([turn[len(so_far) :].encode()], channels=channels(so_far))
    assert ((thought or "") + (more or ""), said + rest) == expected(turn)


def test_only_what_may_become_a_tag_is_held() -> None:
    stage = channels()
    assert stage.feed(b"<th") == (b"", b"")
    assert stage.feed(b"ink>a</") == (b"a", b"")
    assert stage.feed(b"b</think>c") == (b"</b", b"c")
    assert stage.feed(b"</think><think>") == (b"", b"</think><think>")
    assert channels().feed(b" <think>") == (b"", b" <think>")
    assert Channels().feed(b"<think>") == (b"", b"<think>")


def test_what_is_held_of_the_prefix_is_not_said_again() -> None:
    assert channels("<thi").feed(b"s>") == (b"", b"s>")
    assert channels("a</thi", is_opened=True).feed(b"s") == (b"s", b"")
    assert channels("a</thi", is_opened=True).feed(b"nk>b") == (b"", b"b")
    assert channels("<think>a").feed(b"b") == (b"b", b"")
    assert channels("<think>a</think>").feed(b"b") == (b"", b"b")


def test_stops_and_scores_are_those_of_content() -> None:
    chunks = [b"<think>", b"a.", b"b</think>", b"c", b".d"]
    pieces, assembler = run_pieces(chunks, channels=channels(), stops=["."])
    assert told(chunks, stops=["."]) == ("a.b", "c")
    assert [token.text for piece in pieces if piece.channel == "content" for token in piece.tokens] == ["c"]
    assert [token.id for piece in pieces for token in piece.tokens] == [0, 1, 2, 3]
    assert (assembler.num_tokens, assembler.num_thought) == (5, 3)


def test_a_token_that_ends_the_thinking_and_begins_the_content_is_scored_as_content() -> None:
    pieces, assembler = run_pieces([b"<think>a", b"b</think>\n\nc"], channels=channels())
    assert [(piece.channel, piece.text, [token.text for token in piece.tokens]) for piece in pieces[:3]] == [
        ("reasoning", "a", [""]),
        ("reasoning", "b", []),
        ("content", "\n\nc", ["\n\nc"]),
    ]
    assert assembler.num_thought == 1


# ---------------------------------------------------------------------------------------------------------------------
# What follows a gap

SUFFIXES = [
    ("x", ")\n", "x)", "", True),  # The closing bracket is the suffix's.
    ("1, 2", ", 3);\nreturn total;\n", "1, 2, 3);", "\nreturn total;", True),
    ("x", "abc(d)\ne", "xabc(d)", "", True),
    ("a = 1", "\n    return a\n", "a = 1\n    return a", "\n", True),
    ("a = 1", "\n\n\ndef f():\n", "a = 1\ndef f():", "", True),
    ("y = f(x)", ")\n", "y = f(x)", "", False),  # It closes what the text has opened.
    (" i", "n range(3):\n", " in", "", True),
    ("", "ort(array):\n", "ort", "", True),
    ("x ", "y\n", "x ", "", False),
    ("a b", " c\n", "a b", "", False),
    ("a\n", "\nb\n", "a\n", "", False),  # A line end alone is no repetition.
    ("}", "\n", "}", "", False),
]


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(("shown", "suffix", "text", "rest", "is_over"), SUFFIXES)
def test_c091_an_infill_does_not_repeat_what_follows(
    shown: str, suffix: str, text: str, rest: str, is_over: bool, size: int
) -> None:
    data = (text + rest).encode()
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    answer, tokens, assembler = run(chunks, suffix=suffix)
    assert answer == shown
    assert assembler.is_over is is_over
    assert "".join(token.text for token in tokens) == shown


@given(st.text("ab(){}\n ,", max_size=30), st.text("ab(){}\n ,", max_size=12), st.lists(st.integers(0, 40)))
def test_c091_an_infill_never_ends_with_three_characters_of_the_suffix(text: str, suffix: str, cuts: list[int]) -> None:
    whole, _, _ = run([text.encode()], suffix=suffix)
    assert text.startswith(whole)
    assert run(split(text.encode(), cuts), suffix=suffix)[0] == whole
    line = suffix.lstrip().partition("\n")[0].rstrip()
    for num in range(3, len(line) + 1):
        is_told = len("".join(line[:num].split())) >= 3
        assert not (is_told and whole.endswith(suffix[: len(suffix) - len(suffix.lstrip())] + line[:num]))


def test_an_answer_that_was_cut_keeps_what_may_be_no_repetition() -> None:
    assert told([b"f(x", b")"], is_cut=True, suffix=")\n")[1] == "f(x)"
    assert told([b"a, ret"], is_cut=True, suffix="return x\n")[1] == "a, "


# ---------------------------------------------------------------------------------------------------------------------
# How much it costs


LONG = {
    "words": [b" word", b" and", b" more", b".\n"],
    "an opening that never comes to an end": [b"</thin", b"<thin"],
    "a beginning of a stop, again and again": [b"STO"],
    "a beginning of the suffix, again and again": [b"\n    retur"],
    "half of a character": [b"\xc3"],
    "nothing but blanks": [b"\n", b"    "],
}


@pytest.mark.alone
@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("is_opened", [False, True])
def test_four_times_the_text_takes_four_times_as_long(text: str, is_opened: bool) -> None:
    def feed(num: int) -> None:
        assembler = Assembler(
            channels=Channels(b"<think>", b"</think>", is_opened=is_opened),
            stops=["STOP", "S" * 256],
            ending=Indent(0),
            suffix="\n    return 1\n",
        )
        for data in (LONG[text] * num)[:num]:
            assembler.feed(Token(0, data))
        assembler.flush()

    assert growth(feed, 1000) < 10
