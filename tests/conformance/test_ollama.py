"""Ollama's paths: its official client, sync and async, and plain requests, against a running server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx2
import ollama
import pytest

from legato.config import ServerSettings
from legato.engines.scripted import Fault, Pause
from legato.server import streaming
from legato.types import Tags
from tests.conformance.reading import CHAT, eventually, is_idle, user
from tests.conftest import NO_TLS, SMALL, Served, serve_script, serve_weights

GENERATE = "/api/generate"
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}
TAGS = Tags("<think>", "</think>")
COUNT = "Count: 1 2 3"


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator[ollama.Client]:
    """Ollama's client of the small model's server."""
    with ollama.Client(host=small.url) as client:
        yield client


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    """The small model, as if it thought between tags."""
    with serve_weights(SMALL, reasoning_open="<think>", reasoning_close="</think>") as served:
        yield served


def read_lines(response: httpx2.Response) -> list[dict[str, Any]]:
    """Read a stream, whose last line alone is done."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    lines = [json.loads(line) for line in response.text.split("\n")[:-1]]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def generate(served: Served, prompt: str, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the whole answer to a greedy raw prompt."""
    body = {"model": served.name, "prompt": prompt, "raw": True, "stream": False, **fields}
    response = served.post(GENERATE, {**body, "options": {"num_predict": 8, **GREEDY, **(options or {})}})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


