"""The paths of llama.cpp's server, as its clients use them, against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from legato.config import ServerSettings
from legato.engines.scripted import Fault, Pause
from tests.conformance.reading import eventually, is_idle
from tests.conftest import NO_TLS, Served, serve_script

COMPLETION, INFILL = "/completion", "/infill"
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}
PREFIX = 'def mean(values):\n    """Return the mean."""\n'
SUFFIX = "\n    return total / len(values)\n"


def ask(served: Served, path: str, body: dict[str, Any]) -> Any:
    """Post, and return the answer."""
    response = served.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def complete(served: Served, prompt: Any, **fields: Any) -> Any:
    """Return the answer to a greedy completion."""
    return ask(served, COMPLETION, {"prompt": prompt, "n_predict": 8, **GREEDY, **fields})


def infill(served: Served, **fields: Any) -> Any:
    """Return the answer to a greedy infill."""
    return ask(served, INFILL, {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 16, **GREEDY, **fields})


def read_stream(data: bytes) -> list[dict[str, Any]]:
    """Read a stream, which has no `[DONE]`."""
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


def fold(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put a stream together again: the objects of its answer without `stream`."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        before = choices.get(event["index"], {})
        assert not before.get("stop"), "an object after the last"
        joined = {name: before.get(name, type(value)()) + value for name, value in event.items() if name in _JOINED}
        if not event["stop"]:
            assert event["tokens_predicted"] == len(joined["tokens"])
        else:
            assert (event["content"], event["tokens"]) == ("", [])
            assert before.get("tokens_evaluated", event["tokens_evaluated"]) == event["tokens_evaluated"]
        choices[event["index"]] = {**event, **joined}
    return [choices[index] for index in sorted(choices)]


_JOINED = ("content", "tokens", "completion_probabilities")


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Leave out what differs from run to run."""
    settings = {name: value for name, value in answer["generation_settings"].items() if name != "stream"}
    varying = ("timings", "tokens_cached")
    return {**{name: value for name, value in answer.items() if name not in varying}, "generation_settings": settings}


def check_error(response: httpx2.Response, status: int, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Check an error's shape; return it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) >= {"code", "message", "type"}
    assert (error["code"], error["type"]) == (status, kind)
    answer: dict[str, Any] = error
    return answer


# ---------------------------------------------------------------------------------------------------------------------
# /completion


def test_an_answer_has_every_key(small: Served) -> None:
    answer = complete(small, "Count: 1 2 3")
    assert set(answer) == {
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated",
        "tokens_cached", "generation_settings", "prompt", "truncated", "stop_type", "stopping_word", "timings",
        "has_new_line",
    }  # fmt: skip
    assert answer["content"]
    assert (answer["index"], answer["stop"], answer["truncated"], answer["tokens"]) == (0, True, False, [])
    assert (answer["model"], answer["prompt"]) == (small.name, "Count: 1 2 3")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (8, 8)
    assert (answer["stop_type"], answer["stopping_word"]) == ("limit", "")
    assert answer["generation_settings"]["seed"] == 7
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == 8
    assert timings["predicted_n"] == 8
    assert timings["predicted_ms"] > 0
    for name in ("prompt", "predicted"):
        assert {f"{name}_n", f"{name}_ms", f"{name}_per_token_ms", f"{name}_per_second"} <= set(timings)


def test_the_text_is_that_of_the_other_routes(small: Served) -> None:
    same = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8, "max_tokens": 12}
    expected = small.complete("Once upon a ti", **same)["choices"][0]["text"]
    assert ask(small, COMPLETION, {"prompt": "Once upon a ti", "n_predict": 12, "seed": 7})["content"] == expected


