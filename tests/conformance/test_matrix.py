"""One continuation asked through every dialect is one text, streamed and whole.

Ways to ask that have the same prompt share an expected text: raw prompts one, chats another, infills a third.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.conformance.reading import CHAT, COMPLETIONS, user
from tests.conformance.routes import COMPLETION, GENERATE, INFILL, body_on, parts_of, text_in
from tests.conformance.vendors import DASHSCOPE, DASHSCOPE_CHAT, DEEPSEEK, DEEPSEEK_CHAT, MAAS, MAAS_FLAGS, MISTRAL
from tests.conftest import Served

NUM_TOKENS = 8


def asked(served: Served, path: str, stream: bool, **fields: Any) -> str:
    """Ask a path; return the text, and check that nothing was ignored."""
    response = served.post(path, body_on(path, NUM_TOKENS, model=served.name, stream=stream, **fields))
    assert response.status_code == 200, response.text
    assert "legato-ignored" not in response.headers
    if not stream:
        return text_in(response.json())
    return "".join(map(text_in, parts_of(path, response.content)))


# ---------------------------------------------------------------------------------------------------------------------
# Raw prompts

PREFIXES = ["The capital of Fran", "Drei Länder:\n1. Österreich\n2. "]
"""One ends inside a word; one ends in a blank and has characters of several bytes."""
RAW_WAYS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "openai": lambda prefix: (COMPLETIONS, {"prompt": prefix}),
    "openai, a list": lambda prefix: (COMPLETIONS, {"prompt": [prefix]}),
    "moark": lambda prefix: (COMPLETIONS, {"prompt": prefix, "instructions": None}),
    "dashscope": lambda prefix: (DASHSCOPE, {"prompt": prefix}),
    "dashscope, markers": lambda prefix: (DASHSCOPE, {"prompt": f"<|fim_prefix|>{prefix}<|fim_suffix|>"}),
    "deepseek": lambda prefix: (DEEPSEEK, {"prompt": prefix}),
    "mistral": lambda prefix: (MISTRAL, {"prompt": prefix}),
    "llama.cpp": lambda prefix: (COMPLETION, {"prompt": prefix}),
    "ollama": lambda prefix: (GENERATE, {"prompt": prefix, "raw": True}),
}


@cache
def raw_text(served: Served, prefix: str) -> str:
    """What every way is to give."""
    text = str(served.complete(prefix, max_tokens=NUM_TOKENS)["choices"][0]["text"])
    assert len(text) > 8
    assert not text.startswith(prefix)
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("way", RAW_WAYS)
def test_a_raw_prompt_has_one_continuation(small: Served, way: str, prefix: str, stream: bool) -> None:
    path, fields = RAW_WAYS[way](prefix)
    assert asked(small, path, stream, **fields) == raw_text(small, prefix)


# ---------------------------------------------------------------------------------------------------------------------
# Chats

QUESTION = user("Tell me about the sea.")
OPENINGS = ["The sea is a va", ""]


def begun(text: Any, **mark: Any) -> dict[str, Any]:
    """A chat whose last message is begun."""
    return {"messages": [QUESTION, {"role": "assistant", "content": text, **mark}]}


FLAG = {"continue_final_message": True}
FLAGS = {**FLAG, "add_generation_prompt": False}
CHAT_WAYS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "openai, prefix": lambda text: (CHAT, begun(text, prefix=True)),
    "openai, a flag": lambda text: (CHAT, {**begun(text), **FLAG}),
    "kimi": lambda text: (CHAT, begun(text, partial=True)),
    "vllm": lambda text: (CHAT, {**begun(text), **FLAGS}),
    "mistral": lambda text: (CHAT, begun([{"type": "text", "text": text}], prefix=True)),
    "maas v2": lambda text: (MAAS, begun(text, prefix=True)),
    "maas, flags": lambda text: (MAAS_FLAGS, {**begun(text), **FLAGS}),
    "dashscope": lambda text: (DASHSCOPE_CHAT, begun(text, partial=True)),
    "deepseek": lambda text: (DEEPSEEK_CHAT, begun(text, prefix=True)),
}


@cache
def chat_text(served: Served, text: str) -> str:
    """What every way is to give: what follows the chat's own prompt, laid out by hand."""
    prompt = served.post("/apply-template", begun(text)).json()["prompt"]
    assert prompt.endswith(f"assistant\n{text}")
    answer = str(served.complete(prompt, max_tokens=NUM_TOKENS)["choices"][0]["text"])
    assert len(answer) > 8
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", OPENINGS)
@pytest.mark.parametrize("way", CHAT_WAYS)
def test_a_begun_message_has_one_continuation(small: Served, way: str, text: str, stream: bool) -> None:
    path, fields = CHAT_WAYS[way](text)
    assert asked(small, path, stream, **fields) == chat_text(small, text)


# ---------------------------------------------------------------------------------------------------------------------
# Infills

BEFORE, AFTER = "def mean(values):\n    tot", "\n    return total / len(values)\n"
INFILL_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (COMPLETIONS, {"prompt": BEFORE, "suffix": AFTER}),
    "dashscope": (DASHSCOPE, {"prompt": f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"}),
    "deepseek": (DEEPSEEK, {"prompt": BEFORE, "suffix": AFTER}),
    "mistral": (MISTRAL, {"prompt": BEFORE, "suffix": AFTER}),
    "llama.cpp": (INFILL, {"input_prefix": BEFORE, "input_suffix": AFTER}),
    "ollama": (GENERATE, {"prompt": BEFORE, "suffix": AFTER, "raw": False}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", INFILL_WAYS)
def test_a_gap_is_filled_with_one_text(default: Served, way: str, stream: bool) -> None:
    path, fields = INFILL_WAYS[way]
    expected = default.complete(BEFORE, suffix=AFTER, max_tokens=NUM_TOKENS)["choices"][0]["text"]
    assert expected.startswith("al")
    assert asked(default, path, stream, **fields) == expected
