"""DashScope's compatible mode: infill markers in the prompt, Partial Mode, the vendor's examples and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from legato.config import ServerSettings
from tests.conformance.reading import text_of, user
from tests.conformance.vendors import DASHSCOPE, DASHSCOPE_CHAT, body, refused, run_example
from tests.conftest import Served, serve_script

MODEL = "qwen2.5-coder-32b-instruct"
SORT = "Write a Python quick sort function, def quick_sort(arr):"
REVERSE = (
    'def reverse_words_with_special_chars(s):\n"""\nReverses each word in a string (preserving the position of '
    "non-alphabetic characters) while maintaining the word order.\n    Example:\n    "
    'reverse_words_with_special_chars("Hello, world!") -> "olleH, dlrow!"\n    Parameters:\n        s (str): The input '
    "string (may contain punctuation).\n    Returns:\n        str: The processed string with words reversed but "
    'non-alphabetic characters in their original positions.\n"""\n'
)
INVALID = "<400> InternalError.Algo.InvalidParameter: "


def laid_out(prefix: str, suffix: str) -> str:
    """A prompt with the vendor's markers."""
    return f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script([b"one, two"]) as served:
        yield served


@pytest.mark.parametrize("prompt", [f"<|fim_prefix|>{SORT}<|fim_suffix|>", laid_out(REVERSE, "return result")])
def test_the_documented_bodies(default: Served, prompt: str) -> None:
    response = default.post(DASHSCOPE, {"model": MODEL, "prompt": prompt})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    assert (answer["object"], answer["model"], answer["system_fingerprint"]) == ("text_completion", MODEL, None)
    (choice,) = answer["choices"]
    assert set(choice) == {"text", "index", "finish_reason", "logprobs"}
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert choice["text"]
    assert "fim_" not in choice["text"]


@pytest.mark.parametrize("language", ["py", "mjs", "sh"])
@pytest.mark.parametrize("name", ["dashscope_prefix", "dashscope_infill"])
def test_the_documented_programs(default: Served, name: str, language: str, node_packages: Path) -> None:
    printed = run_example(default, f"{name}.{language}", node_packages)
    assert (text_of(json.loads(printed)) if language == "sh" else printed).strip()


@pytest.mark.parametrize(
    ("prompt", "source"),
    [
        ("plain text", {"prompt": "plain text"}),
        (f"<|fim_prefix|>{SORT}<|fim_suffix|>", {"prompt": SORT}),
        (
            laid_out("def mean(xs):\n    tot", "\n    return total / len(xs)\n"),
            {"prompt": "def mean(xs):\n    tot", "suffix": "\n    return total / len(xs)\n"},
        ),
        (laid_out("def mean(xs):\n    ret", ""), {"prompt": "def mean(xs):\n    ret", "suffix": ""}),
    ],
)
def test_markers_are_a_spelling(default: Served, prompt: str, source: dict[str, str]) -> None:
    """The texts between them are healed at the seam and hold no control tokens, as with fields of their own."""
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    response = default.post(DASHSCOPE, {**asked, "prompt": prompt})
    expected = default.post("/v1/completions", {**asked, **source})
    assert text_of(response.json()) == text_of(expected.json())
    assert response.headers["legato-healed"] == expected.headers["legato-healed"]


def test_markers_need_a_model_with_infill_tokens_only_for_a_suffix(small: Served) -> None:
    plain = small.post(DASHSCOPE, {"model": small.name, "prompt": "<|fim_prefix|>One, two,<|fim_suffix|>"})
    assert plain.status_code == 200
    response = small.post(DASHSCOPE, {"model": small.name, "prompt": laid_out("One,", "three")})
    assert response.status_code == 400
    assert "needs a model with infill tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|fim_suffix|>text<|fim_middle|>",
        "<|fim_prefix|>text",
        "<|fim_prefix|>a<|fim_suffix|>b",
        "<|fim_prefix|>a<|fim_middle|>",
        "text<|fim_prefix|>a<|fim_suffix|>",
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>text",
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_suffix|>c<|fim_middle|>",
        "<|fim_suffix|>b<|fim_prefix|>a<|fim_middle|>",
    ],
)
def test_markers_in_another_order_are_refused(served: Served, prompt: str) -> None:
    code, message = refused(served, DASHSCOPE, 400, prompt=prompt)
    assert code == "invalid_parameter_error"
    assert message.startswith(f"{INVALID}`prompt` has infill markers, but is neither `<|fim_prefix|>PREFIX")


def test_a_suffix_alone_is_refused(served: Served) -> None:
    _, message = refused(served, DASHSCOPE, 400, prompt=laid_out("", "return result"))
    assert "cannot be written from the suffix alone" in message