@pytest.mark.parametrize("fields", [{}, {"n_probs": 3}, {"stop": ["4"]}, {"n_cmpl": 2, "temperature": 1}])
def test_a_stream_folds_to_the_whole(small: Served, fields: dict[str, Any]) -> None:
    body = {"prompt": "Count: 1 2 3", "n_predict": 8, **GREEDY, **fields}
    whole = ask(small, COMPLETION, {**body, "return_tokens": True})
    response = small.post(COMPLETION, {**body, "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    assert b"[DONE]" not in response.content
    answers = whole if isinstance(whole, list) else [whole]
    assert [comparable(answer) for answer in fold(read_stream(response.content))] == list(map(comparable, answers))


def test_a_prompt_is_text_ids_or_both(small: Served) -> None:
    text = "The capital of Fran"
    expected = complete(small, text)
    ids = ask(small, "/tokenize", {"content": text})["tokens"]
    head = ask(small, "/detokenize", {"tokens": ids[:2]})["content"]
    for prompt in (ids, [*ids[:2], text[len(head) :]]):
        answer = complete(small, prompt)
        assert answer["content"] == expected["content"]
        assert answer["prompt"] == prompt
        assert answer["tokens_evaluated"] == expected["tokens_evaluated"]


def test_several_prompts_give_a_list(small: Served) -> None:
    ids = ask(small, "/tokenize", {"content": "One, two"})["tokens"]
    answers = complete(small, ["Count: 1 2 3", ids, [ids[0], ", two"]], n=2)
    assert [answer["index"] for answer in answers] == list(range(6))
    assert answers[0]["content"] == complete(small, "Count: 1 2 3")["content"]
    assert [answer["prompt"] for answer in answers[::2]] == ["Count: 1 2 3", ids, [ids[0], ", two"]]


@pytest.mark.parametrize("alias", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_the_limit_has_three_names(small: Served, alias: str) -> None:
    assert ask(small, COMPLETION, {"prompt": "Count: 1 2 3", alias: 3, **GREEDY})["tokens_predicted"] == 3


def test_without_a_limit_the_answer_goes_to_the_end_of_the_context() -> None:
    with serve_script([b"x" * 500], context_length=100) as served:
        for fields in ({}, {"n_predict": -1}):
            response = served.post(COMPLETION, {"prompt": "0123456789", **fields})
            assert response.json()["tokens_predicted"] == 90
            assert "legato-clipped" not in response.headers
        assert served.post(COMPLETION, {"prompt": "a", "n_predict": 200}).headers["legato-clipped"] == "max_tokens"


def test_a_limit_of_zero_only_reads_the_prompt(small: Served) -> None:
    prompt = "".join(f"Line {number} of a text that is warmed up.\n" for number in range(30))
    warm = complete(small, prompt, n_predict=0, samplers=[])
    assert (warm["content"], warm["tokens_predicted"], warm["stop_type"]) == ("", 0, "limit")
    assert complete(small, prompt, n_predict=1)["tokens_cached"] >= warm["tokens_evaluated"] - 2


def test_stops(small: Served) -> None:
    answer = complete(small, "Count: 1 2 3", stop=["5", "nothing"])
    assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == (" 4 ", "word", "5")
    assert complete(small, "Count: 1 2 3", stop="5")["content"] == " 4 "


def test_the_end_of_the_model_is_eos() -> None:
    with serve_script([b"a\nb"]) as served:
        answer = served.post(COMPLETION, {"prompt": "x"}).json()
    assert (answer["content"], answer["stop_type"], answer["has_new_line"]) == ("a\nb", "eos", True)


def test_the_seed_is_drawn_unless_it_is_given(small: Served) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 12}
    for seed in (-1, 2**32 - 1):
        answer = ask(small, COMPLETION, {**body, "seed": seed})
        drawn = answer["generation_settings"]["seed"]
        assert drawn not in (-1, 2**32 - 1)
        assert ask(small, COMPLETION, {**body, "seed": drawn})["content"] == answer["content"]


@pytest.mark.parametrize("form", ["pairs", "object"])
def test_logit_bias(small: Served, form: str) -> None:
    first = complete(small, "Count: 1 2 3", n_predict=1, return_tokens=True)
    (banned,) = first["tokens"]
    (wanted,) = ask(small, "/tokenize", {"content": " seven"})["tokens"]
    pairs = [[banned, False], [wanted, 1000]]
    bias = pairs if form == "pairs" else {str(id): value for id, value in pairs}
    answer = complete(small, "Count: 1 2 3", n_predict=1, logit_bias=bias, return_tokens=True)
    assert (answer["tokens"], answer["content"]) == ([wanted], " seven")
    assert complete(small, "Count: 1 2 3", n_predict=1, logit_bias=[[banned, False]])["content"] != first["content"]


@pytest.mark.parametrize("bias", [[[" seven", 1000]], {" seven": 1000}])
def test_logit_bias_by_text(small: Served, bias: Any) -> None:
    assert complete(small, "Count: 1 2 3", n_predict=1, logit_bias=bias)["content"] == " seven"


def test_a_text_with_a_bias_stands_for_each_of_its_tokens(small: Served) -> None:
    first = complete(small, "Count: 1 2 3", return_tokens=True)
    banned = first["content"]
    ids = ask(small, "/tokenize", {"content": banned})["tokens"]
    assert len(ids) > 1
    answer = complete(small, "Count: 1 2 3", logit_bias=[[banned, False]], return_tokens=True)
    assert not {*ids} & {*answer["tokens"]}
    assert answer == complete(small, "Count: 1 2 3", logit_bias=[[id, False] for id in ids], return_tokens=True) | {
        "timings": answer["timings"],
        "tokens_cached": answer["tokens_cached"],
    }


def test_probabilities(small: Served) -> None:
    answer = complete(small, "Count: 1 2 3", n_probs=3, n_predict=2, return_tokens=True)
    scored = answer["completion_probabilities"]
    assert [token["id"] for token in scored] == answer["tokens"]
    assert "".join(token["token"] for token in scored) == answer["content"]
    for token in scored:
        assert set(token) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert [set(other) for other in token["top_logprobs"]] == [{"id", "token", "bytes", "logprob"}] * 3
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
    assert complete(small, "Count: 1 2 3", logprobs=3, n_predict=2)["completion_probabilities"] == scored
    assert "completion_probabilities" not in complete(small, "Count: 1 2 3")


def test_penalties_have_their_names(small: Served) -> None:
    loop = "ha ha ha ha ha ha ha ha ha ha"
    plain = complete(small, loop)["content"]
    for name, value in (("repeat_penalty", 2.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
        assert complete(small, loop, **{name: value})["content"] != plain
        assert complete(small, loop, **{name: value}, repeat_last_n=0)["content"] == plain


def test_writing_ends_in_time(small: Served) -> None:
    started = time.monotonic()
    answer = complete(small, "Once upon a time", n_predict=4000, ignore_eos=True, t_max_predict_ms=300)
    assert time.monotonic() - started < 10
    assert (answer["stop_type"], 0 < answer["tokens_predicted"] < 4000) == ("limit", True)


def test_a_limit_of_time_does_not_count_the_wait_for_the_first_token() -> None:
    with serve_script([Pause(0.3), b"ab", Pause(30), b"cd"]) as served:
        answer = served.post(COMPLETION, {"prompt": "x", "t_max_predict_ms": 100}).json()
    assert (answer["content"], answer["stop_type"]) == ("ab", "limit")


def test_r17_reading_ends_in_time() -> None:
    with serve_script([Pause(30), b"ab"]) as served:
        for fields in ({}, {"t_max_predict_ms": 60_000}):
            answer = served.post(COMPLETION, {"prompt": "x", "t_max_prompt_ms": 100, **fields}).json()
            assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == ("", "limit", 0)
            assert 100 <= answer["timings"]["prompt_ms"] < 5000
            assert eventually(lambda: is_idle(served))
    with serve_script([b"a", Pause(0.3), b"b"]) as served:
        assert served.post(COMPLETION, {"prompt": "x", "t_max_prompt_ms": 100}).json()["content"] == "ab"


def test_r17_what_was_read_in_time_is_not_read_again(small: Served) -> None:
    prompt = "".join(f"Row {number} of a text that is too long to be read at once.\n" for number in range(60))
    cached = []
    for _ in range(100):
        answer = complete(small, prompt, n_predict=1, t_max_prompt_ms=20)
        cached.append(answer["tokens_cached"])
        if answer["tokens_predicted"]:
            break
        assert (answer["content"], answer["stop_type"]) == ("", "limit")
    assert len(cached) > 2
    assert cached == sorted(set(cached)), "each goes on where the one before was stopped"
    assert answer["tokens_predicted"] == 1


def test_what_has_no_effect_is_named(small: Served) -> None:
    fields = {"id_slot": 0, "mirostat": 0, "repeat_last_n": 64, "penalty_last_n": 0, "typical_p": None}
    response = small.post(COMPLETION, {"prompt": "x", "n_predict": 1, **fields})
    assert response.headers["legato-ignored"] == "id_slot, mirostat, penalty_last_n, repeat_last_n"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"prompt_string": "x"}}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": "8"}, "n_predict"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 33}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_cmpl": 17}, "n_cmpl"),
        ({"n_cmpl": 16, "prompt": ["x"] * 5}, "n_cmpl"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[True, 5]]}, "logit_bias"),
        ({"logit_bias": [[5]]}, "logit_bias"),
        ({"logit_bias": [["", 5]]}, "logit_bias"),
        ({"logit_bias": {"a": True}}, "logit_bias"),
        ({"logit_bias": {"a": "5"}}, "logit_bias"),
        ({"logit_bias": [[5, 1e5]]}, "logit_bias"),
        ({"logit_bias": [[10**8, 5]]}, "logit_bias"),
        ({"t_max_prompt_ms": -1}, "t_max_prompt_ms"),
        ({"t_max_predict_ms": -1}, "t_max_predict_ms"),
        ({"stream": "yes"}, "stream"),
        ({"cache_prompt": 1}, "cache_prompt"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_values_are_refused_by_name(small: Served, fields: dict[str, Any], name: str) -> None:
    error = check_error(small.post(COMPLETION, {"prompt": "x", **fields}), 400)
    assert f"`{name}" in error["message"]


def test_what_is_not_there_is_refused(small: Served) -> None:
    body = {"prompt": "x", "n_probs": 1, "post_sampling_probs": True}
    check_error(small.post(COMPLETION, body), 501, "not_supported_error")


def test_errors_have_numbers_for_codes(small: Served) -> None:
    check_error(small.post(COMPLETION, {"prompt": "x", "model": "none"}), 404, "not_found_error")
    check_error(small.post(COMPLETION, []), 400)
    assert "POST" in check_error(small.get(COMPLETION), 405)["message"]
    error = check_error(small.post(COMPLETION, {"prompt": "x " * 9000}), 400, "exceed_context_size_error")
    assert error["n_prompt_tokens"] > error["n_ctx"] > 0
    check_error(small.post(INFILL, {"input_prefix": "x", "input_suffix": "y"}), 501, "not_supported_error")


def test_a_failure_in_a_stream_is_an_event() -> None:
    with serve_script([b"ab", Fault("broken")]) as served:
        *pieces, last = read_stream(served.post(COMPLETION, {"prompt": "x", "stream": True}).content)
    assert "".join(piece["content"] for piece in pieces) == "ab"
    assert last == {"error": {"code": 500, "message": "broken", "type": "server_error"}}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_place(is_streamed: bool) -> None:
    with serve_script([b"a", Pause(60), b"b"]) as served:
        body = {"prompt": "x", "stream": is_streamed}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(served.url + COMPLETION, json=body, timeout=1, verify=NO_TLS)
        assert eventually(lambda: is_idle(served))
        assert served.engine.num_cancelled == 1


# ---------------------------------------------------------------------------------------------------------------------
# The seam


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8}])
def test_a_cut_inside_a_word_does_not_show(small: Served, fields: dict[str, Any]) -> None:
    prompt = "The weather in the mountains"
    text = prompt + complete(small, prompt, n_predict=24, **fields)["content"]
    for cut in range(len(prompt) + 1, len(prompt) + 13):
        rest = complete(small, text[:cut], n_predict=24, **fields)["content"]
        assert rest.startswith(text[cut : len(text) - 8])


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8}])
def test_a_cut_inside_the_gap_does_not_show(default: Served, fields: dict[str, Any]) -> None:
    begun = "    tot"
    text = begun + infill(default, **fields, prompt=begun)["content"]
    assert len(text) > 20
    for cut in range(len(begun) + 1, len(text) - 4, 3):
        assert infill(default, **fields, prompt=text[:cut])["content"].startswith(text[cut:])


