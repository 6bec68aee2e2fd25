"""Faults in text assembly that users of other servers reported (`C...`): characters, stops, token facts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from legato.engines.scripted import Script
from legato.types import Job
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    HI,
    body_for,
    check_error,
    fold,
    marked,
    stays_alive,
    stream,
    text_of,
    together,
)
from tests.conftest import Served, serve_script

COUNT = "Count: 1 2 3"
SCRIPTED = "Write: a<b && c>d .* \\n (x) [y] &lt; 日本語 한글 🦊🧪 one two three\n\nfour five six. End."


def chopped(job: Job) -> Script:
    """Play the text in pieces that depend on the seed and the choice, also inside characters."""
    chance = random.Random(job.sampling.seed * 64 + job.choice)
    data, chunks = SCRIPTED.encode(), []
    while data:
        size = chance.randint(1, 5)
        chunks.append(data[:size])
        data = data[size:]
    return chunks


@pytest.fixture(scope="module")
def script() -> Iterator[Served]:
    """A server that answers `SCRIPTED`, in other pieces for each seed and choice."""
    with serve_script(chopped) as served:
        yield served


def cut(text: str, stops: Sequence[str], before: str = "") -> str:
    """What is left of a text: the stop that completes first counts; of those that complete together, the longest."""
    whole = before + text
    for end in range(len(before) + 1, len(whole) + 1):
        starts = [end - len(stop) for stop in stops if whole[:end].endswith(stop)]
        if starts:
            return whole[len(before) : max(len(before), min(starts))]
    return text


def slices(text: str, num: int, sizes: tuple[int, int], seed: int = 1) -> list[str]:
    """Draw pieces of a text."""
    chance = random.Random(seed)
    drawn = []
    for _ in range(num):
        size = chance.randint(*sizes)
        start = chance.randrange(len(text) - size)
        drawn.append(text[start : start + size])
    return drawn


# ---------------------------------------------------------------------------------------------------------------------
# Characters


@pytest.mark.parametrize(
    "prompt",
    ["日本語とabcを混ぜて書く: 世a界b世a界b", "한국어와 English: 가나다 abc 가나다 abc", "Emoji: 🧪🧬🦊🧪🧬🦊🧪🧬"],
)
def test_c020_a_stream_is_a_partition_of_the_text(small: Served, prompt: str) -> None:
    whole = small.complete(prompt, max_tokens=24)
    chunks = stream(small, COMPLETIONS, body_for(small, COMPLETIONS, prompt=prompt, max_tokens=24))
    assert fold(chunks)["choices"][0]["text"] == text_of(whole)
    assert "\ufffd" not in text_of(whole)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c020_pieces_inside_characters_give_the_same_text(script: Served, path: str) -> None:
    def texts(seed: int) -> set[str]:
        body = body_for(script, path, seed=seed, n=16, max_tokens=300)
        return {choice["text"] for choice in fold(stream(script, path, body))["choices"]}

    assert set.union(*together(texts, range(6))) == {SCRIPTED}


@pytest.mark.parametrize(
    ("prompt", "limits"),
    [("Repeat: 🧪🧬🧪🧬🧪🧬", range(1, 25)), ("日本語とabcを混ぜて書く: 世a界b世a界b", range(1, 13))],
)
def test_c021_a_limit_inside_a_character_leaves_it_out(small: Served, prompt: str, limits: range) -> None:
    texts = together(lambda limit: text_of(small.complete(prompt, max_tokens=limit)), limits)
    assert not any("\ufffd" in text for text in texts)
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
    assert any(shorter == longer for shorter, longer in pairwise(texts)), "no limit was inside a character"


def test_c021_what_was_left_out_can_be_continued(small: Served) -> None:
    prompt = "Repeat: 🧪🧬🧪🧬🧪🧬"
    whole = text_of(small.complete(prompt, max_tokens=16))
    for limit in range(1, 9):
        head = text_of(small.complete(prompt, max_tokens=limit))
        assert whole.startswith(head + text_of(small.complete(prompt + head, max_tokens=6)))


def test_c021_token_bytes_tell_what_the_text_leaves_out(small: Served) -> None:
    for limit in range(1, 6):
        answer = small.chat(*HI, marked("🧪🧬🧪🧬🧪"), max_tokens=limit, logprobs=True)
        data = bytes(byte for entry in answer["choices"][0]["logprobs"]["content"] for byte in entry["bytes"])
        assert data.startswith(text_of(answer).encode())
        assert data.decode("utf-8", "ignore") == text_of(answer)


# ---------------------------------------------------------------------------------------------------------------------
# Stops


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c025_a_stop_in_pieces_never_leaks(script: Served, path: str) -> None:
    def check(index_and_stop: tuple[int, str]) -> None:
        index, stop = index_and_stop
        body = body_for(script, path, seed=index, stop=[stop], max_tokens=300)
        whole = script.post(path, body).json()
        streamed = fold(stream(script, path, body))["choices"][0]
        assert text_of(whole) == streamed["text"] == cut(SCRIPTED, [stop])
        assert whole["choices"][0]["finish_reason"] == streamed["finish_reason"] == "stop"

    together(check, list(enumerate(slices(SCRIPTED, 40, (2, 12)))))


def test_c025_with_response_format_text(script: Served) -> None:
    body = body_for(script, CHAT, stop="three", max_tokens=300, response_format={"type": "text"})
    assert text_of(script.post(CHAT, body).json()) == cut(SCRIPTED, ["three"])


@pytest.mark.parametrize("before", ["one. W", "Writ", "a<", "no part"])
def test_c025_a_stop_may_begin_in_a_marked_prefix_and_end_in_the_answer(script: Served, before: str) -> None:
    stops = [*slices(SCRIPTED, 10, (2, 8)), "WWrite", "one. WWri", "a<Write", "tWrite"]
    for stop in stops:
        body = body_for(script, CHAT, messages=[*HI, marked(before)], stop=stop, max_tokens=300)
        expected = cut(SCRIPTED, [stop], before)
        assert text_of(script.post(CHAT, body).json()) == expected
        assert fold(stream(script, CHAT, body))["choices"][0]["text"] == expected


def test_c025_on_a_raw_prompt_a_stop_begins_in_the_answer_unless_asked_otherwise(script: Served) -> None:
    body = body_for(script, COMPLETIONS, prompt="one. W", stop="WWrite", max_tokens=300)
    assert text_of(script.post(COMPLETIONS, body).json()) == SCRIPTED
    assert text_of(script.post(COMPLETIONS, {**body, "stop_across_seam": True}).json()) == ""


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c025_stops_that_are_no_tokens_of_a_model(small: Served, path: str) -> None:
    source: dict[str, Any] = {"prompt": COUNT} if path == COMPLETIONS else {"messages": [*HI, marked(COUNT)]}
    body = body_for(small, path, **source, max_tokens=24)
    text = text_of(small.post(path, body).json())
    before = "" if path == COMPLETIONS else COUNT

    def check(stop: str) -> None:
        stopped = {**body, "stop": [stop]}
        whole = small.post(path, stopped).json()
        streamed = fold(stream(small, path, stopped))["choices"][0]
        assert text_of(whole) == streamed["text"] == cut(text, [stop], before)
        assert whole["choices"][0]["finish_reason"] == streamed["finish_reason"] == "stop"

    together(check, slices(text, 8, (2, 8)))


def test_c028_the_order_of_stops_does_not_matter(script: Served) -> None:
    chance = random.Random(4)

    def check(seed: int) -> None:
        outer = slices(SCRIPTED, 1, (4, 12), seed)[0]
        start = chance.randrange(len(outer) - 1)
        inner = outer[start : start + chance.randint(1, 4)]
        stops = [outer, inner, outer[: chance.randint(1, 3)]][: chance.randint(2, 3)]
        for order in (stops, stops[::-1]):
            body = body_for(script, COMPLETIONS, seed=seed, stop=order, max_tokens=300)
            text = text_of(script.post(COMPLETIONS, body).json())
            assert text == cut(SCRIPTED, stops)
            assert not any(stop in text for stop in stops)

    together(check, range(40))


def test_c028_stops_inside_one_token_of_a_model(small: Served) -> None:
    prompt = "The keeper of the lighthouse"
    text = text_of(small.complete(prompt, max_tokens=16))
    inside = [[outer, outer[2:4]] for outer in slices(text, 3, (5, 9), seed=2)]
    heads = [[outer, outer[:3]] for outer in slices(text, 3, (5, 9), seed=3)]

    def check(stops: list[str]) -> None:
        assert text_of(small.complete(prompt, max_tokens=16, stop=stops)) == cut(text, stops)

    together(check, [order for stops in (*inside, *heads) for order in (stops, stops[::-1])])


BAD_STOPS: list[Any] = [
    [123],
    ["ok", None],
    {"a": 1},
    5,
    True,
    "",
    ["a", ""],
    [["a"]],
    ["x"] * 33,
    ["x"] * 10_000,
    "x" * 257,
    "x" * 1_000_000,
]


@pytest.mark.alone
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_c030_bad_stops_are_refused_at_once(small: Served, path: str) -> None:
    with stays_alive(small):
        for stop in BAD_STOPS:
            for streamed in (False, True):
                body = body_for(small, path, stop=stop, stream=streamed)
                started = time.monotonic()
                check_error(small.post(path, body), 400, "stop")
                assert time.monotonic() - started < 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stop", [["a1", "b2", "c3", "d4", "e5"], ["x" * 256] * 32, "é" * 128, [], None])
def test_c030_more_stops_than_openai_takes_are_fine(script: Served, path: str, stop: Any) -> None:
    answer = script.post(path, body_for(script, path, stop=stop, max_tokens=300))
    assert answer.status_code == 200
    assert text_of(answer.json()) == SCRIPTED


def test_c031_every_single_character_can_be_a_stop(script: Served) -> None:
    def check(stop: str) -> None:
        body = body_for(script, COMPLETIONS, stop=[stop], max_tokens=300)
        assert text_of(script.post(COMPLETIONS, body).json()) == cut(SCRIPTED, [stop])

    together(check, [*sorted(set(SCRIPTED)), ".*", "\\n", "&lt;", "[", "(x)", "\n\n", "^", "$"])


def test_c031_every_single_character_of_a_models_text_can_be_a_stop(small: Served) -> None:
    prompt = "Write: a<b && c>d .* \\n (x) [y]"
    text = text_of(small.complete(prompt, max_tokens=20))

    def check(stop: str) -> None:
        assert text_of(small.complete(prompt, max_tokens=20, stop=[stop])) == cut(text, [stop])

    together(check, [*sorted(set(text)), ".*", "&lt;"])


# ---------------------------------------------------------------------------------------------------------------------
# Token facts


def middles(tokens: list[str]) -> list[str]:
    """Stops that begin inside a token."""
    return [token[1:] + after[:1] for token, after in pairwise(tokens) if len(token) > 2][:3]


def test_c032_token_arrays_are_cut_with_the_text(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt="The keeper of the lighthouse", max_tokens=20, logprobs=2)
    calm = small.post(COMPLETIONS, body).json()["choices"][0]
    stops = [calm["text"][3:7], *middles(calm["logprobs"]["tokens"])]
    assert len(stops) == 4
    for stop in stops:
        whole = small.post(COMPLETIONS, {**body, "stop": [stop]}).json()["choices"][0]
        arrays = whole["logprobs"]
        assert whole["text"] == cut(calm["text"], [stop])
        assert len({len(array) for array in arrays.values()}) == 1
        assert arrays["text_offset"][:1] in ([], [len(body["prompt"])])
        assert "".join(arrays["tokens"]) == whole["text"]
        for token, offset, logprob, top in zip(
            arrays["tokens"], arrays["text_offset"], arrays["token_logprobs"], arrays["top_logprobs"], strict=True
        ):
            assert (body["prompt"] + whole["text"])[offset:].startswith(token)
            assert logprob <= 0
            assert len(top) == 2
        streamed = fold(stream(small, COMPLETIONS, {**body, "stop": [stop]}))["choices"][0]
        assert streamed == {key: whole[key] for key in streamed}


def test_c032_token_facts_of_a_chat_are_cut_with_the_text(small: Served) -> None:
    messages = [*HI, marked("The keeper of the lighthouse")]
    body = body_for(small, CHAT, messages=messages, max_tokens=20, logprobs=True, top_logprobs=2)
    calm = small.post(CHAT, body).json()["choices"][0]
    for stop in middles([entry["token"] for entry in calm["logprobs"]["content"]]):
        whole = small.post(CHAT, {**body, "stop": stop}).json()
        choice = whole["choices"][0]
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text_of(whole)
        assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
        streamed = fold(stream(small, CHAT, {**body, "stop": stop}))["choices"][0]
        assert (streamed["text"], streamed["logprobs"]) == (text_of(whole), choice["logprobs"])
