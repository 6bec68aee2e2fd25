"""Scores, choices and token ids (`C...`): complete, in step with the text, and the same whatever ran before."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    HI,
    body_for,
    check_error,
    fold,
    folded,
    marked,
    stays_alive,
    stream,
    text_of,
)
from tests.conftest import Served, serve_script

SKY = "The sky is blue"
SEAM = "The capital of Fran"
"""It is cut inside a word: the first token of the answer reaches back over the seam."""


def spelled(served: Served, ids: list[int]) -> bytes:
    """The bytes of token ids."""
    return b"".join(served.engine.tokenizer.pieces[id] for id in ids)


def ids_of(chunks: list[dict[str, Any]]) -> list[int]:
    """The ids of a choice's chunks."""
    return [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]]


# ---------------------------------------------------------------------------------------------------------------------
# n


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (COMPLETIONS, {"prompt": "Pick a number:"}),
        (CHAT, {"messages": [*HI, marked("My favourite number is")]}),
        (COMPLETIONS, {"prompt": "def pick(n):\n    ", "suffix": "\n    return x\n"}),
    ],
)
def test_c039_n_choices_come_back(default: Served, path: str, source: dict[str, Any]) -> None:
    body = body_for(default, path, **source, temperature=1, n=3)
    answer = default.post(path, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({text_of(answer, index) for index in range(3)}) > 1
    ids = default.post(path, {**body, "return_token_ids": True}).json()
    assert [text_of(ids, index) for index in range(3)] == [text_of(answer, index) for index in range(3)]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in ids["choices"]) > 3


# ---------------------------------------------------------------------------------------------------------------------
# best_of


