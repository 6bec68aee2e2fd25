"""Every path that generates, and how its bodies are written and its answers are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.conformance.reading import CHAT, COMPLETIONS, user
from tests.conformance.vendors import CHATS, DASHSCOPE, DEEPSEEK, MISTRAL

COMPLETION, INFILL, GENERATE = "/completion", "/infill", "/api/generate"
RAW = (COMPLETIONS, DASHSCOPE, DEEPSEEK, MISTRAL, COMPLETION, GENERATE)
"""Paths that continue a prompt."""
OPENAI_SHAPED = (COMPLETIONS, CHAT, *CHATS, DASHSCOPE, DEEPSEEK, MISTRAL)
"""Paths whose answers have choices and whose streams end in `[DONE]`."""
NATIVE = (COMPLETION, INFILL, GENERATE)
EVENTS = (*OPENAI_SHAPED, COMPLETION, INFILL)
"""Paths whose streams are server-sent events."""
EVERY = (*OPENAI_SHAPED, *NATIVE)


def body_on(path: str, num_tokens: int = 4, *, model: str = "m", stream: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a small greedy request for a path; `fields` replace what it has."""
    body: dict[str, Any] = {"model": model, "stream": stream}
    if path == GENERATE:
        options = {"num_predict": num_tokens, "temperature": 0, **fields.pop("options", {})}
        return {**body, "prompt": "One, two,", "raw": True, "options": options, **fields}
    body |= {"temperature": 0, ("n_predict" if path in NATIVE else "max_tokens"): num_tokens}
    if path == CHAT or path in CHATS:
        return {**body, "messages": [user("Hi")], **fields}
    if path == INFILL:
        return {**body, "input_prefix": "One, two,", "input_suffix": " nine, ten.\n", **fields}
    return {**body, "prompt": "One, two,", **fields}


def stops_on(path: str, stops: list[str]) -> dict[str, Any]:
    """Return the fields that stop an answer."""
    return {"options": {"stop": stops}} if path == GENERATE else {"stop": stops}


def text_in(answer: Mapping[str, Any]) -> str:
    """The text of an answer or of a part of a stream, in whatever shape."""
    if "choices" not in answer:
        return str(answer["response"] if "response" in answer else answer["content"])
    (choice,) = answer["choices"]
    if "text" in choice:
        return str(choice["text"])
    return str(choice["message" if "message" in choice else "delta"].get("content", ""))


def parts_of(path: str, data: bytes) -> list[dict[str, Any]]:
    """Read a stream strictly: the JSON values in it, without `[DONE]` and what fills silence."""
    if path == GENERATE:
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]
    events = data.decode().split("\n\n")
    assert events.pop() == "", "an event that is not finished"
    assert events.count("data: [DONE]") == (path in OPENAI_SHAPED)
    if path in OPENAI_SHAPED:
        assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(": ")]
