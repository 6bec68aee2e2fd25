"""Vercel's AI SDK, with its providers for OpenAI's likes, DeepSeek, Moonshot AI and Mistral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.programs import ask_client
from tests.conformance.reading import marked, text_of, user
from tests.conftest import Served


@pytest.fixture(scope="module")
def failed(small: Served, node_packages: Path) -> Any:
    """What the providers raise."""
    return ask_client("ai_sdk.mjs", node_packages, small, "fails")


def test_generates_and_streams(small: Served, node_packages: Path) -> None:
    told = ask_client("ai_sdk.mjs", node_packages, small, "generates")
    for answer in (told["completion"], told["chat"]):
        assert answer["whole"] == answer["streamed"]
        assert answer["whole"]["text"]
        assert (answer["whole"]["finish"], answer["whole"]["output"]) == ("length", 8)
        assert answer["pieces"] > 4


def test_r12_every_provider_continues_a_message(small: Served, node_packages: Path) -> None:
    """DeepSeek's at `/beta`, with `prefix`; Moonshot AI's with `partial`; Mistral's marks the last message unasked."""
    told = ask_client("ai_sdk.mjs", node_packages, small, "continues")
    text = text_of(small.chat(user("Count."), marked("Count: 1 2 3"), max_tokens=8))
    assert set(told) == {"compatible", "deepseek", "moonshotai", "mistral"}
    for provider, answer in told.items():
        assert answer["whole"] == {"text": text, "finish": "length", "output": 8}, provider
        assert (answer["streamed"]["text"], answer["streamed"]["finish"]) == (text, "length"), provider
        assert answer["pieces"] > 4, provider


def test_r3_errors_have_our_message(failed: Any) -> None:
    for provider in ("compatible", "deepseek"):
        assert failed[provider] == {
            "kind": "AI_APICallError",
            "message": "`temperature` must be less than or equal to 2, got 3",
            "status": 400,
        }


def test_r12_deepseeks_provider_continues_at_beta_alone(failed: Any) -> None:
    """Elsewhere it refuses before it sends anything."""
    assert failed["unsent"]["status"] is None
    assert "base URL ending in `/beta`" in failed["unsent"]["message"]
