"""What the tests of the vendors' dialects share: the shape of each one's errors, and the examples that it publishes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.conformance.programs import run
from tests.conformance.reading import read_events, user
from tests.conftest import Served

MAAS, MAAS_FLAGS = "/v2/chat/completions", "/openai/v1/chat/completions"
DASHSCOPE, DASHSCOPE_CHAT = "/compatible-mode/v1/completions", "/compatible-mode/v1/chat/completions"
DEEPSEEK, DEEPSEEK_CHAT = "/beta/completions", "/beta/chat/completions"
MISTRAL = "/v1/fim/completions"
CHATS = (MAAS, MAAS_FLAGS, DASHSCOPE_CHAT, DEEPSEEK_CHAT)
PATHS = (*CHATS, DASHSCOPE, DEEPSEEK, MISTRAL)

_EXAMPLES = Path(__file__).parent / "examples"
_HOSTS = (
    "https://api-ap-southeast-1.modelarts-maas.com",
    "https://api.moonshot.ai",
    "https://dashscope.aliyuncs.com",
    "https://moark.ai",
)
KEY = "sk-0123456789"
"""What the examples find where they look for a key."""


def body(path: str, **fields: Any) -> dict[str, Any]:
    """A small request for a path."""
    source: dict[str, Any] = {"messages": [user("Hi")]} if path in CHATS else {"prompt": "One, two,"}
    return {"model": "m", **source, **fields}


def run_example(served: Served, name: str, folder: Path, changes: Mapping[str, str] | None = None) -> str:
    """Run a vendor's example as it is, but for the address and `changes`; return what it printed."""
    source = _EXAMPLES / name
    text = source.read_text("utf-8")
    for old, new in {**dict.fromkeys(_HOSTS, served.url), **(changes or {})}.items():
        assert old in text or old in _HOSTS, f"{name} has no {old}"
        text = text.replace(old, new)
    return run(source.suffix, text, folder, DASHSCOPE_API_KEY=KEY, MAAS_API_KEY=KEY, MOONSHOT_API_KEY=KEY)


def stream(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Post a streaming request and return its chunks."""
    response = served.post(path, body(path, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    return read_events(response.content)


# ---------------------------------------------------------------------------------------------------------------------
# Errors: each checks the shape and returns code and message.


def check_maas(body: Any) -> tuple[str, str]:
    """Both envelopes; one alone for keys."""
    if "error" not in body:
        assert set(body) == {"error_code", "error_msg"}
        return body["error_code"], body["error_msg"]
    assert set(body) == {"error", "error_code", "error_msg", "span_id"}
    assert set(body["error"]) == {"code", "message", "param", "type"}
    assert (body["error_code"], body["error_msg"]) == (body["error"]["code"], body["error"]["message"])
    assert re.fullmatch("[0-9a-f]{32}", body["span_id"])
    return body["error_code"], body["error_msg"]


def check_dashscope(body: Any) -> tuple[str, str]:
    """An error and a request id."""
    assert set(body) == {"error", "request_id"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] is None
    assert str(uuid.UUID(body["request_id"])) == body["request_id"]
    return body["error"]["code"], body["error"]["message"]


def check_deepseek(body: Any) -> tuple[str, str]:
    """OpenAI's four keys; the code repeats the type."""
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] is None
    assert body["error"]["code"] == body["error"]["type"]
    return body["error"]["code"], body["error"]["message"]


def check_mistral(body: Any) -> tuple[str, str]:
    """Flat, or the details of a field."""
    if "detail" in body:
        (detail,) = body["detail"]
        assert set(detail) == {"type", "loc", "msg"}
        assert detail["loc"][0] == "body"
        return detail["type"], detail["msg"]
    assert set(body) == {"object", "message", "type", "param", "code"}
    assert body["object"] == "error"
    assert body["type"] in {"invalid_request_error", "authentication_error", "rate_limit_error", "server_error"}
    return body["code"], body["message"]


def check_for(path: str) -> Callable[[Any], tuple[str, str]]:
    """Return what checks the errors of a path."""
    return {"v2": check_maas, "openai": check_maas, "compatible-mode": check_dashscope, "beta": check_deepseek}.get(
        path.split("/")[1], check_mistral
    )


def refused(served: Served, path: str, status: int, **fields: Any) -> tuple[str, str]:
    """Post what is refused; return code and message. A stream is refused like anything else."""
    given = body(path, **fields)
    told = []
    for options in ({}, {"stream": True}):
        response = served.post(path, {**given, **options})
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        told.append(check_for(path)(response.json()))
    assert told[0] == told[1]
    return told[0]