# ---------------------------------------------------------------------------------------------------------------------
# /infill

LLAMA_VSCODE = {
    "id_slot": 0,
    "input_prefix": PREFIX,
    "input_suffix": SUFFIX,
    "input_extra": [{"filename": "sums.py", "text": "def total(values):\n    return sum(values)\n", "time": 1}],
    "prompt": "    tot",
    "n_predict": 128,
    "n_cmpl": 1,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 60_000,
    "t_max_predict_ms": 2500,
}
"""What llama.vscode sends, but for its half a second to read the prompt in, which a busy machine may need."""


def test_r17_what_llama_vscode_sends_is_answered(default: Served) -> None:
    warm = {**LLAMA_VSCODE, "n_predict": 0, "samplers": [], "t_max_predict_ms": 1}
    warmed = ask(default, INFILL, warm)
    assert (warmed["content"], warmed["tokens_predicted"]) == ("", 0)
    response = default.post(INFILL, LLAMA_VSCODE)
    answer = response.json()
    assert answer["content"].startswith("al")
    assert answer["tokens_cached"] >= warmed["tokens_evaluated"] - 4
    ignored = "id_slot, samplers, input_extra[0].time"
    assert response.headers["legato-ignored"] == ignored
    assert [len(answer["content"]) > 0 for answer in ask(default, INFILL, {**LLAMA_VSCODE, "n_cmpl": 2})] == [True] * 2


