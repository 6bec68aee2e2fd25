"""Our own client: against Legato's mounts of every dialect, and against servers that fail."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel, Field

from legato import AsyncClient, Client
from legato.client.protocol import DIALECTS, ConnectFailed, StatusError, StreamInterrupted
from legato.engines.scripted import Script
from legato.errors import InvalidField, UnsupportedFeature
from legato.types import Job, Tags
from tests.conformance.faulty import Faulty, Refusal, chunk, cut, faulty, forward, sse
from tests.conformance.reading import text_of, user
from tests.conftest import SMALL, Served, serve_script

MOUNTS = {
    "legato": "/v1",
    "maas": "/v2",
    "moark": "/v1",
    "dashscope": "/compatible-mode/v1",
    "kimi": "/v1",
    "deepseek": "/beta",
    "mistral": "/v1",
    "vllm": "/v1",
    "openai": "/v1",
}
CHATS = [name for name, dialect in DIALECTS.items() if dialect.mark]
RAW = [name for name, dialect in DIALECTS.items() if dialect.completions]
GAPS = [name for name, dialect in DIALECTS.items() if dialect.gap]
HI = [user("Three colours, please.")]
PREFIX = "1. Red\n2. Bl"
START = "The history of the lighthouse at the northern cape beg"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def client(served: Served, dialect: Any = "legato", **settings: Any) -> Client:
    """A client of a mount, with the model that is served."""
    return Client(served.url + MOUNTS[dialect], dialect=dialect, model=served.name, **settings)


def at(server: Faulty, dialect: Any = "legato", **settings: Any) -> Client:
    """A client of a server that fails."""
    return Client(server.url, dialect=dialect, model=SMALL, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# Every dialect


@pytest.mark.parametrize("dialect", CHATS)
def test_c018_every_dialect_continues_the_same_message(small: Served, dialect: str) -> None:
    prefix = "  x = [\n    1. Red\n2. Bl"
    expected = small.chat(*HI, {"role": "assistant", "content": prefix, "prefix": True}, max_tokens=12)
    with client(small, dialect) as ours:
        answer = ours.continue_chat(HI, prefix, **GREEDY)
    assert answer.text == text_of(expected)
    assert answer.whole == prefix + text_of(expected)
    assert (answer.finish_reason, answer.num_tokens, answer.num_rounds) == ("length", 12, 1)
    assert answer.ignored == (("random_seed",) if dialect == "mistral" else ())  # As the vendor has it.


@pytest.mark.parametrize("dialect", RAW)
def test_every_dialect_continues_the_same_text(small: Served, dialect: str) -> None:
    with client(small, dialect) as ours:
        answer = ours.continue_text(START, **GREEDY)
    assert answer.text == text_of(small.complete(START, max_tokens=12))
    assert answer.ignored == ()


@pytest.mark.parametrize("dialect", sorted(set(DIALECTS) - set(RAW)))
def test_where_no_path_continues_text_a_chat_does(small: Served, dialect: str) -> None:
    with client(small, dialect) as ours, client(small) as legato:
        answer = ours.continue_text(START, instructions="Be brief.", **GREEDY)
        assert answer.text == legato.continue_text(START, instructions="Be brief.", **GREEDY).text
        assert answer.ignored == ()


@pytest.mark.parametrize("dialect", GAPS)
def test_every_dialect_with_infill_fills_the_same_gap(default: Served, dialect: str) -> None:
    gap = ("def mean(values):\n    tot", "\n    return total / len(values)\n")
    with client(default, dialect) as ours:
        answer = ours.infill(*gap, **GREEDY)
    assert answer.text == text_of(default.complete(gap[0], suffix=gap[1], max_tokens=12))
    assert answer.text.startswith("al")


@pytest.mark.parametrize("dialect", ["legato", "kimi", "maas", "dashscope", "mistral"])
def test_a_name_is_part_of_the_text_so_far(small: Served, dialect: str) -> None:
    with client(small, dialect) as ours, client(small) as legato:
        named = ours.continue_chat(HI, "I say", name="Kelsier", **GREEDY)
        assert named.text == legato.continue_chat(HI, "Kelsier: I say", **GREEDY).text
        assert named.prefix == "I say"


@pytest.mark.parametrize("text", ["Red, red", "1, 2, 3", "Red, red, r"])
def test_a_prefix_that_is_replayed_is_joined_once(text: str) -> None:
    script = [text[at : at + 3].encode() for at in range(0, len(text), 3)]
    with serve_script(script) as served, client(served, "mistral") as ours:
        replayed = ours.continue_chat(HI, "Red,", extra={"echo": True})
        assert (replayed.text, replayed.whole) == (text, f"Red,{text}")
        plain = ours.continue_chat(HI, "Blue", extra={"echo": False})
        assert plain.whole == f"Blue{text}"


def test_what_a_dialect_cannot_do_is_refused_before_it_is_sent() -> None:
    refused: Callable[[], Any]
    for refused in (
        lambda: Client(dialect="maas").infill("a", "b"),
        lambda: Client(dialect="openai").continue_chat(HI, "a"),
        lambda: Client(dialect="kimi").continue_chat(HI, seed=1),
    ):
        with pytest.raises(UnsupportedFeature):
            refused()
    with pytest.raises(InvalidField, match="got 'bard'"):
        Client(dialect="bard")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option top_a"):
        Client().continue_text("a", top_a=1)  # type: ignore[call-overload]


def test_what_had_no_effect_is_told(small: Served) -> None:
    with client(small) as ours:
        assert ours.continue_text("One,", **GREEDY, extra={"top_a": 1, "foo": 2}).ignored == ("top_a", "foo")


# ---------------------------------------------------------------------------------------------------------------------
# Until it is done


@pytest.mark.parametrize(("dialect", "temperature"), [("legato", 0), *((dialect, 0.8) for dialect in DIALECTS)])
def test_l2_what_is_written_in_rounds_is_one_text(small: Served, dialect: str, temperature: float) -> None:
    fields: dict[str, Any] = {"temperature": temperature}
    if DIALECTS[dialect].seed == "seed":
        fields["seed"] = 5
    else:
        fields["extra"] = {"seed": 5}
    source: Any = HI if dialect in CHATS else START
    with client(small, dialect) as ours:
        writing = ours.write(source, "1. Red" if source is HI else "", max_tokens=4, max_total_tokens=16, **fields)
        text = "".join(writing)
        once = ours.write(source, "1. Red" if source is HI else "", max_tokens=16, max_rounds=1, **fields)
        assert text == "".join(once)
    done = writing.completion
    assert done.text == text
    assert done.num_tokens == once.completion.num_tokens
    assert done.num_rounds == (4 if done.finish_reason == "length" else done.num_tokens // 4 + 1)


def test_a_missing_seed_is_drawn_once(small: Served) -> None:
    with faulty(lambda number, path, body: sse(chunk(f" {number}", "length"))) as server:
        with at(server) as ours:
            assert "".join(ours.write("a", max_rounds=3)) == " 0 1 2"
        assert len({body["seed"] for body in server.bodies}) == 1
        assert [body["prompt"] for body in server.bodies] == ["a", "a 0", "a 0 1"]


def test_a_request_that_brings_nothing_is_the_last() -> None:
    with faulty(lambda number, path, body: sse(chunk("" if number == 2 else "x", "length"))) as server:
        with at(server) as ours:
            writing = ours.write("a")
            assert "".join(writing) == "xx"
        assert (writing.completion.num_rounds, writing.completion.finish_reason) == (3, "length")
        assert len(server.bodies) == 3


def test_thinking_that_was_cut_goes_on() -> None:
    text = b"<think>7 * 13 is 91.</think>No."

    def script(job: Job) -> Script:
        seen = bytes(id for id in job.prompt.ids if id < 256).rpartition(b"<|assistant|>")[2]
        return [text[len(seen) :]]

    with serve_script(script, reasoning=Tags("<think>", "</think>")) as served:
        for dialect in ("legato", "kimi", "deepseek", "vllm"):
            with client(served, dialect) as ours:
                writing = ours.write(HI, max_tokens=9)
                assert "".join(writing) == "No."
                assert writing.completion.reasoning == "7 * 13 is 91."
                assert writing.completion.num_rounds == 5  # One only began the closing tag.


# ---------------------------------------------------------------------------------------------------------------------
# Documents


class Person(BaseModel):
    """What is asked for."""

    name: str
    age: int


def in_pieces(document: str) -> Callable[[int, str, Any], bytes]:
    """Return what writes a document behind what there is of it, three characters an answer."""

    def script(number: int, path: str, body: Any) -> bytes:
        so_far = body["prompt"] if "prompt" in body else "".join(m["content"] for m in body["messages"][1:])
        rest = document.removeprefix(so_far)
        return sse(chunk(rest[:3], "length" if len(rest) > 3 else "stop"))

    return script


def test_a_document_comes_back_as_an_instance() -> None:
    whole = json.dumps({"name": "Ada", "age": 36})
    with faulty(in_pieces(whole)) as server, at(server) as ours:
        for begun in ("", whole[:1], whole[:13], whole[:-1]):
            assert ours.continue_chat(HI, begun, response_model=Person) == Person(name="Ada", age=36)
        assert ours.continue_text(whole[:7], response_model=Person) == Person(name="Ada", age=36)
    schema = server.bodies[0]["response_format"]
    wanted = {**Person.model_json_schema(), "additionalProperties": False}
    assert (schema["type"], schema["json_schema"]["schema"]) == ("json_schema", wanted)

    async def ask(url: str) -> Person:
        async with AsyncClient(url, model="m") as ours:
            return await ours.continue_chat(HI, whole[:9], response_model=Person)

    with faulty(in_pieces(whole)) as server:
        assert asyncio.run(ask(server.url)) == Person(name="Ada", age=36)


class City(BaseModel):
    """What a small model can be asked for."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=10**7)
    is_capital: bool


