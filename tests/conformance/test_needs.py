"""What the clients of clients.md need (`R13` to `R30`), on every path that generates.

`R1` to `R12` stand with the clients themselves; `R17`, the fields of llama.vscode, in test_llamacpp_server.py; `R30`
with a model's own worker in test_cases_stream.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from legato.config import ServerSettings
from legato.engines.scripted import Fault, Pause, Script
from legato.prompting.profiles import InfillTokens
from legato.run.admission import Admission
from legato.server import streaming
from tests.conformance.reading import CHAT, COMPLETIONS, HI, eventually, is_idle, num_running, read_events, text_of
from tests.conformance.routes import (
    COMPLETION,
    EVENTS,
    EVERY,
    GENERATE,
    NATIVE,
    OPENAI_SHAPED,
    body_on,
    parts_of,
    stops_on,
    text_in,
)
from tests.conformance.test_cases_stream import leave, once
from tests.conformance.vendors import CHATS, DEEPSEEK, MISTRAL
from tests.conftest import NO_TLS, Served, serve_script

ANSWER = " three, four."
FRAMED = re.compile(rb"(?:(?:data: [^\r\n]+|: [^\r\n]*)\n\n)+")


def serve(script: Script, **options: Any) -> AbstractContextManager[Served]:
    """Serve a script for a model that fills gaps, too."""
    return serve_script(script, infill=InfillTokens(1, 2, 3), **options)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve([ANSWER[:6].encode(), ANSWER[6:].encode()]) as served:
        yield served


def streamed(served: Served, path: str, num_tokens: int = 50, **fields: Any) -> list[dict[str, Any]]:
    """Return the parts of a stream."""
    response = served.post(path, body_on(path, num_tokens, stream=True, **fields))
    assert response.status_code == 200, response.text
    return parts_of(path, response.content)


# ---------------------------------------------------------------------------------------------------------------------
# What is asked


@pytest.mark.parametrize("path", EVERY)
def test_r14_sixteen_stops_are_taken_everywhere(served: Served, path: str) -> None:
    stops = [*(f"/src/{number}" for number in range(15)), ", four"]
    answer = served.post(path, body_on(path, 50, **stops_on(path, stops)))
    assert answer.status_code == 200, answer.text
    assert text_in(answer.json()) == " three"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MISTRAL, COMPLETION, GENERATE])
def test_r15_a_warm_model_answers_at_once(small: Served, path: str) -> None:
    """On prompts as long as Continue's."""
    text = "The keeper wrote in the log of the lighthouse, day after day. " * 70
    source = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    body = body_on(path, model=small.name, stream=True, **source)
    small.post(path, body)
    waits = []
    for _ in range(3):
        started = time.monotonic()
        with httpx2.stream("POST", small.url + path, json=body, verify=NO_TLS) as response:
            pieces = response.iter_raw()
            while not any(map(text_in, parts_so_far(next(pieces)))):
                pass
            waits.append(time.monotonic() - started)
    assert min(waits) < 0.375


def parts_so_far(data: bytes) -> list[dict[str, Any]]:
    """The JSON values in a piece of a stream."""
    return [json.loads(line) for line in data.replace(b"data: ", b"").splitlines() if line.startswith(b"{")]


@pytest.mark.parametrize("path", EVERY)
def test_r16_a_key_may_come_in_both_headers(path: str) -> None:
    with serve([b"x"], server=ServerSettings(port=0, api_keys=("right",))) as locked:
        both = {"authorization": "Bearer right", "x-api-key": "right"}
        assert locked.post(path, body_on(path), headers=both).status_code == 200
        assert locked.post(path, body_on(path)).status_code in (400, 401)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_r16_what_mistral_does_not_know_is_422_with_its_name(served: Served, name: str) -> None:
    response = served.post(MISTRAL, {**body_on(MISTRAL, stream=True), name: 0.5})
    assert response.status_code == 422
    (detail,) = response.json()["detail"]
    assert detail["loc"] == ["body", name]
    assert f"`{name}`" in detail["msg"]