def test_r17_what_llama_vscode_asks_beside(default: Served) -> None:
    assert default.get("/health").json()["status"] == "ok"
    assert default.get("/props").json()["default_generation_settings"]["n_ctx"] == 8192
    assert default.get("/v1/models").json()["data"]
    body = {"content": "def mean", "add_special": False, "parse_special": True}
    assert len(ask(default, "/tokenize", body)["tokens"]) == 2


def test_an_infill_fills_the_gap(default: Served) -> None:
    answer = infill(default, n_predict=48)
    assert "total" in answer["content"]
    assert "return total" not in answer["content"]
    assert answer["prompt"] == PREFIX
    events = read_stream(
        default.post(
            INFILL,
            {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 48, "stream": True, **GREEDY},
        ).content
    )
    (folded,) = fold(events)
    assert folded["content"] == answer["content"]


def test_files_are_read(default: Served) -> None:
    text = 'SECRET_OF_THE_HOUSE = "marmalade"\n'
    body: dict[str, Any] = {"input_prefix": "from secrets_of import SECRET_", "input_suffix": "\n", "n_predict": 8}
    told = ask(default, INFILL, {**body, **GREEDY, "input_extra": [{"filename": "secrets_of.py", "text": text}]})
    assert told["content"].startswith("OF_THE_HOUSE")
    plain = ask(default, INFILL, {**body, **GREEDY})
    assert plain["tokens_evaluated"] < told["tokens_evaluated"]
    assert not plain["content"].startswith("OF_THE_HOUSE")