@pytest.mark.parametrize("prompts", [[SEAM], ["One day", SKY]])
@pytest.mark.parametrize("echo", [False, True])
def test_the_best_are_those_with_the_highest_mean(small: Served, prompts: list[str], echo: bool) -> None:
    body = body_for(small, COMPLETIONS, prompt=prompts, temperature=1.2, max_tokens=6, logprobs=1)
    drawn = small.post(COMPLETIONS, {**body, "n": 5}).json()

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return -sum(logprobs) / len(logprobs) if logprobs else 0

    expected = []
    for at in range(len(prompts)):
        expected += sorted(drawn["choices"][at * 5 : at * 5 + 5], key=mean)[:2]
    best = small.post(COMPLETIONS, {**body, "n": 2, "best_of": 5, "echo": echo})
    assert "legato-ignored" not in best.headers
    choices = best.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(2 * len(prompts)))
    before = [prompts[at // 2] if echo else "" for at in range(len(choices))]
    assert [choice["text"] for choice in choices] == [
        text + choice["text"] for text, choice in zip(before, expected, strict=True)
    ]
    usage = best.json()["usage"]
    assert [usage[key] for key in ("prompt_tokens", "completion_tokens")] == [
        drawn["usage"][key] for key in ("prompt_tokens", "completion_tokens")
    ]
    if not echo:
        assert [choice["logprobs"] for choice in choices] == [choice["logprobs"] for choice in expected]
        del body["logprobs"]
        silent = small.post(COMPLETIONS, {**body, "n": 2, "best_of": 5}).json()["choices"]
        assert [choice["text"] for choice in silent] == [choice["text"] for choice in expected]
        assert [choice["logprobs"] for choice in silent] == [None] * len(silent)


def test_the_bounds_of_best_of(small: Served) -> None:
    def post(**fields: Any) -> Any:
        return small.post(COMPLETIONS, body_for(small, COMPLETIONS, **fields))

    for fields, words in (
        ({"n": 3, "best_of": 2}, "at least `n`, got 2 and 3"),
        ({"best_of": 2, "stream": True}, "cannot be streamed, got 2 and 1"),
        ({"prompt": ["x"] * 33, "best_of": 2}, "at most 64, got 2 times 33"),
    ):
        assert words in check_error(post(**fields), 400, "best_of")["message"]
    assert len(post(n=2, best_of=2).json()["choices"]) == 2
    assert post(best_of=1, stream=True).status_code == 200
    with serve_script([b"ok"]) as served:
        refused = served.post(COMPLETIONS, body_for(served, COMPLETIONS, best_of=2))
        assert check_error(refused, 400, "best_of")["code"] == "unsupported"


# ---------------------------------------------------------------------------------------------------------------------
# echo and logprobs


@pytest.mark.parametrize("prompt", ["Alpha beta", SEAM, "été à la"])
def test_c042_stream_and_whole_describe_the_same_object(small: Served, prompt: str) -> None:
    texts = set()
    for echo, logprobs in product([False, True], [None, 1]):
        body = body_for(small, COMPLETIONS, prompt=prompt, max_tokens=6, echo=echo, logprobs=logprobs)
        whole = small.post(COMPLETIONS, body).json()
        choice = whole["choices"][0]
        assert fold(stream(small, COMPLETIONS, body))["choices"] == folded(whole)["choices"]
        shown = choice["text"] if echo else prompt + choice["text"]
        assert shown.startswith(prompt)
        texts.add(shown)
        arrays = choice["logprobs"]
        assert (arrays is None) == (logprobs is None)
        if arrays is not None:
            assert len({len(array) for array in arrays.values()}) == 1
            assert "".join(arrays["tokens"]) == choice["text"]
            at = 0 if echo else len(prompt)
            for token, offset in zip(arrays["tokens"], arrays["text_offset"], strict=True):
                assert offset == at
                assert shown[offset:].startswith(token)
                at += len(token)
    assert len(texts) == 1


@pytest.mark.parametrize("prompt", [SKY, SEAM, "x"])
def test_c043_echo_scores_the_prompt_and_the_answer(small: Served, prompt: str) -> None:
    body = body_for(small, COMPLETIONS, prompt=prompt, max_tokens=3, logprobs=5)
    answer = small.post(COMPLETIONS, {**body, "echo": True}).json()
    arrays, usage = answer["choices"][0]["logprobs"], answer["usage"]
    assert len(arrays["tokens"]) == usage["prompt_tokens"] + usage["completion_tokens"]
    assert arrays["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in arrays["token_logprobs"][1:])
    assert [top and len(top) for top in arrays["top_logprobs"]] == [None] + [5] * (len(arrays["tokens"]) - 1)
    assert "".join(arrays["tokens"]) == text_of(answer)
    assert arrays["text_offset"][0] == 0
    alone = small.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert alone["text_offset"][0] == len(prompt)
    assert alone["token_logprobs"] == arrays["token_logprobs"][usage["prompt_tokens"] :]


def test_c044_how_many_alternatives(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt="x", max_tokens=2)
    for num in (0, 1, 20):
        arrays = small.post(COMPLETIONS, {**body, "logprobs": num}).json()["choices"][0]["logprobs"]
        assert len(arrays["token_logprobs"]) == 2
        assert [len(top) for top in arrays["top_logprobs"]] == [num, num]
    assert small.post(COMPLETIONS, {**body, "logprobs": None}).json()["choices"][0]["logprobs"] is None
    for wrong in (100_000, 21, -1, True, False):
        check_error(small.post(COMPLETIONS, {**body, "logprobs": wrong}), 400, "logprobs")
    chat = body_for(small, CHAT, max_tokens=2)
    check_error(small.post(CHAT, {**chat, "top_logprobs": 3}), 400, "top_logprobs")
    content = small.post(CHAT, {**chat, "logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


# ---------------------------------------------------------------------------------------------------------------------
# Token ids


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 1, "echo": True}, {"stop": ["ital", "is"]}])
@pytest.mark.parametrize("prompt", [SKY, SEAM, "A fox 🦊 and a fo"])
def test_the_ids_of_a_completion_spell_it(small: Served, prompt: str, fields: dict[str, Any]) -> None:
    body = body_for(small, COMPLETIONS, prompt=prompt, max_tokens=6, return_token_ids=True, **fields)
    response = small.post(COMPLETIONS, body)
    (choice,), usage = response.json()["choices"], response.json()["usage"]
    assert len(choice["prompt_token_ids"]) == usage["prompt_tokens"]
    assert spelled(small, choice["prompt_token_ids"]).decode() == prompt
    answer = choice["text"].removeprefix(prompt) if fields.get("echo") else choice["text"]
    data = spelled(small, choice["token_ids"])
    if "stop" not in fields:
        assert len(choice["token_ids"]) == usage["completion_tokens"]
        back = len(data) - len(answer.encode())
        assert 0 <= back <= int(response.headers["legato-healed"])
        assert data == prompt.encode()[len(prompt.encode()) - back :] + answer.encode()
    else:
        assert len(choice["token_ids"]) <= usage["completion_tokens"]
        assert answer.encode() in data or answer == ""
    first, *rest = stream(small, COMPLETIONS, body)
    assert first["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk["choices"][0] for chunk in rest)
    assert ids_of([first, *rest]) == choice["token_ids"]


@pytest.mark.parametrize("n", [1, 2])
def test_the_ids_of_a_chat_spell_it(small: Served, n: int) -> None:
    body = body_for(small, CHAT, messages=[*HI, marked(SEAM)], max_tokens=6, n=n, temperature=1, return_token_ids=True)
    answer = small.post(CHAT, body).json()
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert spelled(small, answer["prompt_token_ids"]).decode().endswith(f"assistant\n{SEAM}")
    for index, choice in enumerate(answer["choices"]):
        assert spelled(small, choice["token_ids"]).decode().endswith(text_of(answer, index))
    chunks = stream(small, CHAT, body)
    for index, choice in enumerate(answer["choices"]):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[1]["prompt_token_ids"] == answer["prompt_token_ids"]
        assert not any("prompt_token_ids" in chunk for chunk in [mine[0], *mine[2:]])
        assert ids_of(mine) == choice["token_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_ids_come_only_when_asked_for(small: Served, path: str) -> None:
    assert "token_ids" not in small.post(path, body_for(small, path, logprobs=None)).text
    with serve_script([b"ok"]) as served, stays_alive(served):
        answer = served.post(path, body_for(served, path, return_token_ids=True)).json()
        assert answer["choices"][0]["token_ids"] == list(b"ok")