@pytest.mark.parametrize("path", [DASHSCOPE, DASHSCOPE_CHAT])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "`model` is required"),
        ({"model": 1}, "`model` must be a valid string, got 1"),
        ({"max_tokens": 0}, "`max_tokens` must be greater than or equal to 1, got 0"),
        ({"max_tokens": 1.5}, "`max_tokens` must be a valid integer, got 1.5"),
        ({"temperature": -0.1}, None),
        ({"temperature": 2.1}, None),
        ({"top_p": 0}, "`top_p` must be a number > 0 and <= 1, got 0"),
        ({"top_p": 1.1}, "`top_p` must be a number > 0 and <= 1, got 1.1"),
        ({"top_p": "x"}, "`top_p` must be a number > 0 and <= 1, got 'x'"),
        ({"seed": -1}, "`seed` must be greater than or equal to 0, got -1"),
        ({"seed": 2**31}, f"`seed` must be less than {2**31}, got {2**31}"),
        ({"presence_penalty": 2.5}, "`presence_penalty` must be less than or equal to 2, got 2.5"),
        ({"presence_penalty": -2.5}, "`presence_penalty` must be greater than or equal to -2, got -2.5"),
        ({"stop": [""]}, "`stop[0]` must have 1 to 256 bytes, got 0"),
        ({"stop": ["a"] * 33}, "`stop` takes at most 32 texts, got 33"),
        ({"stream_options": 1}, "`stream_options` must be an object, got 1"),
    ],
)
def test_what_is_refused(served: Served, path: str, fields: dict[str, Any], message: str | None) -> None:
    code, told = refused(served, path, 400, **fields)
    assert code == "invalid_parameter_error"
    assert told.startswith(INVALID)
    assert message is None or told == INVALID + message
    (name,) = fields
    assert f"`{name}" in told


def test_the_ends_of_ranges(served: Served) -> None:
    for fields in (
        {"temperature": 0, "top_p": 1.0, "seed": 0, "presence_penalty": -2.0, "max_tokens": 1},
        {"temperature": 1.99, "top_p": 0.01, "seed": 2**31 - 1, "presence_penalty": 2.0, "max_tokens": 65536},
    ):
        assert served.post(DASHSCOPE, body(DASHSCOPE, **fields)).status_code == 200
    assert "< 2" in refused(served, DASHSCOPE, 400, temperature=2.0)[1]
    assert served.post(DASHSCOPE_CHAT, body(DASHSCOPE_CHAT, temperature=2.0)).status_code == 200


@pytest.mark.parametrize("prompt", [["a"], [1, 2], 1, None])
def test_a_prompt_is_one_text(served: Served, prompt: Any) -> None:
    _, message = refused(served, DASHSCOPE, 400, prompt=prompt)
    assert "`prompt`" in message


def test_stops_are_texts_and_token_ids(small: Served) -> None:
    asked = {"model": small.name, "prompt": "Count: 1 2 3", "temperature": 0, "max_tokens": 12}
    reference = small.post("/v1/completions", {**asked, "return_token_ids": True}).json()["choices"][0]
    id = reference["token_ids"][4]
    text = text_of({"choices": [reference]})
    for stop in (id, -1, True):
        assert small.post(DASHSCOPE, {**asked, "stop": stop}).status_code == 400
    assert small.post(DASHSCOPE, {**asked, "stop": [-1]}).status_code == 400
    by_id = small.post("/v1/completions", {**asked, "stop_token_ids": [id]}).json()
    for stop, expected in (
        (text[5:7], text[: text.index(text[5:7])]),
        ([text[5:7], "never"], text[: text.index(text[5:7])]),
        ([id], text_of(by_id)),
        (["never", id], text_of(by_id)),
    ):
        response = small.post(DASHSCOPE, {**asked, "stop": stop})
        assert text_of(response.json()) == expected
        assert response.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("field", ["n", "best_of", "echo", "logprobs", "suffix"])
def test_fields_that_this_path_does_not_have(served: Served, field: str) -> None:
    value: Any = {"n": 2, "best_of": 2, "echo": True, "logprobs": 1, "suffix": "x"}[field]
    response = served.post(DASHSCOPE, body(DASHSCOPE, **{field: value}))
    assert response.headers["legato-ignored"] == field
    (choice,) = response.json()["choices"]
    assert (choice["text"], choice["logprobs"]) == ("one, two", None)


def test_partial_mode(small: Served) -> None:
    messages = [user("A loop in Go."), {"role": "assistant", "content": "for i :=", "partial": True}]
    with openai.OpenAI(base_url=f"{small.url}/compatible-mode/v1", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": small.name, "messages": messages, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked, extra_body={"enable_thinking": False})
        chunks = list(client.chat.completions.create(**asked, stream=True))
    text = whole.choices[0].message.content
    assert text
    assert not text.startswith("for i")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize("at", [0, 1])
def test_partial_mode_and_thinking(served: Served, at: int) -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[at]["partial"] = True  # type: ignore[assignment]
    assert refused(served, DASHSCOPE_CHAT, 400, messages=messages, enable_thinking=True) == (
        "invalid_parameter_error",
        f"{INVALID}Partial mode is not supported when enable_thinking is true",
    )


def test_a_wrong_number_of_alternatives(served: Served) -> None:
    _, message = refused(served, DASHSCOPE_CHAT, 400, logprobs=True, top_logprobs=6)
    assert message == f"{INVALID}`top_logprobs` must be less than or equal to 5, got 6"


def test_a_wrong_key_has_the_vendors_words() -> None:
    with serve_script([b"x"], server=ServerSettings(port=0, api_keys=("right",))) as served:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            error = served.post(DASHSCOPE, body(DASHSCOPE), headers=headers).json()["error"]
            assert error["message"] == "Incorrect API key provided. "
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
