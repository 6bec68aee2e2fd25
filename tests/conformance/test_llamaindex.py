"""LlamaIndex's `OpenAILike`, as a model of completions, which it is unless told otherwise, and of chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import ask_client
from tests.conformance.reading import marked, text_of, user
from tests.conftest import Served

pytestmark = pytest.mark.timeout(300)  # The first test installs it.
COUNT = "Count: 1 2 3"


@pytest.fixture(scope="module")
def told(small: Served, python_packages: Path) -> Any:
    """What came of each way to use it."""
    return ask_client("llamaindex.py", python_packages, small)


def test_completes_and_streams(small: Served, told: Any) -> None:
    text = text_of(small.complete(COUNT, max_tokens=8))
    assert told["text"] == told["streamed"] == text


def test_a_chat_becomes_one_prompt(small: Served, told: Any) -> None:
    prompt = f"user: Count.\nassistant: {COUNT}\nassistant: "
    assert told["flattened"] == text_of(small.complete(prompt, max_tokens=8)).lstrip()


def test_r11_an_answer_without_a_limit_has_16_tokens_and_says_that_it_was_cut(told: Any) -> None:
    assert told["unlimited"] == {"finish": "length", "tokens": 16}


def test_r10_a_flag_of_the_request_continues_the_message(small: Served, told: Any) -> None:
    text = text_of(small.chat(user("Count."), marked(COUNT), max_tokens=8))
    assert told["continued"] == told["continued_streamed"] == text


def test_r3_a_mistake_is_a_bad_request_with_the_field(told: Any) -> None:
    assert told["refused"]["param"] == "stop"
    assert "`stop[1]`" in told["refused"]["message"]
