"""Mistral's infill: the official client, the shape of its answers and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mistralai.client import Mistral
from mistralai.client.errors import HTTPValidationError, SDKError

from tests.conformance.reading import text_of
from tests.conformance.vendors import MISTRAL, body, refused, stream
from tests.conftest import Served, serve_script

MEAN = {"prompt": "def mean(xs):\n    tot", "suffix": "\n    return total / len(xs)\n"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script([b"one, two"]) as served:
        yield served


def test_the_official_client(default: Served) -> None:
    with Mistral(api_key="any", server_url=default.url) as client:
        asked: dict[str, Any] = {"model": default.name, **MEAN, "temperature": 0, "max_tokens": 16, "random_seed": 7}
        whole = client.fim.complete(**asked)
        text = whole.choices[0].message.content
        assert text
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage.completion_tokens
        pieces, usages = [], []
        for event in client.fim.stream(**asked):
            pieces.append(event.data.choices[0].delta.content)
            usages.append(event.data.usage)
        assert "".join(map(str, pieces)) == text
        assert usages[-1] is not None
        assert usages[-1].total_tokens == whole.usage.total_tokens
    expected = default.post("/v1/completions", {"model": default.name, **MEAN, "temperature": 0, "max_tokens": 16})
    assert text == text_of(expected.json())


def test_the_official_client_reads_errors(served: Served) -> None:
    with Mistral(api_key="any", server_url=served.url) as client:
        with pytest.raises(HTTPValidationError) as invalid:
            client.fim.complete(model="m", prompt="x", temperature=2)
        (detail,) = invalid.value.data.detail or []
        assert detail.loc == ["body", "temperature"]
        assert detail.msg == "`temperature` must be less than or equal to 1.5, got 2.0"
        with pytest.raises(SDKError) as unknown:
            client.fim.complete(model="nowhere", prompt="x")
        assert unknown.value.status_code == 404


def test_the_answer_is_a_chats(served: Served) -> None:
    answer = served.post(MISTRAL, body(MISTRAL)).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "one, two", "tool_calls": None, "prefix": False}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["usage"] == USAGE


def test_usage_comes_unasked_with_the_last_choice(served: Served) -> None:
    *chunks, last = stream(served, MISTRAL)
    assert last["usage"] == USAGE
    assert last["choices"] == [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]
    assert all("usage" not in chunk for chunk in chunks)
    for chunk in (*chunks, last):
        assert isinstance(chunk["choices"][0]["delta"]["content"], str)


@pytest.mark.parametrize("suffix", [{}, {"suffix": None}, {"suffix": ""}])
def test_without_a_suffix_the_text_goes_on(small: Served, suffix: dict[str, Any]) -> None:
    asked = {"model": small.name, "prompt": "Count: 1 2 3", "temperature": 0, "max_tokens": 6}
    answer = small.post(MISTRAL, {**asked, **suffix}).json()
    assert text_of(answer) == text_of(small.post("/v1/completions", asked).json())


def test_a_model_without_infill_tokens(small: Served) -> None:
    response = small.post(MISTRAL, {"model": small.name, **MEAN})
    assert response.status_code == 400
    error = response.json()
    assert (error["object"], error["code"], error["param"]) == ("error", "unsupported", "suffix")


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"model": None}, "model", "`model` is required"),
        ({"prompt": None}, "prompt", "`prompt` is required"),
        ({"prompt": ["a"]}, "prompt", "`prompt` must be a valid string, got ['a']"),
        ({"suffix": 1}, "suffix", "`suffix` must be a valid string, got 1"),
        ({"max_tokens": -1}, "max_tokens", "`max_tokens` must be greater than or equal to 0, got -1"),
        ({"min_tokens": -1}, "min_tokens", "`min_tokens` must be greater than or equal to 0, got -1"),
        ({"temperature": 1.6}, "temperature", "`temperature` must be less than or equal to 1.5, got 1.6"),
        ({"top_p": 0}, "top_p", "`top_p` must be a number > 0 and <= 1, got 0"),
        ({"random_seed": -1}, "random_seed", "`random_seed` must be greater than or equal to 0, got -1"),
        ({"stop": [""]}, "stop", "`stop[0]` must have 1 to 256 bytes, got 0"),
        ({"metadata": 1}, "metadata", "`metadata` must be an object, got 1"),
    ],
)
def test_what_is_refused(served: Served, fields: dict[str, Any], name: str, message: str) -> None:
    assert refused(served, MISTRAL, 422, **fields) == ("invalid_value", message)
    assert served.post(MISTRAL, body(MISTRAL, **fields)).json()["detail"][0]["loc"] == ["body", name]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "seed", "echo", "stream_options", "n"])
def test_a_field_that_is_not_known(served: Served, name: str) -> None:
    code, message = refused(served, MISTRAL, 422, **{name: 1})
    assert code == "extra_forbidden"
    assert message.startswith(f"`{name}` is not a field of this path; those are model, prompt, suffix,")
    assert served.post(MISTRAL, body(MISTRAL, **{name: None})).status_code == 200


def test_what_has_no_effect_is_named(served: Served) -> None:
    response = served.post(MISTRAL, body(MISTRAL, metadata={"a": 1}, prompt_cache_key="k", stop=["x"], top_p=1))
    assert response.headers["legato-ignored"] == "metadata, prompt_cache_key"


def test_a_prompt_that_is_too_long(served: Served) -> None:
    code, message = refused(served, MISTRAL, 400, prompt="a" * 5000)
    assert code == "context_length_exceeded"
    assert "4096" in message
