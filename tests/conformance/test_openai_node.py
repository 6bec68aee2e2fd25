"""The official OpenAI client for Node: what it sends, reads and raises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legato.engines.scripted import Fault, Pause
from tests.conformance.programs import ask_client
from tests.conformance.reading import marked, text_of, user
from tests.conftest import Served, serve_script

COUNT = "Count: 1 2 3"


@pytest.fixture(scope="module")
def continued(small: Served) -> str:
    """What comes after the count."""
    return text_of(small.complete(COUNT, max_tokens=8))


@pytest.fixture(scope="module")
def failed(small: Served, node_packages: Path) -> Any:
    """What the client raises for mistakes, and how often it asked."""
    return ask_client("openai.mjs", node_packages, small, "fails")


@pytest.fixture
def slow() -> Iterator[Served]:
    """An engine that says one thing and then nothing for long."""
    with serve_script([b"one", Pause(30), b"two"]) as served:
        yield served


def test_r1_r2_r5_completes_and_streams(small: Served, node_packages: Path, continued: str) -> None:
    """It accepts JSON alone even for a stream, says null for what is not given, and reads until the body ends."""
    told = ask_client("openai.mjs", node_packages, small, "completes")
    (choice,) = told["whole"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (continued, "length")
    assert told["whole"]["usage"]["completion_tokens"] == 8
    choices = [chunk["choices"][0] for chunk in told["chunks"]]
    assert len(choices) > 4
    assert "".join(choice["text"] for choice in choices) == continued
    assert choices[-1]["finish_reason"] == "length"


def test_chats_and_streams(small: Served, node_packages: Path) -> None:
    told = ask_client("openai.mjs", node_packages, small, "chats")
    (choice,) = told["whole"]["choices"]
    assert choice["message"]["content"]
    *chunks, last = told["chunks"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]
    assert last["usage"]["total_tokens"] == told["whole"]["usage"]["total_tokens"]


def test_r7_r10_every_mark_continues_the_message(small: Served, node_packages: Path) -> None:
    """On the message, and as fields of the request that the client does not know."""
    told = ask_client("openai.mjs", node_packages, small, "continues")
    text = text_of(small.chat(user("Count."), marked(COUNT), max_tokens=8))
    expected = dict.fromkeys(("prefix", "partial", "flags"), text)
    assert {mark: texts["whole"] for mark, texts in told.items()} == {**expected, "echo": COUNT + text}
    assert all(texts["streamed"] == texts["whole"] for texts in told.values())


def test_r3_an_error_shows_its_message_code_param_and_type(failed: Any) -> None:
    whole, streamed, message, model = failed["failures"]
    assert whole == streamed
    assert whole == {
        "kind": "BadRequestError",
        "status": 400,
        "message": "400 `max_tokens` must be greater than or equal to 0, got -1",
        "code": "invalid_value",
        "param": "max_tokens",
        "type": "invalid_request_error",
    }
    assert (message["status"], message["param"]) == (400, "messages")
    assert "`messages[1].prefix`" in message["message"]
    assert (model["kind"], model["code"], model["param"]) == ("NotFoundError", "model_not_found", "model")


def test_r4_a_mistake_is_sent_once(failed: Any) -> None:
    """The client sends again, twice, what fails with 408, 409, 429 or 5xx."""
    assert failed["requests"] == len(failed["failures"])


def test_a_failure_in_a_stream_is_raised_with_its_message(node_packages: Path) -> None:
    with serve_script([b"some ", b"text", Fault("the engine has had enough")]) as served:
        told = ask_client("openai.mjs", node_packages, served, "breaks")
    assert told["text"] == "some text"
    assert told["failure"]["kind"] == "APIError"
    assert "the engine has had enough" in told["failure"]["message"]
    assert told["requests"] == 1


def test_leaving_the_loop_early_cancels(slow: Served, node_packages: Path) -> None:
    """The client says how many are left while its process still runs."""
    counts = ask_client("openai.mjs", node_packages, slow, "leaves")
    assert (counts["running"], counts["waiting"]) == (0, 0)


def test_r6_what_was_ignored_is_read_before_the_answer(small: Served, node_packages: Path, continued: str) -> None:
    told = ask_client("openai.mjs", node_packages, small, "reports")
    assert told["whole"] == told["streamed"] == "foo, top_a"
    assert told["text"] == told["streamed_text"] == continued