def test_markers_in_an_infill_are_text(default: Served) -> None:
    def num(**fields: Any) -> int:
        return int(infill(default, n_predict=0, **fields)["tokens_evaluated"])

    for name in ("input_prefix", "input_suffix", "prompt"):
        assert num(**{name: "<|fim_middle|>"}) > num(**{name: "x"}) + 2


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": 5}, "input_prefix"),
        ({"prompt": ["x"]}, "prompt"),
        ({"input_extra": "x"}, "input_extra"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": 5}]}, "input_extra[0].text"),
    ],
)
def test_bad_infills_are_refused_by_name(default: Served, fields: dict[str, Any], name: str) -> None:
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, **fields}
    assert f"`{name}`" in check_error(default.post(INFILL, body), 400)["message"]


# ---------------------------------------------------------------------------------------------------------------------
# What is answered without an engine


@pytest.mark.parametrize("text", ["", "Hello, world", "héllo 🧪🧬 日本", "<|im_start|>user\n"])
def test_tokens_there_and_back(default: Served, text: str) -> None:
    tokens = ask(default, "/tokenize", {"content": text})["tokens"]
    assert ask(default, "/detokenize", {"tokens": tokens})["content"] == text
    pieces = ask(default, "/tokenize", {"content": text, "with_pieces": True})["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    spelled = [piece["piece"] for piece in pieces]
    assert b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in spelled).decode() == text


