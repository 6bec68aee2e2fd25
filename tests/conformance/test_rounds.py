"""`auto_continue`: an answer that goes on by itself where its limit cut it is the answer of one long run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from legato.config import ModelSettings, Settings
from legato.engines.scripted import Fault, Pause, Script
from legato.run.models import Models, load_models
from legato.types import Job, Tags
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    HI,
    body_for,
    check_error,
    check_error_body,
    fold,
    folded,
    marked,
    read_events,
    stream,
    text_of,
    user,
)
from tests.conformance.routes import EVERY, INFILL, NATIVE, body_on, text_in
from tests.conformance.vendors import MISTRAL
from tests.conftest import SMALL, Served, serve, serve_script

USAGE = {"stream_options": {"include_usage": True}}
START = "The history of the lighthouse at the northern cape begins in 1768, when"


def rounds(num: int, total: int | None = None) -> dict[str, Any]:
    """The field, with as many rounds as it takes if there are none named."""
    return {"auto_continue": {"max_rounds": num} if total is None else {"max_rounds": num, "max_total_tokens": total}}


def report(answer: dict[str, Any]) -> tuple[str, int, int, int]:
    """Why an answer ended, what it counts, and how many rounds it took."""
    usage = answer["usage"]
    reason = answer["choices"][0]["finish_reason"]
    return reason, usage["prompt_tokens"], usage["completion_tokens"], answer["legato"]["rounds"]


def pages(text: bytes, size: int = 7) -> Any:
    """A script that goes on where it was interrupted, in chunks that keep no boundary of a round."""

    def script(job: Job) -> Script:
        rest = text[job.num_resumed :]
        return [rest[at : at + size] for at in range(0, len(rest), size)]

    return script


# ---------------------------------------------------------------------------------------------------------------------
# As one run


@pytest.mark.parametrize("temperature", [0, 0.8], ids=["greedy", "sampled"])
def test_l2_rounds_are_one_run(small: Served, temperature: float) -> None:
    fields: dict[str, Any] = {
        "prompt": START,
        "temperature": temperature,
        "ignore_eos": True,
        "report": True,
        "logprobs": 1,
    }
    whole = small.complete(**fields, max_tokens=128)
    reason, num_prompt, num_written, _ = report(whole)
    assert (reason, num_written) == ("length", 128)
    for num in (8, 128):
        answer = small.complete(**fields, max_tokens=128 // num, **rounds(num))
        assert text_of(answer) == text_of(whole)
        assert answer["choices"] == whole["choices"]
        assert report(answer) == ("length", num_prompt, 128, num)
        assert answer["legato"]["cached_tokens"] <= num_prompt


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_of_rounds_is_one_stream(small: Served, path: str) -> None:
    body = body_for(small, path, max_tokens=5, n=2, temperature=0.8, **rounds(6))
    chunks = stream(small, path, {**body, **USAGE, "report": True})
    assert fold(chunks)["choices"] == folded(small.post(path, body).json())["choices"]
    assert fold(chunks)["choices"] == fold(stream(small, path, {**body, "max_tokens": 30, **rounds(1)}))["choices"]
    assert sum(choice["finish_reason"] is not None for chunk in chunks for choice in chunk["choices"]) == 2
    assert chunks[-1]["legato"]["rounds"] <= 6
    assert chunks[-1]["usage"]["completion_tokens"] <= 60


def test_many_rounds_have_no_gaps(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt=START, ignore_eos=True, max_tokens=256)
    whole = small.post(COMPLETIONS, body).json()
    in_rounds = {"max_tokens": 64, "auto_continue": {"max_total_tokens": 256}, "report": True, **USAGE}
    chunks = stream(small, COMPLETIONS, {**body, **in_rounds})
    assert fold(chunks)["choices"][0]["text"] == text_of(whole)
    assert chunks[-1]["legato"]["rounds"] == 4


def test_an_infill_goes_on_in_rounds(default: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": "def mean(values):\n    tot",
        "suffix": "\n    return total / len(values)\n",
        "report": True,
    }
    whole = default.complete(**fields, max_tokens=24)
    answer = default.complete(**fields, max_tokens=3, **rounds(8))
    assert answer["choices"] == whole["choices"]
    assert answer["legato"]["rounds"] > 1


@pytest.mark.parametrize("path", EVERY)
def test_every_path_takes_it_names_it_or_refuses_it(path: str) -> None:
    with serve_script(pages(b" this text is written in rounds.")) as served:
        infill: dict[str, Any] = {"infill": "prompted"} if path == INFILL else {}
        response = served.post(path, body_on(path, 4, **infill, **rounds(3)))
        if path == MISTRAL:
            assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", "auto_continue"])
            return
        assert len(text_in(response.json())) == (4 if path in NATIVE else 12)
        assert response.headers.get("legato-ignored") == ("auto_continue" if path in NATIVE else None)


# ---------------------------------------------------------------------------------------------------------------------
# Where it ends


def test_it_ends_with_the_model(small: Served) -> None:
    eager = {str(id): 30 for id in small.engine.tokenizer.end_ids}
    fields = {"logit_bias": eager, "min_tokens": 7, "report": True}
    whole = small.chat(user("What is the capital of France?"), max_tokens=60, **fields)
    answer = small.chat(user("What is the capital of France?"), max_tokens=3, auto_continue={}, **fields)
    assert answer["choices"] == whole["choices"]
    assert report(answer)[::3] == ("stop", 3)


def test_it_ends_with_the_tokens_that_were_named() -> None:
    with serve_script(pages(b"0123456789" * 9)) as served:
        for total, written, num in ((25, 25, 3), (5, 5, 1), (200, 70, 7)):
            answer = served.complete("Go.", max_tokens=10, report=True, **rounds(7, total))
            assert report(answer) == ("length", 3, written, num)
        all_there_is = served.complete("Go.", max_tokens=10, report=True, auto_continue={})
        assert report(all_there_is) == ("stop", 3, 90, 10)


def test_it_ends_with_the_context() -> None:
    with serve_script(pages(b"0123456789" * 9), context_length=48) as served:
        answer = served.complete("Go.", max_tokens=10, report=True, auto_continue={})
        assert report(answer) == ("length", 3, 45, 5)


def test_a_round_that_writes_nothing_is_the_last() -> None:
    with serve_script(pages(b"0123456789")) as served:
        answer = served.complete("Go.", max_tokens=0, report=True, **rounds(5))
        assert report(answer) == ("length", 3, 0, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_stop_may_lie_across_rounds(size: int) -> None:
    with serve_script(pages("Ünö, dös, STOP, très".encode())) as served:
        for path in (COMPLETIONS, CHAT):
            body = body_for(served, path, max_tokens=size, stop=["STOP"], auto_continue={})
            answer = served.post(path, body).json()
            assert text_of(answer) == "Ünö, dös, "
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] < len("Ünö, dös, STOP, très".encode())
            assert fold(stream(served, path, body))["choices"][0]["text"] == "Ünö, dös, "


def test_c102_a_loop_over_rounds_ends_them() -> None:
    with serve_script(pages(b"Once: " + b"ab" * 900)) as served:
        fields = {"max_tokens": 50, "report": True, "auto_continue": {}}
        reason, _, num, num_rounds = report(served.complete("Go.", **fields, detect_loops=True))
        assert (reason, num, num_rounds) == ("repetition", 262, 6)
        assert report(served.complete("Go.", **fields))[0] == "stop"


def test_min_tokens_counts_all_rounds(small: Served) -> None:
    eager = {str(id): 100 for id in small.engine.tokenizer.end_ids}
    fields: dict[str, Any] = {"prompt": START, "max_tokens": 4, "logit_bias": eager, "report": True}
    assert report(small.complete(**fields, min_tokens=10, **rounds(9)))[::2] == ("stop", 10)
    body = {"model": small.name, **fields, "min_tokens": 10, **rounds(2)}
    error = check_error(small.post(COMPLETIONS, body), 400, "min_tokens")
    assert "in all rounds, got 10 and 8" in error["message"]


def test_a_deadline_ends_all_rounds() -> None:
    def slow(job: Job) -> Script:
        return [b"ab", Pause(0.2)]

    with serve_script(slow) as served:
        answer = served.complete("Go.", max_tokens=2, timeout_s=0.3, report=True, auto_continue={})
        reason, _, num, _ = report(answer)
        assert reason == "length"
        assert 0 < num < 100_000


def test_a_failure_in_a_later_round_ends_the_stream_with_an_error() -> None:
    def script(job: Job) -> Script:
        return [b"abcd"] if job.num_resumed < 8 else [b"ij", Fault()]

    with serve_script(script) as served:
        body = {**body_for(served, COMPLETIONS, max_tokens=4), "auto_continue": {}, "stream": True}
        *chunks, last = read_events(served.post(COMPLETIONS, body).content)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdabcdij"
        check_error_body(last)


def test_what_is_inside_it_is_checked() -> None:
    with serve_script(pages(b"01234")) as served:
        for value in ({"max_rounds": 0}, {"max_rounds": "3"}, {"max_total_tokens": 0}, {"max_total_tokens": True}, 3):
            check_error(served.post(COMPLETIONS, body_for(served, COMPLETIONS, auto_continue=value)), 400)
        body = body_for(served, COMPLETIONS, auto_continue={"max_rounds": 1, "max_total_tokens": None, "until": "x"})
        assert served.post(COMPLETIONS, body).headers["legato-ignored"] == "auto_continue.until"


# ---------------------------------------------------------------------------------------------------------------------
# Thinking


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    """The small model, as if it thought between tags."""

    async def load() -> Models:
        model = ModelSettings(context_length=512, reasoning_open="<think>", reasoning_close="</think>")
        return await load_models(Settings(models={SMALL: model}))

    with serve(load) as served:
        yield served


@pytest.mark.parametrize("bound", [{"thinking_budget": 9}, {"reasoning_effort": "medium"}, {}])
def test_rounds_that_only_think_make_progress(thinker: Served, bound: dict[str, Any]) -> None:
    messages = (user("Is 91 prime? Think first."), {**marked(""), "reasoning_content": ""})
    whole = thinker.chat(*messages, max_tokens=30, **bound)
    answer = thinker.chat(*messages, max_tokens=3, **rounds(10), **bound)
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    assert bool(text_of(answer)) == bool(bound)
    assert answer["choices"][0]["message"]["reasoning_content"]


@pytest.mark.parametrize("size", range(1, 12))
def test_tags_may_lie_across_rounds(size: int) -> None:
    with serve_script(pages(b"<think>7 * 13</think>No."), reasoning=Tags("<think>", "</think>")) as served:
        body = {"model": "m", "messages": HI, "max_tokens": size, "auto_continue": {}}
        message = served.post(CHAT, body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("7 * 13", "No.")
        assert fold(stream(served, CHAT, body))["choices"][0]["reasoning"] == "7 * 13"
