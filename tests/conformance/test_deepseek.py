"""DeepSeek's beta routes: prefix, infill, what the cache gave, the vendor's limits and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conformance.reading import text_of, user
from tests.conformance.vendors import DEEPSEEK, DEEPSEEK_CHAT, body, refused, stream
from tests.conftest import Served, serve_script

INVALID = "invalid_request_error"
FENCE = [user("Please write quick sort code"), {"role": "assistant", "content": "```python\n", "prefix": True}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script([b"one, two"]) as served:
        yield served


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small.url}/beta", api_key="any", max_retries=0) as client:
        yield client


def test_r12_the_documented_prefix(small: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "deepseek-v3.2", "messages": FENCE, "stop": ["```"], "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=24)
    chunks = list(client.chat.completions.create(**asked, max_tokens=24, stream=True))
    text = whole.choices[0].message.content
    assert text
    assert "```" not in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert whole.system_fingerprint is not None
    assert whole.system_fingerprint.startswith("fp_")


def test_the_documented_infill(default: Served) -> None:
    asked = {
        "model": "deepseek-v3.2",
        "prompt": "def fib(a):",
        "suffix": "    return fib(a-1) + fib(a-2)",
        "max_tokens": 24,
        "temperature": 0,
    }
    answer = default.post(DEEPSEEK, asked).json()
    assert answer["object"] == "text_completion"
    assert text_of(answer)
    assert text_of(answer) == text_of(default.post("/v1/completions", asked).json())


def test_r12_without_a_suffix_the_text_goes_on(small: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": small.name, "prompt": "One, two,", "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**asked)
    assert client.completions.create(**asked, suffix=None).choices[0].text == plain.choices[0].text
    assert plain.usage is not None
    echoed = client.completions.create(**asked, echo=True, logprobs=2)
    assert echoed.choices[0].text == f"One, two,{plain.choices[0].text}"
    assert echoed.choices[0].logprobs is not None
    assert len(echoed.choices[0].logprobs.tokens or ()) == 6 + plain.usage.prompt_tokens


@pytest.mark.parametrize("path", [DEEPSEEK, DEEPSEEK_CHAT])
def test_usage_tells_what_the_cache_gave(small: Served, path: str) -> None:
    text = f"{path} is cached, and it is long enough to be found again."
    source = {"prompt": text} if path == DEEPSEEK else {"messages": [user(text)]}
    usages = [small.post(path, {"model": small.name, "max_tokens": 2, **source}).json()["usage"] for _ in range(2)]
    for usage in usages:
        assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
    assert usages[1]["prompt_cache_hit_tokens"] > usages[0]["prompt_cache_hit_tokens"]


def test_usage_of_a_stream_has_the_same_keys(served: Served) -> None:
    *_, last = stream(served, DEEPSEEK, stream_options={"include_usage": True})
    assert set(last["usage"]) >= {"prompt_cache_hit_tokens", "prompt_cache_miss_tokens"}


@pytest.mark.parametrize("path", [DEEPSEEK, DEEPSEEK_CHAT])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "`model` is required"),
        *(
            (
                {"max_tokens": given},
                f"Invalid max_tokens value, the valid range of max_tokens is [1, 393216], got {given}",
            )
            for given in (0, 393217)
        ),
        ({"max_tokens": "1"}, "`max_tokens` must be a whole number, 1 to 393216, got '1'"),
        ({"stop": ["a"] * 17}, "`stop` takes at most 16 texts, got 17"),
        ({"stop": ""}, "`stop[0]` must have 1 to 256 bytes, got 0"),
        ({"temperature": 2.1}, "`temperature` must be less than or equal to 2, got 2.1"),
        ({"top_p": 1.1}, "`top_p` must be a number > 0 and <= 1, got 1.1"),
        ({"frequency_penalty": 2.1}, "`frequency_penalty` must be less than or equal to 2, got 2.1"),
        ({"presence_penalty": -2.1}, "`presence_penalty` must be greater than or equal to -2, got -2.1"),
    ],
)
def test_what_is_refused(served: Served, path: str, fields: dict[str, Any], message: str) -> None:
    assert refused(served, path, 400, **fields) == (INVALID, message)


@pytest.mark.parametrize("path", [DEEPSEEK, DEEPSEEK_CHAT])
def test_the_ends_of_ranges(served: Served, path: str) -> None:
    for fields in (
        {"max_tokens": 1, "stop": [f"x{at}" for at in range(16)], "temperature": 0, "presence_penalty": -2},
        {"max_tokens": 393216, "stop": "x", "temperature": 2, "top_p": 1, "frequency_penalty": 2},
    ):
        assert served.post(path, body(path, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (DEEPSEEK, {"prompt": ["a"]}, "prompt"),
        (DEEPSEEK, {"prompt": None}, "prompt"),
        (DEEPSEEK, {"suffix": 1}, "suffix"),
        (DEEPSEEK, {"echo": 1}, "echo"),
        (DEEPSEEK, {"logprobs": 21}, "logprobs"),
        (DEEPSEEK_CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (DEEPSEEK_CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (DEEPSEEK_CHAT, {"thinking": {"type": "perhaps"}}, "thinking.type"),
        (DEEPSEEK_CHAT, {"messages": []}, "messages"),
        (DEEPSEEK_CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (DEEPSEEK_CHAT, {"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_a_refusal_names_the_field(served: Served, path: str, fields: dict[str, Any], name: str) -> None:
    code, message = refused(served, path, 400, **fields)
    assert code == INVALID
    assert f"`{name}`" in message


def test_a_prompt_that_is_too_long_has_openais_words(served: Served) -> None:
    code, message = refused(served, DEEPSEEK, 400, prompt="a" * 5000)
    assert code == INVALID
    assert "maximum context length is 4096 tokens" in message


def test_thinking_and_an_unmarked_answer_at_the_end(served: Served) -> None:
    turns = [user("a"), {"role": "assistant", "content": "b"}]
    assert refused(served, DEEPSEEK_CHAT, 400, messages=turns, thinking={"type": "enabled"}) == (
        INVALID,
        "The last message of m must be a user message, or an assistant message with prefix mode on "
        "(refer to https://api-docs.deepseek.com/guides/chat_prefix_completion).",
    )
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        response = served.post(DEEPSEEK_CHAT, body(DEEPSEEK_CHAT, messages=turns, **fields))
        assert response.status_code == 200
        assert "legato-ignored" not in response.headers


@pytest.mark.parametrize("field", ["best_of", "instructions", "n"])
def test_fields_that_the_infill_does_not_have(served: Served, field: str) -> None:
    value = "x" if field == "instructions" else 2
    assert served.post(DEEPSEEK, body(DEEPSEEK, **{field: value})).headers["legato-ignored"] == field