def check_error(response: httpx2.Response, status: int) -> str:
    """Check an error's shape; return its text."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    text = response.json()["error"]
    assert isinstance(text, str)
    return text


def test_the_client_generates_and_streams(small: Served, client: ollama.Client) -> None:
    options = {**GREEDY, "num_predict": 8}
    whole = client.generate(small.name, COUNT, raw=True, options=options)
    assert whole.response == small.complete(COUNT, max_tokens=8)["choices"][0]["text"]
    assert (whole.model, whole.done, whole.done_reason) == (small.name, True, "length")
    assert (whole.prompt_eval_count, whole.eval_count) == (8, 8)
    assert whole.total_duration
    assert whole.eval_duration
    assert whole.total_duration >= whole.eval_duration
    assert whole.created_at
    assert datetime.fromisoformat(whole.created_at).tzinfo is not None
    *parts, last = client.generate(small.name, COUNT, raw=True, options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response
    assert (last.response, last.done, last.done_reason, last.eval_count) == ("", True, "length", 8)


def test_the_async_client_generates_and_streams(small: Served) -> None:
    async def use() -> None:
        options = {**GREEDY, "num_predict": 8}
        async with ollama.AsyncClient(host=small.url) as client:
            whole = await client.generate(small.name, COUNT, raw=True, options=options)
            stream = await client.generate(small.name, COUNT, raw=True, options=options, stream=True)
            assert "".join([part.response or "" async for part in stream]) == whole.response

    asyncio.run(use())


def test_the_client_lists_models(small: Served, client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == list(small.models.served)
    assert set(small.get("/api/tags").json()["models"][0]) >= {"name", "modified_at", "size", "digest", "details"}
    assert small.get("/api/version").json() == {"version": "0.1.0"}


def test_the_client_reads_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the model `none` does not exist") as caught:
        client.generate("none", "x")
    assert caught.value.status_code == 404
    with serve_script([b"ab", Fault("broken")]) as served, ollama.Client(host=served.url) as other:
        stream = other.generate("m", "x", stream=True)
        with pytest.raises(ollama.ResponseError, match="broken"):
            list(stream)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_stream_folds_to_the_whole(small: Served, fields: dict[str, Any]) -> None:
    whole = generate(small, COUNT, **fields)
    body = {"model": small.name, "prompt": COUNT, "raw": True, "options": {"num_predict": 8, **GREEDY}, **fields}
    lines = read_lines(small.post(GENERATE, body))
    assert "".join(line["response"] for line in lines) == whole["response"]
    logprobs = [token for line in lines for token in line.get("logprobs", [])]
    assert logprobs == whole.get("logprobs", [])
    for name in ("model", "done", "done_reason", "prompt_eval_count", "eval_count"):
        assert lines[-1][name] == whole[name]


def test_without_raw_the_prompt_is_a_users_turn(small: Served) -> None:
    options = {"top_k": 0, "top_p": 1}
    turns = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Say hello."}]
    expected = small.chat(*turns, max_tokens=8)["choices"][0]["message"]["content"]
    answer = generate(small, "Say hello.", options, raw=False, system="Answer in French.")
    assert answer["response"] == expected
    expected = small.chat(turns[1], max_tokens=8)["choices"][0]["message"]["content"]
    assert generate(small, "Say hello.", options, raw=False)["response"] == expected


def test_a_suffix_makes_an_infill(default: Served) -> None:
    prefix, suffix = "def mean(values):\n    tot", "\n    return total / len(values)\n"
    answer = generate(default, prefix, {"num_predict": 32}, raw=False, suffix=suffix)
    expected = default.complete(prefix, suffix=suffix, max_tokens=32)["choices"][0]["text"]
    assert answer["response"] == expected
    assert generate(default, "", {"num_predict": 4}, raw=False, suffix=suffix)["done_reason"] != "load"
    body = {"model": default.name, "prompt": "x", "suffix": "y", "raw": True, "options": {"num_predict": 1}}
    assert default.post(GENERATE, body).headers["legato-ignored"] == "suffix"


def test_a_suffix_needs_a_model_that_takes_one(small: Served) -> None:
    body = {"model": small.name, "prompt": "x", "suffix": "y"}
    assert "infill tokens" in check_error(small.post(GENERATE, body), 400)


def test_an_empty_prompt_only_asks_for_the_model(small: Served, client: ollama.Client) -> None:
    (line,) = read_lines(small.post(GENERATE, {"model": small.name}))
    answer = small.post(GENERATE, {"model": small.name, "prompt": "", "stream": False}).json()
    for value in (line, answer):
        assert set(value) == {"model", "created_at", "response", "done", "done_reason"}
        assert (value["response"], value["done_reason"]) == ("", "load")
    assert client.generate(small.name).done_reason == "load"
    check_error(small.post(GENERATE, {"model": "none"}), 404)


@pytest.mark.parametrize("limit", [-1, -2])
def test_without_a_limit_the_answer_goes_to_the_end_of_the_context(limit: int) -> None:
    with serve_script([b"x" * 500], context_length=100) as served:
        assert generate(served, "0123456789", {"num_predict": limit})["eval_count"] == 90


def test_what_is_zero_is_left_out(small: Served) -> None:
    answer = generate(small, COUNT, {"num_predict": 0})
    assert (answer["response"], answer["done_reason"]) == ("", "length")
    assert "eval_count" not in answer


def test_stops(small: Served) -> None:
    for stop in ("5", ["5", "nothing"]):
        answer = generate(small, COUNT, {"stop": stop})
        assert (answer["response"], answer["done_reason"]) == (" 4 ", "stop")


def test_logprobs(small: Served) -> None:
    answer = generate(small, COUNT, logprobs=True, top_logprobs=2)
    assert "".join(token["token"] for token in answer["logprobs"]) == answer["response"]
    assert [len(token["top_logprobs"]) for token in answer["logprobs"]] == [2] * 8
    assert "top_logprobs" not in generate(small, COUNT, logprobs=True)["logprobs"][0]
    assert "logprobs" not in generate(small, COUNT)


def test_a_cut_inside_a_word_does_not_show(small: Served) -> None:
    prompt = "The weather in the mountains"
    for options in ({}, {"temperature": 0.8}):
        text = prompt + generate(small, prompt, {"num_predict": 24, **options})["response"]
        for cut in range(len(prompt) + 1, len(prompt) + 13):
            rest = generate(small, text[:cut], {"num_predict": 24, **options})["response"]
            assert rest.startswith(text[cut : len(text) - 8])


def test_what_has_no_effect_is_named(small: Served, default: Served) -> None:
    options = {"num_predict": 1, "num_ctx": 4096, "repeat_last_n": 64, "mirostat": None, "stop": None}
    fields = {"keep_alive": "5m", "think": True, "truncate": True, "shift": True, "width": 5, "context": None}
    response = small.post(GENERATE, {"model": small.name, "prompt": "x", **fields, "options": options})
    named = "keep_alive, width, truncate, shift, options.num_ctx, options.repeat_last_n, think"
    assert response.headers["legato-ignored"] == named
    neutral = {"think": False, "truncate": False, "shift": False, "context": [], "images": [], "format": ""}
    response = small.post(GENERATE, {"model": small.name, "prompt": "x", **neutral, "options": {"num_predict": 1}})
    assert "legato-ignored" not in response.headers
    one = {"prompt": "x", "think": "low", "options": {"num_predict": 1}}
    for source in ({"raw": True}, {"suffix": "y"}):
        response = default.post(GENERATE, {"model": default.name, **one, **source})
        assert response.headers["legato-ignored"] == "think"


def test_thinking_is_apart_from_the_answer() -> None:
    with serve_script([b"<think>7 * 13", b" is 91.</th", b"ink>No."], reasoning=TAGS) as served:
        with ollama.Client(host=served.url) as thinker:
            whole = thinker.generate("m", "Is 91 prime?", think=True)
            parts = list(thinker.generate("m", "Is 91 prime?", stream=True))
        assert (whole.thinking, whole.response) == ("7 * 13 is 91.", "No.")
        assert "".join(part.thinking or "" for part in parts) == whole.thinking
        assert "".join(part.response for part in parts) == whole.response
        assert all(
            "thinking" not in line for line in read_lines(served.post(GENERATE, {"model": "m", "prompt": "x"}))[-2:]
        )


@pytest.mark.parametrize(("think", "effort"), [(False, "none"), ("low", "low"), ("max", "max")])
def test_thinking_has_its_levels(thinker: Served, think: bool | str, effort: str) -> None:
    options = {"num_predict": 20, **GREEDY}
    body = {"model": thinker.name, "prompt": "Is 91 prime?", "stream": False, "options": options}
    answer = thinker.post(GENERATE, {**body, "think": think}).json()
    plain = {"model": thinker.name, "messages": [user("Is 91 prime?")], "max_tokens": 20, **GREEDY}
    message = thinker.post(CHAT, {**plain, "reasoning_effort": effort}).json()["choices"][0]["message"]
    assert answer["response"] == message["content"] != ""
    assert answer.get("thinking", "") == (message["reasoning_content"] or "")


def test_what_editors_send_is_answered(default: Served) -> None:
    zed = {"raw": True, "stream": False, "options": {"num_predict": 8, "temperature": 0.2, "stop": ["<|endoftext|>"]}}
    prompt = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n<|fim_middle|>"
    answer = default.post(GENERATE, {"model": default.name, "prompt": prompt, **zed}).json()
    assert answer["response"].startswith("a + b")
    continues = {"prompt": "def add(a, b):\n    return ", "suffix": "\n", "raw": False, "keep_alive": 1800}
    body = {"model": default.name, **continues, "options": {"num_predict": 8, "temperature": 0}, "stream": True}
    lines = read_lines(default.post(GENERATE, body))
    assert "".join(line["response"] for line in lines).startswith("a + b")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"prompt": ["x"]}, "prompt"),
        ({"suffix": 5}, "suffix"),
        ({"system": 5}, "system"),
        ({"stream": "no"}, "stream"),
        ({"raw": 1}, "raw"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "template": "x"}, "template"),
        ({"raw": True, "context": [1]}, "context"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1]}, "context"),
        ({"images": ["eA=="]}, "images"),
        ({"format": {"type": "objekt"}}, "format"),
        ({"format": "yaml"}, "format"),
        ({"think": "some"}, "think"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"options": []}, "options"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"num_predict": "5"}}, "options.num_predict"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"top_k": -2}}, "options.top_k"),
        ({"options": {"top_p": 0}}, "options.top_p"),
        ({"options": {"min_p": 2}}, "options.min_p"),
        ({"options": {"seed": 2**64}}, "options.seed"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"options": {"presence_penalty": 3}}, "options.presence_penalty"),
        ({"options": {"frequency_penalty": 3}}, "options.frequency_penalty"),
        ({"options": {"stop": [""]}}, "stop"),
        ({"options": {"stop": ["x"] * 33}}, "stop"),
    ],
)
def test_bad_values_are_refused_by_name(small: Served, fields: dict[str, Any], name: str) -> None:
    body = {"model": small.name, "prompt": "x", **fields}
    assert name in check_error(small.post(GENERATE, body), 400)


def test_silence_is_filled_with_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with serve_script([b"a", Pause(0.3), b"b"]) as served:
        response = served.post(GENERATE, {"model": "m", "prompt": "x", "raw": True})
        assert "\n  " in response.text
        assert "".join(line["response"] for line in read_lines(response)) == "ab"
        with ollama.Client(host=served.url) as client:
            parts = client.generate("m", "x", raw=True, stream=True)
            assert "".join(part.response or "" for part in parts) == "ab"


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_place(is_streamed: bool) -> None:
    with serve_script([b"a", Pause(60), b"b"]) as served:
        body = {"model": "m", "prompt": "x", "raw": True, "stream": is_streamed}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(served.url + GENERATE, json=body, timeout=1, verify=NO_TLS)
        assert eventually(lambda: is_idle(served))
        assert served.engine.num_cancelled == 1


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server that wants a key."""
    with serve_script([b"ok"], server=ServerSettings(port=0, api_keys=("right",))) as served:
        yield served


def test_other_methods_are_refused_as_ollama_does(small: Served) -> None:
    assert "POST" in check_error(small.get(GENERATE), 405)
    assert "/api/chat" in check_error(small.post("/api/chat", {}), 404)


def test_a_key_is_wanted(locked: Served) -> None:
    body = {"model": "m", "prompt": "x", "raw": True, "stream": False}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "right"}):
        check_error(locked.post(GENERATE, body, headers=headers), 401)
        check_error(locked.get("/api/tags", headers=headers), 401)
    with ollama.Client(host=locked.url, headers={"Authorization": "Bearer right"}) as client:
        assert client.generate("m", "x", raw=True).response == "ok"