@pytest.mark.parametrize("dialect", ["legato", "kimi", "vllm"])
def test_c081_a_document_begun_comes_back_as_an_instance_from_a_model(small: Served, dialect: str) -> None:
    begun = '{"name": "Lisb'
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    with client(small, dialect) as ours:
        city = ours.continue_chat([user("Describe a city as JSON.")], begun, response_model=City, **options)
        assert city.name.startswith("Lisb")
        assert ours.continue_text(begun, response_model=City, **options).name.startswith("Lisb")
        assert isinstance(ours.continue_chat([user("Describe a city.")], response_model=City, **options), City)


# ---------------------------------------------------------------------------------------------------------------------
# Failures


@pytest.mark.parametrize(("dialect", "num"), [("legato", 1), ("legato", 3), ("maas", 2), ("mistral", 2)])
def test_c060_a_text_survives_a_break_after_every_event(small: Served, dialect: str, num: int) -> None:
    ask = forward(small.url + MOUNTS[dialect])
    fields: dict[str, Any] = {"temperature": 0.8, "max_total_tokens": 12, "extra": {"seed": 11, "ignore_eos": True}}
    with client(small, dialect) as whole, faulty(lambda number, path, body: cut(ask(path, body), num)) as server:
        expected = whole.write(HI, PREFIX, **fields)
        with at(server, dialect) as ours:
            writing = ours.write(HI, PREFIX, **fields)
            text, uncut = "".join(writing), "".join(expected)
    assert writing.completion.whole == PREFIX + text
    assert text.startswith(uncut) or uncut.startswith(text)  # Where usage is lost, events are counted.
    assert abs(len(text) - len(uncut)) < 20
    assert len(server.bodies) >= 12 // num - 1