@pytest.mark.parametrize("path", [COMPLETIONS, DEEPSEEK, COMPLETION])
def test_r20_markers_that_a_client_lays_out_work_as_typed(default: Served, path: str) -> None:
    before, after = "def mean(values):\n    ", "\n    return total / len(values)\n"
    laid_out = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    expected = default.complete(before, suffix=after, max_tokens=12)
    answer = default.post(path, body_on(path, 12, model=default.name, prompt=laid_out)).json()
    assert text_in(answer) == text_of(expected)
    if "usage" in answer:
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_r21_v1_is_a_plain_base_url(small: Served) -> None:
    with small.client() as client:
        assert small.name in [model.id for model in client.models.list()]
        tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
        ways: list[dict[str, Any]] = [{}, {"tools": [tool], "tool_choice": "none"}]
        for fields in ways:
            body = {"model": small.name, "messages": HI, "max_tokens": 4, **fields}
            assert client.chat.completions.create(**body).choices[0].message.content
    refused = small.post(CHAT, body_on(CHAT, model=small.name, tools=[tool]))
    assert refused.status_code == 400, "a caller's mistake, which no client sends again"
    assert refused.json()["error"]["param"] == "tools"


# ---------------------------------------------------------------------------------------------------------------------
# What is answered


@pytest.mark.parametrize("path", EVERY)
def test_r13_every_part_of_a_stream_has_text_unless_usage_was_asked_for(served: Served, path: str) -> None:
    parts = streamed(served, path)
    assert "".join(map(text_in, parts)) == ANSWER
    if path in OPENAI_SHAPED:
        assert all(len(part["choices"]) == 1 for part in parts)
    asking = served.post(path, body_on(path, stream=True, stream_options={"include_usage": True}))
    if path == MISTRAL:
        assert asking.status_code == 422
    elif path in NATIVE:
        assert asking.headers["legato-ignored"] == "stream_options"
    else:
        assert [part["choices"] == [] for part in parts_of(path, asking.content)][-2:] == [False, True]


