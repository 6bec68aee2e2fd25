"""JSON bodies and events: what is refused, and that what is written can be read by anyone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.errors import MalformedBody
from legato.wire import DONE, EVENTS, KEEP_ALIVE, EventReader, encode_event, encode_json, parse_body
from tests.scaling import growth

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)


def nested(levels: int, kinds: str) -> bytes:
    """Return an object with other objects (`o`) and lists (`l`) inside each other, in turn as `kinds` says."""
    value: Any = 1
    for level in range(levels - 1):
        value = {"a": value} if kinds[level % len(kinds)] == "o" else [value]
    return encode_json({"a": value})


def refusal(data: bytes) -> str:
    """Return what is said about a body that is refused."""
    with pytest.raises(MalformedBody) as caught:
        parse_body(data)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b'{"a":"caf\xe9"}', "the body is not UTF-8: byte 9 is 0xe9"),
        (b'{"a":"\xed\xa0\x80"}', "the body is not UTF-8: byte 6 is 0xed"),
        (b"[]", "the body must be a JSON object, got list"),
        (b'"a"', "the body must be a JSON object, got str"),
        (b"null", "the body must be a JSON object, got NoneType"),
        (b'{"a":1,"a":1}', "the body has the key `a` twice in one object"),
        (b'{"b":[{"a":1,"\\u0061":2}]}', "the body has the key `a` twice in one object"),
        (b'{"a":NaN}', "the body has the number NaN; numbers must be finite"),
        (b'{"a":[Infinity]}', "the body has the number Infinity; numbers must be finite"),
        (b'{"a":-Infinity}', "the body has the number -Infinity; numbers must be finite"),
        (b'{"a":1e999}', "the body has the number 1e999; numbers must be finite"),
        (b'{"a":"\\ud83e"}', "the body has half of a surrogate pair, which is no character"),
        (b'{"a":["x\\udd8a"]}', "the body has half of a surrogate pair, which is no character"),
        (b'{"a":"\\udd8a\\ud83e"}', "the body has half of a surrogate pair, which is no character"),
        (b'{"\\ud83e":1}', "the body has half of a surrogate pair, which is no character"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    assert refusal(data) == message


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"\xef\xbb\xbf", 0),
        (b" ", 1),
        (b'{"a":', 5),
        (b"{'a':1}", 1),
        (b'{"a":1}x', 7),
        (b'{"a":"\t"}', 6),
        (b'{"a":01}', 6),
    ],
)
def test_what_is_not_json_is_refused(data: bytes, place: int) -> None:
    """What is wrong is told in the words of Python's reader."""
    message = refusal(data)
    assert message.startswith("the body is not JSON: ")
    assert message.endswith(f" at character {place}")


@pytest.mark.parametrize("kinds", ["o", "l", "ol"])
def test_depth(kinds: str) -> None:
    assert parse_body(nested(64, kinds))
    assert refusal(nested(65, kinds)) == "the body is nested deeper than 64 levels"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_endless_depth(opening: str) -> None:
    assert refusal(opening.encode() * 100_000) == "the body is nested deeper than 64 levels"


def test_long_numbers() -> None:
    assert parse_body(b'{"a":%d}' % 10**4000) == {"a": 10**4000}
    assert refusal(b'{"a":%s}' % (b"9" * 5000)).startswith("the body has a number that is too long: ")
    assert parse_body(b'{"a":0.%s}' % (b"3" * 5000)) == {"a": 1 / 3}


def test_what_is_accepted() -> None:
    assert parse_body(b'\xef\xbb\xbf{"a":1}') == {"a": 1}
    assert parse_body(b' \n{"a":"\\ud83e\\udd8a"}\r\n') == {"a": "🦊"}
    assert parse_body('{"a":"🦊\\u0000\u2028"}'.encode()) == {"a": "🦊\0\u2028"}
    assert parse_body(b'{"a":{"a":{"a":-0.0}},"b":1e-999}') == {"a": {"a": {"a": 0.0}}, "b": 0.0}


def test_line_breaks_are_escaped() -> None:
    text = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci🦊"
    data = encode_json({"text": text})
    assert data == '{"text":"a\\nb\\r\\nc\\u2028d\\u2029e\\u0085f\\u000bg\\fh\\u001ci🦊"}'.encode()
    assert json.loads(data) == {"text": text}


@given(OBJECTS)
def test_what_is_written_is_read_again(value: dict[str, Any]) -> None:
    assert parse_body(encode_json(value)) == value


@given(st.lists(VALUES, max_size=4))
def test_every_frame_survives_a_naive_reader(values: list[Any]) -> None:
    """A reader that splits text at everything that Python takes for a line's end, as httpx does."""
    stream = b"".join([KEEP_ALIVE[EVENTS], *(encode_event(value) for value in values), DONE]).decode()
    lines = [line for line in stream.splitlines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    assert [json.loads(line.removeprefix("data: ")) for line in lines] == values


@given(st.lists(VALUES, max_size=4), st.lists(st.integers(0, 400), max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_events_are_read_however_they_are_cut(values: list[Any], cuts: list[int], end: str) -> None:
    texts = [json.dumps(value, ensure_ascii=False) for value in values]  # Without escapes: others write so.
    stream = "".join(f": a comment{end}{end}data: {text}{end}{end}" for text in texts).encode()
    reader, read, at = EventReader(), list[bytes](), 0
    for cut in [*sorted(cuts), len(stream)]:
        read += reader.feed(stream[at:cut])
        at = max(at, cut)
    assert [event.decode() for event in read] == texts


@pytest.mark.alone
def test_a_line_without_an_end_costs_what_it_is_long_and_is_given_up() -> None:
    def feed(num: int) -> None:
        reader = EventReader()
        for _ in range(num):
            assert reader.feed(b"x" * 4096) == []

    assert growth(feed, 1000) < 10
    for line in (b"x", b"data: x\n"):
        reader = EventReader(max_bytes=64)
        assert reader.feed(b"data: 1\n\n" * 100) == [b"1"] * 100
        with pytest.raises(ValueError, match="more than 64 bytes"):
            reader.feed(line * 65)


def test_a_line_that_is_none_of_an_event_is_refused_by_who_is_strict() -> None:
    lines = b"event: x\nid: 1\r\nretry: 5\n: a comment\ndata: 1\n\n"
    for line in (b"datum: 1\n", b"<html>\n", b"\xffdata: 1\n"):
        assert EventReader().feed(lines + line + lines) == [b"1", b"1"]
        reader = EventReader(is_strict=True)
        assert reader.feed(lines) == [b"1"]
        with pytest.raises(ValueError, match="none of an event"):
            reader.feed(line)


def test_an_unfinished_event_is_none() -> None:
    reader = EventReader()
    assert reader.feed(b"event: x\nid: 4\ndata:1\ndata: 2\n") == []
    assert reader.feed(b"\ndata: {") == [b"1\n2"]
    assert reader.feed(b"") == []