def test_c060_the_asynchronous_client_survives_it_too(small: Served) -> None:
    ask = forward(f"{small.url}/v1")

    async def write(url: str) -> list[str]:
        async with AsyncClient(url, model=SMALL) as ours:
            return [text async for text in ours.write(START, temperature=0, max_total_tokens=12)]

    with faulty(lambda number, path, body: cut(ask(path, body), 2)) as server:
        broken = asyncio.run(write(server.url))
    assert "".join(broken) == "".join(asyncio.run(write(f"{small.url}/v1")))
    assert len(server.bodies) > 3


def test_both_clients_are_one() -> None:
    assert _public(AsyncClient) - {"aclose"} == _public(Client) - {"close"}


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_asynchronous_client_does_the_same(small: Served) -> None:
    async def ask() -> list[Any]:
        async with AsyncClient(f"{small.url}/v1", model=SMALL) as ours:
            return [
                await ours.continue_text(START, **GREEDY, seed=1),
                await ours.continue_chat(HI, PREFIX, **GREEDY, seed=1),
            ]

    with client(small) as ours:
        expected = [ours.continue_text(START, **GREEDY, seed=1), ours.continue_chat(HI, PREFIX, **GREEDY, seed=1)]
    assert asyncio.run(ask()) == expected


def test_c060_without_rounds_a_break_is_raised_with_what_there_is() -> None:
    broken = faulty(lambda number, path, body: sse(chunk(" one"), chunk(" two")))
    with broken as server, at(server) as ours, pytest.raises(StreamInterrupted) as caught:
        ours.continue_text("Count:")
    assert caught.value.partial.whole == "Count: one two"
    assert caught.value.partial.finish_reason is None
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("refusal", "num"),
    [
        (Refusal(400, {"error": {"message": "no", "code": "c", "param": "p"}}), 1),
        (Refusal(401, {"error_code": "c", "error_msg": "no"}), 1),
        (Refusal(422, {"detail": [{"type": "c", "msg": "no", "loc": ["body", "p"]}]}), 1),
        (Refusal(404, {"error": "no"}), 1),
        (Refusal(429, {"object": "error", "message": "no", "code": "c"}), 3),
        (Refusal(500, {"error": {"message": "no", "code": "c"}}), 3),
        (Refusal(503, {"error": {"message": "no", "code": "c"}}, {"retry-after": "3600"}), 1),
    ],
)
def test_c060_a_refusal_is_tried_again_only_where_that_may_help(refusal: Refusal, num: int) -> None:
    refusing = faulty(lambda number, path, body: refusal)
    with refusing as server, at(server) as ours, pytest.raises(StatusError, match="no") as caught:
        ours.continue_text("a")
    assert caught.value.status == refusal.status
    assert caught.value.code in ("c", "status_error")
    assert len(server.bodies) == num


