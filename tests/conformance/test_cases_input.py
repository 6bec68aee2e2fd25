"""Faults in what a server takes (`C...`): limits, aliases, empty and malformed prompts and messages, wrong types."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

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
    user,
)
from tests.conftest import Served, serve_script

BOTH = [COMPLETIONS, CHAT]


@pytest.fixture(scope="module")
def endless() -> Iterator[Served]:
    """A server whose model never ends by itself, with a context of 100 tokens (bytes)."""
    with serve_script([b"word "] * 100, context_length=100) as served:
        yield served


# ---------------------------------------------------------------------------------------------------------------------
# Limits


def test_c033_no_tokens_with_echo_scores_the_prompt(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt="Answer: Yes", max_tokens=0, echo=True, logprobs=1)
    with stays_alive(small):
        answer = small.post(COMPLETIONS, body).json()
        choice = answer["choices"][0]
        arrays = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == ("Answer: Yes", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert len(arrays["tokens"]) == answer["usage"]["prompt_tokens"]
        assert "".join(arrays["tokens"]) == "Answer: Yes"
        assert arrays["text_offset"][0] == 0
        assert arrays["token_logprobs"][0] is None
        assert arrays["top_logprobs"][0] is None
        assert all(-100 < logprob <= 0 for logprob in arrays["token_logprobs"][1:])
        streamed = fold(stream(small, COMPLETIONS, body))["choices"][0]
        assert streamed == {key: choice[key] for key in streamed}


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("path", BOTH)
def test_c033_no_tokens_is_an_empty_answer(small: Served, path: str, echo: bool) -> None:
    source: dict[str, Any] = {"prompt": "Answer:"} if path == COMPLETIONS else {"messages": [*HI, marked("Answer:")]}
    body = body_for(small, path, **source, max_tokens=0, echo=echo)
    answer = small.post(path, body).json()
    assert text_of(answer) == ("Answer:" if echo else "")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert fold(stream(small, path, body))["choices"][0]["text"] == text_of(answer)


def test_c033_the_scores_of_a_prompt_do_not_depend_on_what_is_generated(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt="The sky is blue", echo=True, logprobs=1)
    bare, more = (small.post(COMPLETIONS, {**body, "max_tokens": limit}).json() for limit in (0, 3))
    num = bare["usage"]["prompt_tokens"]
    left, right = bare["choices"][0]["logprobs"], more["choices"][0]["logprobs"]
    assert left["tokens"] == right["tokens"][:num]
    assert left["token_logprobs"][1:] == pytest.approx(right["token_logprobs"][1:num], abs=1e-3)
    assert "".join(right["tokens"]) == text_of(more)
    assert more["usage"]["completion_tokens"] == 3


def test_c037_a_chat_without_a_limit_may_fill_the_context_and_says_so(endless: Served) -> None:
    answer = endless.chat(*HI)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 100


def test_c037_a_completion_without_a_limit_has_sixteen_tokens_and_says_so(endless: Served) -> None:
    answer = endless.complete("x")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16


def test_c037_the_model_list_tells_the_defaults(endless: Served) -> None:
    (entry,) = endless.get("/v1/models").json()["data"]
    assert entry["capabilities"]["default_max_tokens"] == {"completions": 16, "chat": None}
    assert entry["capabilities"]["context_length"] == 100
    assert endless.get("/v1/models/m").json() == entry


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("limit", [101, 10**30])
def test_c037_a_limit_beyond_the_context_is_clipped_and_reported(endless: Served, path: str, limit: int) -> None:
    for streamed in (False, True):
        response = endless.post(path, body_for(endless, path, max_tokens=limit, stream=streamed))
        assert response.headers["legato-clipped"] == "max_tokens"
    answer = endless.post(path, body_for(endless, path, max_tokens=limit)).json()
    assert answer["usage"]["total_tokens"] == 100
    assert "legato-clipped" not in endless.post(path, body_for(endless, path, max_tokens=2)).headers


@pytest.mark.parametrize("path", BOTH)
def test_c037_a_prompt_that_fills_the_context_is_refused_with_both_numbers(endless: Served, path: str) -> None:
    long = "x" * 100
    source = {"prompt": long} if path == COMPLETIONS else {"messages": [user(long)]}
    error = check_error(endless.post(path, body_for(endless, path, **source)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens" in error["message"]
    assert str(len(long) if path == COMPLETIONS else len(f"<|user|>{long}<|assistant|>") + 1) in error["message"]


def test_c038_max_completion_tokens_works_and_wins(small: Served) -> None:
    question = user("Count to fifty in words")
    for fields in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        answer = small.chat(question, **fields)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["finish_reason"] == "length"
    check_error(small.post(CHAT, body_for(small, CHAT, max_completion_tokens=-1)), 400, "max_completion_tokens")


# ---------------------------------------------------------------------------------------------------------------------
# Prompts

EMPTY: list[Any] = ["", [], [""], [[]], ["a", ""], [[5], []], None]


@pytest.mark.parametrize("name", ["small", "default"])
def test_c047_an_empty_prompt_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    served: Served = request.getfixturevalue(name)
    assert served.engine.tokenizer.start_id is None
    with stays_alive(served):
        for prompt in EMPTY:
            check_error(served.post(COMPLETIONS, body_for(served, COMPLETIONS, prompt=prompt)), 400, "prompt")
        check_error(served.post(COMPLETIONS, {"model": served.name, "max_tokens": 4}), 400, "prompt")


BAD_IDS: list[Any] = [
    [-1],
    [[1, 99_999_999]],
    ["a", [1, 2]],
    [1.5],
    [2.0],
    [4_294_967_297],
    [2**64],
    [10**40],
    [True],
    [[1], 2],
    [None],
    [[[1]]],
]


def test_c049_bad_token_ids_are_refused(small: Served) -> None:
    with stays_alive(small):
        for prompt in BAD_IDS:
            for streamed in (False, True):
                body = body_for(small, COMPLETIONS, prompt=prompt, stream=streamed)
                check_error(small.post(COMPLETIONS, body), 400, "prompt")
        size = len(small.engine.tokenizer.pieces)
        check_error(small.post(COMPLETIONS, body_for(small, COMPLETIONS, prompt=[size])), 400, "prompt")


@pytest.mark.parametrize("prompt", ["The capital of Fran", "Count: 1 2 3", "日本語とa"])
def test_c049_the_ids_of_a_text_give_what_the_text_gives(small: Served, prompt: str) -> None:
    ids = small.engine.tokenizer.encode(prompt.encode(), special=True)
    whole = small.complete(prompt, max_tokens=6)
    assert text_of(small.complete(ids, max_tokens=6)) == text_of(whole)
    many = small.complete([ids, ids[:2]], max_tokens=6)  # type: ignore[arg-type]
    assert text_of(many) == text_of(whole)
    assert len(many["choices"]) == 2


def test_c049_every_id_of_the_vocabulary_is_taken(small: Served) -> None:
    with stays_alive(small):
        size = len(small.engine.tokenizer.pieces)
        for id in (0, 1, 16, 17, size - 1):
            assert len(small.complete([id], max_tokens=1)["choices"]) == 1  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Messages

BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ({}, "messages"),
    (5, "messages"),
    ([None], "messages[0]"),
    (["hi"], "messages[0]"),
    ([{"role": "user"}], "messages[0].content"),
    ([user("a"), {"role": "user", "content": None}], "messages[1].content"),
    ([{"role": "wizard", "content": "x"}], "messages[0].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"),
    ([user(5)], "messages[0].content"),
    ([user({"type": "text", "text": "x"})], "messages[0].content"),
    ([user([{"type": "text"}])], "messages[0].content"),
    ([user([{"type": "text", "text": 5}])], "messages[0].content"),
    ([user(["x"])], "messages[0].content"),
    ([user("a"), {**marked("b"), "prefix": "true"}], "messages[1].prefix"),
    ([{**user("a"), "name": 5}], "messages[0].name"),
    ([{**user("a"), "tool_calls": [{}]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": None, "tool_calls": "x"}], "messages[0].tool_calls"),
]


@pytest.mark.alone
def test_c052_bad_messages_are_refused_at_once_with_their_place(small: Served) -> None:
    with stays_alive(small):
        for messages, place in BAD_MESSAGES:
            for streamed in (False, True):
                started = time.monotonic()
                body = body_for(small, CHAT, messages=messages, stream=streamed)
                error = check_error(small.post(CHAT, body), 400, "messages")
                assert f"`{place}" in error["message"]
                assert time.monotonic() - started < 1
        check_error(small.post(CHAT, {"model": small.name}), 400, "messages")


# ---------------------------------------------------------------------------------------------------------------------
# Types

WRONG: dict[str, list[Any]] = {
    "model": [["m"], 5, {}, ""],
    "stream": ["true", 1, 0, [], {}],
    "max_tokens": ["5", True, 2.5, -1, [1]],
    "temperature": ["0.5", True, -0.1, 2.1, [0]],
    "top_p": ["1", True, 0, 1.1],
    "top_k": ["1", True, 1.5, -2],
    "min_p": ["0", -0.1, 1.1],
    "n": ["1", True, 0, 17, 1.5],
    "seed": ["7", True, 1.5, 2**64, -(2**63) - 1],
    "presence_penalty": ["0", 2.1, -2.1],
    "frequency_penalty": ["0", 2.1, -2.1],
    "repetition_penalty": ["1", 0, -1, 2.1],
    "logit_bias": [[], "x", {"a": 1}, {"5": "1"}, {"5": 101}, {"99999999": 1}, {"-1": 1}, {"1.5": 1}],
    "echo": ["false", 0, []],
    "stream_options": [[], "x", True],
    "response_format": ["json", [], {"type": "xml"}, {"type": "json_schema"}, {}],
    "constraint_start": ["0", True, -1],
    "guided_choice": ["x", [], [1]],
    "guided_regex": [["x"], ""],
    "seam": ["off", True, []],
    "canonical": ["true", 1],
    "stop_across_seam": ["true", 1],
    "min_tokens": ["1", True, -1, 1.5, 5],
    "ignore_eos": ["true", 1],
    "stop_token_ids": [5, "x", ["5"], [True], [-1], [1.5], [99_999_999], [2**64], [5] * 33],
    "return_token_ids": ["true", 1],
    "auto_continue": [True, 3, [], {"max_rounds": 0}, {"max_rounds": "3"}, {"max_total_tokens": 1.5}],
    "detect_loops": ["true", 1],
    "report": ["true", 1],
}
WRONG_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": [{"a": 1}, 5, True],
    "suffix": [5, ["x"], True],
    "logprobs": ["1", True, -1, 21, 100_000, 1.5],
    "best_of": ["1", 0, 17],
    "instructions": [5, ["x"]],
}
WRONG_CHAT: dict[str, list[Any]] = {
    "messages": [{"a": 1}, 5, True],
    "max_completion_tokens": ["5", True, 2.5, -1],
    "logprobs": ["true", 1],
    "top_logprobs": ["1", True, -1, 21],
    "continue_final_message": ["true", 1],
    "add_generation_prompt": ["true", 1],
    "tools": ["x", {}, [5]],
    "tool_choice": [5, [], True],
}


@pytest.mark.parametrize(("path", "own"), [(COMPLETIONS, WRONG_COMPLETIONS), (CHAT, WRONG_CHAT)])
def test_c061_nothing_is_coerced(small: Served, path: str, own: dict[str, list[Any]]) -> None:
    with stays_alive(small):
        for field, values in {**WRONG, **own}.items():
            for value in values:
                check_error(small.post(path, body_for(small, path, **{field: value})), 400, field)


@pytest.mark.parametrize("path", BOTH)
def test_c061_the_widest_values_are_taken(small: Served, path: str) -> None:
    with stays_alive(small):
        for fields in (
            {"seed": 2**64 - 1},
            {"seed": -(2**63)},
            {"top_k": 10**30},
            {"top_k": -1},
            {"top_p": 5e-324},
            {"min_p": 5e-324},
            {"min_p": 1},
            {"temperature": 5e-324},
            {"temperature": 2},
            {"repetition_penalty": 0.01},
            {"repetition_penalty": 2},
            {"presence_penalty": -2, "frequency_penalty": -2},
            {"logit_bias": {str(id): -100 for id in range(500)}},
            {"logit_bias": {"1": 100}},
            {"logit_bias": {str(next(iter(small.engine.tokenizer.end_ids))): 100}},
        ):
            body = body_for(small, path, **{"max_tokens": 2, "temperature": 1.5, **fields})
            assert small.post(path, body).status_code == 200, fields


@pytest.mark.parametrize("path", BOTH)
def test_c061_an_explicit_null_means_not_given(small: Served, path: str) -> None:
    own = WRONG_COMPLETIONS if path == COMPLETIONS else WRONG_CHAT
    fields = set(WRONG | own) - {"model", "max_tokens", "prompt", "messages", "seed", "temperature"}
    answer = small.post(path, body_for(small, path) | dict.fromkeys(fields))
    assert answer.status_code == 200
    assert "legato-ignored" not in answer.headers
    assert text_of(answer.json()) == text_of(small.post(path, body_for(small, path)).json())
