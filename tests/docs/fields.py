"""The fields that vendors document, and what becomes of each here: the dialects are asked, with a value of effect.

A field is `supported`, `ignored` (accepted, and named in `Legato-Ignored`) or `refused`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from legato.dialects import dashscope, deepseek, maas, mistral, openai
from legato.dialects.base import Dialect
from legato.errors import RequestError

__all__ = ["PATHS", "Fate", "VendorPath", "bodies", "fate", "named"]

Fate = Literal["supported", "ignored", "refused"]

_TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
_CALLS = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
_JSON = {"type": "json_object"}

VALUES: Mapping[str, Any] = {
    "model": "m",
    "prompt": "Once",
    "suffix": " end.",
    "instructions": "Be brief.",
    "echo": True,
    "messages[i].role": "user",
    "messages[i].content": "Once",
    "messages[i].name": "Tom",
    "messages[i].reasoning_content": "Hm.",
    "messages[i].tool_calls": _CALLS,
    "messages[i].tool_call_id": "a",
    "messages[i].prefix": True,
    "messages[i].partial": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "stream": True,
    "stream_options.include_usage": True,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "stop": ["x"],
    "seed": 1,
    "random_seed": 1,
    "n": 2,
    "best_of": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "top_logprobs": 2,
    "tools": _TOOLS,
    "tool_choice": "none",
    "response_format": _JSON,
    "thinking.type": "enabled",
    "thinking.keep": "all",
    "enable_thinking": True,
    "reasoning_effort": "low",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_key": "a",
    "safety_identifier": "a",
    "metadata": {"a": "b"},
}
"""A value of each field that asks for something; `logprobs` is true in a chat and a number elsewhere."""

COMPANIONS: Mapping[str, Mapping[str, Any]] = {
    "stream_options.include_usage": {"stream": True},
    "add_generation_prompt": {"continue_final_message": True},
    "thinking.type": {"messages": [{"role": "user", "content": "Hi"}]},
    "thinking.keep": {"thinking": {"type": "enabled"}},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": _TOOLS},
}
"""What a field needs beside it."""


@dataclass(frozen=True)
class VendorPath:
    """A path, and the fields that its vendor documents or that clients of other vendors send."""

    path: str
    dialect: Dialect
    names: Sequence[str]


def _names(text: str) -> Sequence[str]:
    return text.replace("m.", "messages[i].").split()


_FLAGS = "continue_final_message add_generation_prompt"
_CHAT = (
    "model m.role m.content stream stream_options.include_usage max_tokens temperature top_p stop presence_penalty "
    "frequency_penalty n seed response_format tools tool_choice logprobs top_logprobs"
)

PATHS: Mapping[str, VendorPath] = {
    "fields of moark": VendorPath(
        "/v1/completions",
        openai.CompletionsDialect(),
        _names("model prompt instructions stream max_tokens temperature"),
    ),
    "fields of kimi": VendorPath(
        "/v1/chat/completions",
        openai.ChatDialect(),
        _names(
            f"{_CHAT} m.name m.partial m.reasoning_content m.tool_calls m.tool_call_id max_completion_tokens "
            "reasoning_effort thinking.type thinking.keep prediction prompt_cache_key safety_identifier"
        ),
    ),
    "fields of maas": VendorPath(
        "/v2/chat/completions",
        maas.PrefixChatDialect(),
        _names(f"{_CHAT} m.prefix m.tool_calls top_k reasoning_effort thinking.type m.partial {_FLAGS}"),
    ),
    "fields of maas flags": VendorPath(
        "/openai/v1/chat/completions",
        maas.FlaggedChatDialect(),
        _names(f"{_CHAT} {_FLAGS} m.tool_calls top_k reasoning_effort thinking.type m.prefix m.partial"),
    ),
    "fields of dashscope completions": VendorPath(
        "/compatible-mode/v1/completions",
        dashscope.CompletionsDialect(),
        _names(
            "model prompt max_tokens temperature top_p stream stream_options.include_usage stop seed presence_penalty "
            "frequency_penalty logit_bias n best_of echo logprobs suffix"
        ),
    ),
    "fields of dashscope chat": VendorPath(
        "/compatible-mode/v1/chat/completions",
        dashscope.ChatDialect(),
        _names(f"{_CHAT} m.partial enable_thinking m.prefix {_FLAGS}"),
    ),
    "fields of deepseek completions": VendorPath(
        "/beta/completions",
        deepseek.CompletionsDialect(),
        _names(
            "model prompt suffix echo logprobs max_tokens stop temperature top_p frequency_penalty presence_penalty "
            "stream stream_options.include_usage n best_of instructions"
        ),
    ),
    "fields of deepseek chat": VendorPath(
        "/beta/chat/completions",
        deepseek.ChatDialect(),
        _names(f"{_CHAT} m.prefix m.reasoning_content m.name m.tool_calls thinking.type reasoning_effort m.partial"),
    ),
    "fields of mistral": VendorPath(
        "/v1/fim/completions",
        mistral.InfillDialect(),
        _names(
            "model prompt suffix max_tokens min_tokens temperature top_p stop random_seed stream metadata "
            "prompt_cache_key seed"
        ),
    ),
}


def bodies(path: VendorPath) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a request for each field of a path."""
    is_chat = "messages" in path.dialect.body.model_fields
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    for name in path.names:
        body: dict[str, Any] = {"model": "m", "max_tokens": 1}
        body |= {"messages": deepcopy(turns)} if is_chat else {"prompt": "Once"}
        body |= deepcopy(dict(COMPANIONS.get(name, {})))
        at = body
        *places, last = name.split(".")
        for place in places:
            at = at["messages"][-1] if place == "messages[i]" else at.setdefault(place, {})
        at[last] = VALUES.get(name, True if is_chat else 2)
        yield name, body


def fate(path: VendorPath, name: str, body: dict[str, Any]) -> Fate:
    """Return what becomes of a field."""
    try:
        ignored = path.dialect.parse(body).ignored
    except RequestError as error:
        if str(error.param) not in name:
            raise
        return "refused"
    return named(name, ignored)


def named(name: str, ignored: Sequence[str]) -> Fate:
    """Return what becomes of a field of an accepted request, of which so much was ignored."""
    own = name.replace("[i]", "[1]")
    return "ignored" if any(own == entry or own.startswith(f"{entry}.") for entry in ignored) else "supported"