def test_c060_retry_after_is_waited_for() -> None:
    def script(number: int, path: str, body: Any) -> Refusal | bytes:
        return Refusal(429, {}, {"retry-after": "1"}) if number == 0 else sse(chunk("b", "stop"), "[DONE]")

    with faulty(script) as server, at(server) as ours:
        started = time.monotonic()
        assert ours.continue_text("a").whole == "ab"
        assert 1 <= time.monotonic() - started < 5


def test_refusals_between_rounds_are_survived() -> None:
    def script(number: int, path: str, body: Any) -> Refusal | bytes:
        if number % 2:
            return Refusal((500, 503, 429)[number // 2 % 3], {"error": {"message": "later"}}, {"retry-after": "0"})
        return sse(chunk(f"{number} ", "length" if number < 8 else "stop"))

    with faulty(script) as server, at(server) as ours:
        assert "".join(ours.write("a")) == "0 2 4 6 8 "


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b'data: {"choices": [{"text": "lost',
        b'data: {"choices": [{"text": "lost", "finish_reason": "stop"}]}\n',
        sse("[DONE]"),
        sse("no json"),
        sse({"error": {"message": "engine died"}}),
    ],
)
def test_a_stream_without_an_end_is_not_an_answer(stream: bytes) -> None:
    def script(number: int, path: str, body: Any) -> bytes:
        return stream if number == 0 else sse(chunk("b", "stop"))

    with faulty(script) as server, at(server) as ours:
        assert ours.continue_text("a").whole == "ab"
    broken = faulty(lambda number, path, body: stream)
    with broken as server, at(server, max_retries=1) as ours, pytest.raises(StreamInterrupted):
        ours.continue_text("a")
    assert len(server.bodies) == 2


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_line_separators_are_text(end: str) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh"
    separated = faulty(lambda number, path, body: sse(chunk(text), chunk("!", "stop"), end=end))
    with separated as server, at(server) as ours:
        assert ours.continue_text("x").text == f"{text}!"


def test_a_server_that_is_not_there() -> None:
    with faulty(lambda *_: b"") as server:
        url = server.url
    with Client(url, max_retries=1) as ours, pytest.raises(ConnectFailed, match="cannot be reached"):
        ours.continue_text("a")


def test_leaving_early_cancels_the_work() -> None:
    with serve_script(lambda job: [b"ab"] * 5000) as served, client(served) as ours:
        for _ in ours.write("a", max_tokens=4000):
            break
        end = time.monotonic() + 5
        while served.engine.counters()["running"] and time.monotonic() < end:
            time.sleep(0.01)
        assert served.engine.counters() == {"running": 0, "cancelled": 1}