def test_tokenize_reads_markers_unless_it_is_told_not_to(default: Served) -> None:
    marked = ask(default, "/tokenize", {"content": "<|im_start|>"})["tokens"]
    body = {"content": "<|im_start|>", "parse_special": False, "add_special": True}
    plain = ask(default, "/tokenize", body)["tokens"]
    assert (len(marked), len(plain) > 1) == (1, True)


def test_a_template_leaves_the_last_turn_open(small: Served) -> None:
    question = {"role": "user", "content": "Count."}
    messages = [question, {"role": "assistant", "content": "1, 2, thr"}]
    response = small.post("/apply-template", {"messages": messages, "model": small.name, "temperature": 1})
    prompt = response.json()["prompt"]
    assert response.headers["legato-ignored"] == "temperature"
    assert prompt.endswith("<|im_start|>assistant\n1, 2, thr")
    expected = small.chat(question, {**messages[1], "prefix": True}, max_tokens=8)["choices"][0]["message"]["content"]
    assert complete(small, prompt)["content"] == expected
    assert ask(small, "/apply-template", {"messages": [question]})["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "x", "with_pieces": 1}, "with_pieces"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": [{"role": "assistant", "content": "a"}] * 2}, "messages"),
        ("/apply-template", {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages"),
    ],
)
def test_bad_questions_are_refused_by_name(small: Served, path: str, body: dict[str, Any], name: str) -> None:
    assert f"`{name}" in check_error(small.post(path, body), 400)["message"]


def test_an_unknown_model_is_404_everywhere(small: Served) -> None:
    for path, body in (("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": []})):
        check_error(small.post(path, {**body, "model": "none"}), 404, "not_found_error")
        assert ask(small, path, {**body, "model": "deepseek-v3.2"})


# ---------------------------------------------------------------------------------------------------------------------
# Keys


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server that wants a key."""
    with serve_script([b"ok"], server=ServerSettings(port=0, api_keys=("right",))) as served:
        yield served


@pytest.mark.parametrize("path", [COMPLETION, INFILL, "/tokenize", "/detokenize", "/apply-template"])
def test_a_key_is_wanted(locked: Served, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        check_error(locked.post(path, {"prompt": "x"}, headers=headers), 401, "authentication_error")


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer right"}, {"x-api-key": "right"}, {"authorization": "Bearer right", "x-api-key": "no"}],
)
def test_a_key_comes_in_either_header(locked: Served, headers: dict[str, str]) -> None:
    assert locked.post(COMPLETION, {"prompt": "x"}, headers=headers).json()["content"] == "ok"
    assert locked.get("/props", headers=headers).status_code == 200


def test_x_api_key_is_llamacpps_alone(locked: Served) -> None:
    body = {"model": "m", "prompt": "x"}
    assert locked.post("/v1/completions", body, headers={"x-api-key": "right"}).status_code == 401
    assert locked.get("/props").status_code == 401
    assert locked.get("/health").json()["status"] == "ok"
