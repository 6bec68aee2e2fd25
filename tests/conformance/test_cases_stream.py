"""Faults in streams (`C...`), what clients need of them (`R...`), and that a stream's fold is the whole answer."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from legato.engines.scripted import Fault, Pause, Script
from legato.run.admission import Admission
from legato.server import streaming
from legato.types import Job
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    HI,
    body_for,
    check_error,
    check_error_body,
    eventually,
    fold,
    folded,
    is_idle,
    marked,
    num_running,
    num_sockets,
    own_threads,
    read_events,
    stream,
    text_of,
    together,
    user,
)
from tests.conftest import NO_TLS, SMALL, Served, serve_script, serve_weights

BOTH = [COMPLETIONS, CHAT]


def varied(job: Job) -> Script:
    """An answer of a length and with pauses that depend on the seed."""
    chance = random.Random(job.sampling.seed)
    parts: list[bytes | Pause] = []
    for index in range(chance.choice([1, 5, 40, 150])):
        parts.append(f"word{index} ".encode())
        if chance.random() < 0.02:
            parts.append(Pause(0.002))
    return parts


@pytest.fixture(scope="module")
def words() -> Iterator[Served]:
    """A server whose answers vary with the seed."""
    with serve_script(varied) as served:
        yield served


# ---------------------------------------------------------------------------------------------------------------------
# Usage and framing


@pytest.mark.parametrize("path", BOTH)
def test_c054_usage_comes_only_when_asked_for_last_and_without_choices(small: Served, path: str) -> None:
    body = body_for(small, path, max_tokens=3)
    whole = small.post(path, body).json()
    chunks = stream(small, path, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {key: chunks[-1]["usage"][key] for key in counts} == {key: whole["usage"][key] for key in counts}
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        for chunk in stream(small, path, {**body, "stream_options": options}):
            assert "usage" not in chunk
            assert chunk["choices"], "R13: no chunk without choices unless usage was asked for"


@pytest.mark.parametrize("path", BOTH)
def test_c054_usage_of_several_choices_counts_the_prompt_once(words: Served, path: str) -> None:
    body = body_for(words, path, n=3, max_tokens=50)
    one, three = (words.post(path, {**body, "n": num}).json()["usage"] for num in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]
    assert fold(stream(words, path, {**body, "stream_options": {"include_usage": True}}))["usage"] == three


def test_c057_two_hundred_streams_are_framed_and_end_as_they_should(words: Served) -> None:
    def check(seed: int) -> str:
        path = BOTH[seed % 2]
        fields: dict[str, Any] = {"seed": seed, "n": 1 + seed % 3, "max_tokens": [1, 40, 3000][seed % 3]}
        if seed % 5 == 0:
            fields["stop"] = ["word7 ", "d3"]
        if seed % 7 == 0:  # A neighbour that leaves.
            with httpx2.stream(
                "POST", words.url + path, json=body_for(words, path, **fields, stream=True), verify=NO_TLS
            ) as response:
                next(response.iter_raw(), b"")
            return "left"
        chunks = stream(words, path, body_for(words, path, **fields))
        whole = fold(chunks)
        assert len(whole["choices"]) == fields["n"]
        for chunk in chunks:
            for choice in chunk["choices"]:
                assert choice["finish_reason"] in (None, "stop", "length")
        return str(whole["choices"][0]["finish_reason"])

    assert set(together(check, range(200))) == {"left", "stop", "length"}
    assert eventually(lambda: is_idle(words))


def test_c057_streams_of_a_model_side_by_side(small: Served) -> None:
    def check(index: int) -> str:
        path = BOTH[index % 2]
        body = body_for(small, path, max_tokens=4 + index, stop=["and"] if index % 3 == 0 else None)
        whole = fold(stream(small, path, {**body, "stream_options": {"include_usage": True}}))
        alone = small.post(path, body).json()
        assert whole["choices"][0]["text"] == text_of(alone)
        assert whole["choices"][0]["finish_reason"] == alone["choices"][0]["finish_reason"]
        return text_of(alone)

    assert all(together(check, range(8)))
    assert eventually(lambda: is_idle(small))


@pytest.mark.parametrize("path", BOTH)
def test_c041_each_choice_has_one_role_and_one_finish(words: Served, path: str) -> None:
    chunks = stream(words, path, body_for(words, path, seed=2, n=2, max_tokens=20))
    entries = [entry for chunk in chunks for entry in chunk["choices"]]
    for index in (0, 1):
        mine = [entry for entry in entries if entry["index"] == index]
        assert [entry["finish_reason"] for entry in mine].count(None) == len(mine) - 1
        assert mine[-1]["finish_reason"] is not None
        if path == CHAT:
            assert [("role" in entry["delta"]) for entry in mine] == [True] + [False] * (len(mine) - 1)
    assert {entry["index"] for entry in entries} == {0, 1}


FOLDED: list[dict[str, Any]] = [
    {},
    {"stop": ["4"]},
    {"n": 2, "temperature": 1},
    {"echo": True},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "echo": True, "stop": ["5"]},
    {"max_tokens": 0},
    {"seam": "none"},
]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("fields", FOLDED)
def test_the_fold_of_a_stream_is_the_whole_answer(small: Served, path: str, fields: dict[str, Any]) -> None:
    asked = dict(fields)
    if path == COMPLETIONS and asked.pop("logprobs", False):
        asked["logprobs"] = asked.pop("top_logprobs", 0)
    source: dict[str, Any] = {"prompt": "Count: 1 2 3"} if path == COMPLETIONS else {"messages": [*HI, marked("1 2 3")]}
    body = body_for(small, path, **source, max_tokens=12) | asked
    small.post(path, body)  # So that both of the others find the same cache.
    whole = small.post(path, body).json()
    assert fold(stream(small, path, {**body, "stream_options": {"include_usage": True}})) == folded(whole)


@pytest.mark.parametrize("path", BOTH)
def test_r18_the_finish_reason_has_an_event_of_its_own_with_text(words: Served, path: str) -> None:
    for chunk in stream(words, path, body_for(words, path, seed=3)):
        for choice in chunk["choices"]:
            assert isinstance(choice["text"] if path == COMPLETIONS else choice["delta"]["content"], str)
    last = chunk["choices"][0]
    assert last["finish_reason"] == "length"
    assert (last["text"] if path == COMPLETIONS else last["delta"]["content"]) == ""


@pytest.mark.parametrize("path", BOTH)
def test_r19_every_field_that_clients_need_is_there(words: Served, path: str) -> None:
    answer = words.post(path, body_for(words, path)).json()
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(answer)
    assert isinstance(answer["created"], int)
    assert all(isinstance(answer["usage"][f"{name}_tokens"], int) for name in ("prompt", "completion", "total"))
    (choice,) = answer["choices"]
    assert {"index", "finish_reason", "logprobs"} <= set(choice)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("path", BOTH)
def test_r1_only_the_body_decides_whether_an_answer_is_streamed(words: Served, path: str) -> None:
    plain = words.post(path, body_for(words, path), headers={"accept": "text/event-stream"})
    assert plain.headers["content-type"] == "application/json"
    streamed = words.post(path, body_for(words, path, stream=True), headers={"accept": "application/json"})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    read_events(streamed.content)


def test_r5_the_body_ends_with_done_and_the_connection_goes_on(words: Served) -> None:
    with httpx2.Client(base_url=words.url, verify=NO_TLS) as client:
        for _ in range(3):
            started = time.monotonic()
            response = client.post(CHAT, json=body_for(words, CHAT, stream=True))
            assert response.content.endswith(b"data: [DONE]\n\n")
            assert time.monotonic() - started < 4


@pytest.mark.parametrize("path", BOTH)
def test_r6_what_was_ignored_is_told_before_the_first_byte(words: Served, path: str) -> None:
    fields: dict[str, Any] = {"foo": 1, "top_a": 0.2, "naïve, x": None, "stream_options": {"bar": 1}}
    body = body_for(words, path, **fields, stream=True)
    with httpx2.stream("POST", words.url + path, json=body, verify=NO_TLS) as response:
        assert response.headers["legato-ignored"] == "foo, top_a, stream_options.bar"
        assert response.headers["legato-seed"] == "7"
    body = body_for(words, path, **{"naïve, x": 1, "a\r\nb": 2})
    assert words.post(path, body).headers["legato-ignored"] == "na%C3%AFve%2C%20x, a%0D%0Ab"
    assert "legato-ignored" not in words.post(path, body_for(words, path)).headers


def test_r6_a_dumped_message_of_the_client_leaves_no_trace(words: Served) -> None:
    dumped = {"role": "assistant", "content": "a", "refusal": None, "audio": None, "annotations": None}
    answer = words.post(CHAT, body_for(words, CHAT, messages=[*HI, {**dumped, "tool_calls": None}, user("And?")]))
    assert "legato-ignored" not in answer.headers
    answer = words.post(CHAT, body_for(words, CHAT, messages=[*HI, {**dumped, "refusal": "no"}, user("And?")]))
    assert answer.headers["legato-ignored"] == "messages[1].refusal"


def test_r6_however_much_is_ignored_the_answer_can_be_read(words: Served) -> None:
    body = body_for(words, COMPLETIONS, report=True, **{f"field_{index}": 1 for index in range(20_000)})
    answer = words.post(COMPLETIONS, body)
    assert len(answer.headers["legato-ignored"]) < 2100
    assert answer.headers["legato-ignored"].startswith("field_0, field_1, ")
    assert answer.headers["legato-ignored"].endswith(", ...")
    assert len(answer.json()["legato"]["ignored"]) == 20_000
    assert words.post(COMPLETIONS, body_for(words, COMPLETIONS, **{"x" * 100_000: 1})).status_code == 200


@pytest.mark.parametrize("path", BOTH)
def test_r13_the_report_of_a_stream_comes_with_a_choice_unless_usage_was_asked_for(words: Served, path: str) -> None:
    for options, has_choice in (({}, True), ({"stream_options": {"include_usage": True}}, False)):
        answer = words.post(path, body_for(words, path, stream=True, report=True, seed=5, **options))
        *_, last, done = [line for line in answer.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        chunk = json.loads(last.removeprefix("data: "))
        assert chunk["legato"]["seed"] == 5
        assert bool(chunk["choices"]) == has_choice
        assert ("usage" in chunk) == (not has_choice)


def test_r28_each_event_is_sent_when_it_is_made() -> None:
    with serve_script([part for data in (b"0", b"1", b"2", b"3") for part in (data, Pause(0.15))]) as served:
        body = body_for(served, COMPLETIONS, max_tokens=100, stream=True)
        with httpx2.stream("POST", served.url + COMPLETIONS, json=body, verify=NO_TLS) as response:
            assert response.headers["cache-control"] == "no-store"
            assert response.headers["x-accel-buffering"] == "no"
            assert "content-length" not in response.headers
            times = {
                text: time.monotonic() for chunk in response.iter_raw() for text in b"0123" if b'"%c"' % text in chunk
            }
        assert [later - earlier > 0.1 for earlier, later in pairwise(times.values())] == [True] * 3


ODD = 'a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj\rk\nl\x00m\ufeffn</s>"\\'


@pytest.mark.parametrize("path", BOTH)
def test_a_reader_that_splits_at_every_kind_of_line_break_survives(path: str) -> None:
    with serve_script([ODD.encode()]) as served:
        response = served.post(path, body_for(served, path, max_tokens=200, stream=True))
        texts = []
        for line in response.text.splitlines():
            assert line == "" or line.startswith("data: ")
            if line not in ("", "data: [DONE]"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts.append(choice.get("text") or choice.get("delta", {}).get("content", ""))
        assert "".join(texts) == ODD
        assert text_of(served.post(path, body_for(served, path, max_tokens=200)).json()) == ODD
        lines = []
        with httpx2.stream("POST", served.url + path, json=body_for(served, path, stream=True), verify=NO_TLS) as live:
            lines = [line for line in live.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Silence and failure


@pytest.mark.parametrize("path", BOTH)
def test_c058_silence_is_filled_with_comments(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    with serve_script([Pause(0.3), b"a", Pause(0.2), b"b"]) as served:
        data = served.post(path, body_for(served, path, stream=True)).content
        assert fold(read_events(data))["choices"][0]["text"] == "ab"
        events = data.decode().split("\n\n")[:-1]
        comments = [event for event in events if not event.startswith("data: ")]
        assert set(comments) == {": keep-alive"}
        assert len(comments) >= 5
        assert events[-1] == "data: [DONE]"
        assert events[-2].startswith("data: "), "R25: none after the last token"
        with served.client() as client:
            answers = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=True
            )
            assert "".join(chunk.choices[0].delta.content or "" for chunk in answers) == "ab"


def test_c058_a_busy_stream_has_no_comments(words: Served) -> None:
    data = words.post(CHAT, body_for(words, CHAT, stream=True, max_tokens=3000)).content
    assert b": keep-alive" not in data


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_r27_a_failure_in_a_stream_is_one_error_event(path: str, n: int) -> None:
    with serve_script([b"some text", Fault("the engine has had enough")]) as served:
        response = served.post(path, body_for(served, path, stream=True, n=n, max_tokens=100))
        assert response.status_code == 200
        chunks = read_events(response.content)
        errors = [chunk for chunk in chunks if "error" in chunk]
        assert errors == chunks[-1:]
        error = check_error_body(errors[0])
        assert (error["message"], error["type"]) == ("the engine has had enough", "server_error")
        assert all(choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"])
        assert eventually(lambda: is_idle(served))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("n", [1, 3])
def test_a_failure_without_a_stream_is_a_plain_error(path: str, n: int) -> None:
    with serve_script([b"some text", Fault("the engine has had enough")]) as served:
        error = check_error(served.post(path, body_for(served, path, n=n, max_tokens=100)), 500)
        assert error["message"] == "the engine has had enough"
        assert eventually(lambda: is_idle(served))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("fields", "status"),
    [({"model": "none"}, 404), ({"max_tokens": -1}, 400), ({"logit_bias": {"300": 1}}, 400), ({"logprobs": 1}, 400)],
)
def test_r27_a_failure_before_the_first_byte_is_plain_json(
    words: Served, path: str, fields: dict[str, Any], status: int
) -> None:
    check_error(words.post(path, body_for(words, path, stream=True, **fields)), status, next(iter(fields)))


# ---------------------------------------------------------------------------------------------------------------------
# Clients that leave


def leave(served: Served, path: str, body: dict[str, Any], *, when: Callable[[socket.socket], None]) -> None:
    """Send a request over a bare socket, wait as `when` says and close it at once."""
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        when(connection)


def after_three_events(connection: socket.socket) -> None:
    """Wait for three events."""
    data = b""
    while data.count(b"\n\n") < 4:  # The first ends the head.
        piece = connection.recv(4096)
        assert piece
        data += piece.replace(b"\r\n\r\n", b"\n\n")


def after(seconds: float) -> Callable[[socket.socket], None]:
    """Wait a fixed time."""
    return lambda _: time.sleep(seconds)


def once(condition: Callable[[], bool]) -> Callable[[socket.socket], None]:
    """Wait for a condition."""

    def wait(_: socket.socket) -> None:
        assert eventually(condition)

    return wait


def worker_seconds(served: Served) -> float:
    """Processor time of the engine's worker."""
    fields = Path(f"/proc/{served.engine.worker_pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


LONG = "The keeper wrote in the log of the lighthouse, day after day. " * 60


@pytest.fixture(scope="module")
def solo() -> Iterator[Served]:
    """A server with the small model where nobody ever leaves."""
    with serve_weights(SMALL) as served:
        yield served


@pytest.mark.alone
@pytest.mark.parametrize(
    ("path", "phase"),
    [(COMPLETIONS, "prefill"), (CHAT, "decode"), (CHAT, "whole"), (COMPLETIONS, "whole decode")],
)
def test_c055_r30_work_ends_when_its_client_leaves(small: Served, solo: Served, path: str, phase: str) -> None:
    prompt = f"{phase} {path} {LONG[:200] if phase == 'whole decode' else LONG}"  # Not in the cache yet.
    source = {"prompt": prompt} if path == COMPLETIONS else {"messages": [user(prompt)]}
    body = body_for(small, path, **source, max_tokens=4000, stream="whole" not in phase)
    short = body_for(small, COMPLETIONS, prompt="One, two,", max_tokens=4)
    expected = text_of(small.post(COMPLETIONS, short).json())
    moment = {"decode": after_three_events, "whole decode": after(0.3)}.get(phase, after(0.02))
    leave(small, path, body, when=moment)
    assert text_of(small.post(COMPLETIONS, short).json()) == expected
    assert eventually(lambda: is_idle(small), 10), "its 4,000 tokens are written for nobody"
    before = worker_seconds(small)
    time.sleep(0.3)
    assert worker_seconds(small) - before < 0.1, "the worker goes on"
    again = {**body, "max_tokens": 8, "stream": False}
    assert text_of(small.post(path, again).json()) == text_of(solo.post(path, again).json())


def test_c055_a_dead_request_leaves_nothing_behind(small: Served) -> None:
    body = body_for(small, COMPLETIONS, prompt="The moon is", max_tokens=8)
    expected = text_of(small.post(COMPLETIONS, body).json())
    for seconds in (0.0, 0.01, 0.05, 0.1):
        leave(small, COMPLETIONS, {**body, "max_tokens": 500, "stream": True}, when=after(seconds))
        assert text_of(small.post(COMPLETIONS, body).json()) == expected
    assert eventually(lambda: is_idle(small))


def test_c055_a_hundred_who_leave_cost_nothing(small: Served) -> None:
    def resident(pid: int | str) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096

    def go(num: int) -> tuple[int, int, int, int]:
        for index in range(num):
            path = BOTH[index % 2]
            body = body_for(small, path, max_tokens=500, stream=index % 3 > 0)
            leave(small, path, body, when=after(0.02 * (index % 3)))
        assert eventually(lambda: is_idle(small))
        return len(own_threads()), num_sockets(), resident("self"), resident(small.engine.worker_pid)

    threads, sockets, server, worker = go(20)
    then = go(100)
    assert then[0] <= threads
    assert then[1] <= sockets + 2
    assert then[2] < server + 8 * 2**20
    assert then[3] < worker + 32 * 2**20


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_r30_a_client_that_leaves_while_waiting_gives_its_turn_up(n: int, streamed: bool) -> None:
    with serve_script([Pause(30)], admission=Admission(max_running=1)) as served:
        hold = body_for(served, COMPLETIONS, stream=True)
        with httpx2.stream("POST", served.url + COMPLETIONS, json=hold, verify=NO_TLS):

            def waiting() -> bool:
                counts = served.get("/health").json()["models"]["m"]
                return (counts["running"], counts["waiting"]) == (1, n)

            leave(served, COMPLETIONS, body_for(served, COMPLETIONS, stream=streamed, n=n), when=once(waiting))
            assert eventually(lambda: num_running(served) == 1)
        assert eventually(lambda: is_idle(served))
        assert served.engine.counters()["cancelled"] == 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_r30_the_engine_sees_the_cancellation_at_once(n: int, streamed: bool) -> None:
    with serve_script([b"x", Pause(30)]) as served:
        body = body_for(served, CHAT, stream=streamed, n=n)
        leave(served, CHAT, body, when=once(lambda: num_running(served) == n))
        assert eventually(lambda: is_idle(served))
        assert served.engine.counters() == {"running": 0, "cancelled": n}


def test_r30_a_client_that_leaves_before_its_body_is_there_is_forgotten(words: Served) -> None:
    host, port = words.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    assert text_of(words.complete("x", max_tokens=5)) == "word0"
    assert is_idle(words)
