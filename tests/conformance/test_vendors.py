"""What holds on every vendor's paths, each in its own shape: keys, paths, bodies, marks, streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from legato.config import ServerSettings
from legato.engines.scripted import Fault, Pause
from legato.run.admission import Admission
from tests.conformance.reading import eventually, fold, num_running, read_events, text_of, user
from tests.conformance.vendors import (
    CHATS,
    DASHSCOPE,
    DASHSCOPE_CHAT,
    DEEPSEEK,
    DEEPSEEK_CHAT,
    MAAS,
    MAAS_FLAGS,
    MISTRAL,
    PATHS,
    body,
    check_for,
    refused,
    stream,
)
from tests.conftest import NO_TLS, Served, serve_script

ANSWER = " three, four."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script([ANSWER.encode()]) as served:
        yield served


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serve_script([b"x"], server=ServerSettings(port=0, api_keys=("right",))) as served:
        yield served


@pytest.mark.parametrize("path", PATHS)
def test_answers_and_streams_the_same(served: Served, path: str) -> None:
    answer = served.post(path, body(path, max_tokens=6)).json()
    assert text_of(answer) == ANSWER[:6]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6
    chunks = stream(served, path, max_tokens=6)
    choice = fold(chunks)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER[:6], "length")
    assert all(chunk["choices"] for chunk in chunks), "usage was not asked for"


@pytest.mark.parametrize("path", [path for path in PATHS if path != MISTRAL])
def test_usage_in_a_stream_when_asked_for(served: Served, path: str) -> None:
    *chunks, last = stream(served, path, max_tokens=6, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == served.post(path, body(path, max_tokens=6)).json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "missing", "wrong"),
    [
        (MAAS, (400, "ModelArts.81002"), (401, "ModelArts.81003")),
        (MAAS_FLAGS, (400, "ModelArts.81002"), (401, "ModelArts.81003")),
        ("/openai/v1/models", (400, "ModelArts.81002"), (401, "ModelArts.81003")),
        (DASHSCOPE, (401, "invalid_api_key"), (401, "invalid_api_key")),
        (DASHSCOPE_CHAT, (401, "invalid_api_key"), (401, "invalid_api_key")),
        (DEEPSEEK, (401, "authentication_error"), (401, "authentication_error")),
        (DEEPSEEK_CHAT, (401, "authentication_error"), (401, "authentication_error")),
        (MISTRAL, (401, "invalid_api_key"), (401, "invalid_api_key")),
    ],
)
def test_a_missing_and_a_wrong_key(locked: Served, path: str, missing: tuple[int, str], wrong: tuple[int, str]) -> None:
    def ask(headers: dict[str, str]) -> httpx2.Response:
        return locked.get(path, headers=headers) if "models" in path else locked.post(path, body(path), headers=headers)

    for headers, expected in (
        ({}, missing),
        ({"authorization": "Basic right"}, missing),
        ({"authorization": "Bearer wrong"}, wrong),
    ):
        response = ask(headers)
        assert (response.status_code, check_for(path)(response.json())[0]) == expected
        assert ("www-authenticate" in response.headers) == (response.status_code == 401)
    assert ask({"authorization": "Bearer right"}).status_code == 200
    assert ask({"authorization": "Bearer right", "x-api-key": "right"}).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_what_is_wrong_around_the_body(served: Served, path: str) -> None:
    check = check_for(path)
    wrong = served.get(path)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    check(wrong.json())
    nowhere = served.post(f"{path}/nowhere", {})
    assert nowhere.status_code == 404
    check(nowhere.json())
    for content, kind, status in (
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"[" * 9_000_000, "application/json", 413),
    ):
        response = httpx2.post(served.url + path, content=content, headers={"content-type": kind}, verify=NO_TLS)
        assert response.status_code == status, response.text
        check(response.json())


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (MAAS, "ModelArts.81009"),
        (MAAS_FLAGS, "ModelArts.81009"),
        (DASHSCOPE, "model_not_found"),
        (DASHSCOPE_CHAT, "model_not_found"),
        (DEEPSEEK, "not_found_error"),
        (DEEPSEEK_CHAT, "not_found_error"),
        (MISTRAL, "model_not_found"),
    ],
)
def test_an_unknown_model(served: Served, path: str, code: str) -> None:
    told, message = refused(served, path, 404, model="nowhere")
    assert told == code
    assert "`nowhere`" in message


@pytest.mark.parametrize(
    ("path", "limited", "unavailable"),
    [
        (MAAS, "ModelArts.81101", "APIG.0203"),
        (DASHSCOPE, "rate_limit_exceeded", "overloaded"),
        (DEEPSEEK, "rate_limit_error", "server_error"),
        (MISTRAL, "rate_limit_exceeded", "overloaded"),
    ],
)
def test_no_place(path: str, limited: str, unavailable: str) -> None:
    def ask(served: Served) -> tuple[int, str]:
        response = served.post(path, body(path))
        assert int(response.headers["retry-after"]) > 0
        return response.status_code, check_for(path)(response.json())[0]

    for admission, expected in (
        (Admission(max_running=1, max_waiting=0), (429, limited)),
        (Admission(max_running=1, max_waiting=1, max_wait_s=0.05), (503, unavailable)),
    ):
        with (
            serve_script([b"a", Pause(5)], admission=admission) as served,
            httpx2.stream(
                "POST", served.url + path, json=body(path, stream=True), timeout=20, verify=NO_TLS
            ) as running,
        ):
            pieces = running.iter_raw()  # Forgotten, it would close the connection.
            next(pieces)
            assert eventually(lambda: num_running(served) == 1)
            assert ask(served) == expected


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (MAAS, "generation_failed"),
        (DASHSCOPE, "generation_failed"),
        (DEEPSEEK, "server_error"),
        (MISTRAL, "generation_failed"),
    ],
)
def test_a_failure_before_and_after_the_first_byte(path: str, code: str) -> None:
    check = check_for(path)
    with serve_script([Fault("broken")]) as served:
        response = served.post(path, body(path))
        assert response.status_code == 500
        assert check(response.json()) == (code, "broken")
    with serve_script([b"a", Fault("broken")]) as served:
        *_, last = read_events(served.post(path, body(path, stream=True)).content)
        assert check(last) == (code, "broken")


# ---------------------------------------------------------------------------------------------------------------------
# Marks

TURNS = [user("Count."), {"role": "assistant", "content": "One, two"}]
MARKS: dict[str, tuple[str, ...]] = {
    MAAS: ("prefix",),
    MAAS_FLAGS: ("continue_final_message", "add_generation_prompt"),
    DASHSCOPE_CHAT: ("partial",),
    DEEPSEEK_CHAT: ("prefix",),
}
EVERY: dict[str, Any] = {
    "prefix": True,
    "partial": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
}


def marked(names: tuple[str, ...]) -> dict[str, Any]:
    """The turns with marks on the last message and beside the messages."""
    last = {**TURNS[1], **{name: EVERY[name] for name in names if name in ("prefix", "partial")}}
    return {"messages": [TURNS[0], last], **{name: EVERY[name] for name in names if name not in last}}


@pytest.mark.parametrize("path", CHATS)
def test_a_mark_continues_and_is_not_replayed(small: Served, path: str) -> None:
    asked = {"model": small.name, "temperature": 0, "seed": 7, "max_tokens": 8}
    response = small.post(path, {**asked, **marked(MARKS[path])})
    answer = small.post("/v1/chat/completions", {**asked, **marked(("prefix",))}).json()
    assert "legato-ignored" not in response.headers
    assert text_of(response.json()) == text_of(answer)
    assert response.json()["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", CHATS)
def test_without_a_mark_of_its_own_a_new_turn_begins(small: Served, path: str) -> None:
    """Also with the marks of every other dialect, which are named."""
    asked = {"model": small.name, "temperature": 0, "seed": 7, "max_tokens": 8}
    expected = small.post("/v1/chat/completions", {**asked, "messages": TURNS}).json()
    plain = small.post(path, {**asked, "messages": TURNS})
    assert "legato-ignored" not in plain.headers
    assert text_of(plain.json()) == text_of(expected)
    foreign = tuple(name for name in EVERY if name not in MARKS[path])
    response = small.post(path, {**asked, **marked(foreign)})
    assert text_of(response.json()) == text_of(expected)
    assert sorted(response.headers["legato-ignored"].split(", ")) == sorted(
        f"messages[1].{name}" if name in ("prefix", "partial") else name for name in foreign
    )


@pytest.mark.parametrize("path", [MAAS, DASHSCOPE_CHAT, DEEPSEEK_CHAT])
def test_a_mark_in_the_wrong_place(served: Served, path: str) -> None:
    (name,) = MARKS[path]
    for messages, at in (
        ([{"role": "assistant", "content": "a", name: True}, user("b")], 0),
        ([user("a"), {"role": "user", "content": "b", name: True}], 1),
    ):
        _, message = refused(served, path, 400, messages=messages)
        assert f"`messages[{at}].{name}`" in message


@pytest.mark.parametrize("path", CHATS)
def test_an_empty_prefix_starts_the_turn(served: Served, path: str) -> None:
    given = marked(MARKS[path])
    given["messages"][1]["content"] = ""
    assert text_of(served.post(path, body(path, **given)).json()) == ANSWER


@pytest.mark.parametrize("path", [path for path in PATHS if path != MISTRAL])
def test_nothing_is_ignored_silently(served: Served, path: str) -> None:
    response = served.post(path, body(path, foo=1, top_a=0.2, bar=None))
    assert response.headers["legato-ignored"] == "foo, top_a"


@pytest.mark.parametrize("path", [path for path in PATHS if path not in (MISTRAL, DEEPSEEK)])
def test_echo_belongs_to_others(served: Served, path: str) -> None:
    response = served.post(path, body(path, echo=True, max_tokens=4))
    assert response.headers["legato-ignored"] == "echo"
    assert text_of(response.json()) == ANSWER[:4]