@pytest.mark.parametrize("path", EVERY)
def test_r18_the_end_is_told_before_done_with_an_empty_text(served: Served, path: str) -> None:
    *parts, last = streamed(served, path)
    if path in OPENAI_SHAPED:
        assert {part["choices"][0]["finish_reason"] for part in parts} == {None}
        (choice,) = last["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice.get("text", choice.get("delta", {}).get("content")) == ""
        texts = [choice.get("delta", choice) for part in parts for choice in part["choices"]]
        assert all(isinstance(text.get("text", text.get("content")), str) for text in texts)
        return
    end = "done" if path == GENERATE else "stop"
    assert {part[end] for part in parts} == {False}
    assert last[end] is True
    assert last["response" if path == GENERATE else "content"] == ""


@pytest.mark.parametrize("path", OPENAI_SHAPED)
def test_r19_every_answer_has_what_strict_readers_want(served: Served, path: str) -> None:
    answer = served.post(path, body_on(path)).json()
    assert isinstance(answer["id"], str)
    assert isinstance(answer["object"], str)
    assert isinstance(answer["created"], int)
    assert answer["model"] == "m"
    assert all(isinstance(answer["usage"][f"{name}_tokens"], int) for name in ("prompt", "completion", "total"))
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    if path in (*CHATS, CHAT, MISTRAL):
        assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", ANSWER[:4])
    else:
        assert choice["text"] == ANSWER[:4]


# ---------------------------------------------------------------------------------------------------------------------
# How streams are framed


@pytest.mark.parametrize("path", EVENTS)
def test_r22_r23_r24_r25_r26_a_stream_is_one_value_an_event(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    odd = 'ä\u2028b\u0085c\r\nd\n\ndata: e\n: f\nid: 1"'
    with serve([Pause(0.2), odd.encode()]) as served:
        data = served.post(path, body_on(path, 200, stream=True)).content
        assert FRAMED.fullmatch(data), "R22, R23, R24: nothing but data, comments and blank lines"
        assert "".join(map(text_in, parts_of(path, data))) == odd
        assert data.count(b"[DONE]") == (path in OPENAI_SHAPED), "R26"
        comments = re.findall(rb"^:.*$", data, re.MULTILINE)
        assert set(comments) == {b": keep-alive"}, "R25"
        assert b"keep-alive" not in data[data.index(odd[:1].encode()) :], "R25: none after the last token"


def test_r26_lines_have_no_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with serve([Pause(0.2), b"ab"]) as served:
        lines = served.post(GENERATE, body_on(GENERATE, 9, stream=True)).content.decode().splitlines()
        *parts, last = map(json.loads, lines)
        assert "".join(map(text_in, parts)) == "ab"
        assert last["done"] is True
        assert lines[0].startswith(" "), "what fills silence is a blank"


@pytest.mark.parametrize("path", EVERY)
def test_r27_a_failure_is_an_event_of_its_own_or_plain_json(path: str) -> None:
    with serve([b"ab", Fault("broken")]) as served:
        *parts, last = lenient(path, served.post(path, body_on(path, 9, stream=True)).content)
        assert "".join(map(text_in, parts)) == "ab"
        assert not any("error" in part for part in parts)
        assert "broken" in json.dumps(last.get("error", last))
        if path != GENERATE and path != MISTRAL:
            assert last["error"]["message"] == "broken"
        for stream in (False, True):
            refused = served.post(path, body_on(path, model="nowhere", stream=stream))
            assert refused.status_code == 404
            assert refused.headers["content-type"] == "application/json"
            assert "nowhere" in json.dumps(refused.json())


def lenient(path: str, data: bytes) -> list[dict[str, Any]]:
    """The JSON values of a stream that failed."""
    return parts_so_far(data) if path in NATIVE else read_events(data)


@pytest.mark.parametrize("path", EVERY)
def test_r28_each_part_is_sent_when_it_is_made_and_says_what_it_is(path: str) -> None:
    pause_s = 0.15
    script: list[bytes | Pause] = [part for data in (b"0", b"1", b"2") for part in (data, Pause(pause_s))]
    with serve(script) as served:
        assert served.post(path, body_on(path)).headers["content-type"] == "application/json"
        with httpx2.stream("POST", served.url + path, json=body_on(path, 9, stream=True), verify=NO_TLS) as response:
            kind = "application/x-ndjson" if path == GENERATE else "text/event-stream"
            assert response.headers["content-type"] == kind
            times = {}
            for piece in response.iter_raw():
                for part in parts_so_far(piece):
                    if part.get("choices") != [] and text_in(part):
                        times[text_in(part)] = time.monotonic()
        assert list(times) == ["0", "1", "2"]
        assert all(later - earlier > pause_s / 2 for earlier, later in pairwise(times.values()))


@pytest.mark.parametrize("path", EVERY)
def test_r29_a_long_wait_puts_nothing_before_a_whole_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)
    with serve([Pause(0.1), b"ab"]) as served:
        content = served.post(path, body_on(path, 9)).content
    assert text_in(json.loads(content)) == "ab"
    assert content.strip().startswith(b"{")


# ---------------------------------------------------------------------------------------------------------------------
# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", EVERY)
def test_r30_a_client_that_leaves_frees_its_place(path: str, stream: bool) -> None:
    body = body_on(path, 9, stream=stream)
    scripts: list[Script] = [[Pause(30), b"a"], [b"a", Pause(30)]]
    for script in scripts:  # While its prompt is read, and while it is answered.
        with serve(script, admission=Admission(max_running=1)) as served:
            with httpx2.stream("POST", served.url + path, json=body_on(path, 9, stream=True), verify=NO_TLS):
                leave(served, path, body, when=once(lambda: num_running(served) == 2))  # While it waits.
                assert eventually(lambda: num_running(served) == 1)
                assert served.engine.num_cancelled == 0
            assert eventually(lambda: is_idle(served))
            leave(served, path, body, when=once(lambda: num_running(served) == 1))
            assert eventually(lambda: is_idle(served), 1)
            assert served.engine.num_cancelled == 2
