"""How these tests read answers: strictly, as the wire format has it, and folded, as a client would."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from tests.conftest import Served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]

_STREAM = re.compile(rb"(?:data: [^\r\n]*\n\n|: [^\r\n]*\n\n)+")
_ERROR_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "server_error",
}

Item = TypeVar("Item")
Result = TypeVar("Result")


def user(content: Any) -> dict[str, Any]:
    """A user's turn."""
    return {"role": "user", "content": content}


def marked(prefix: Any) -> dict[str, Any]:
    """An assistant's turn that is to be continued."""
    return {"role": "assistant", "content": prefix, "prefix": True}


def body_for(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    """A small greedy request on either route."""
    source: dict[str, Any] = {"prompt": "Count: 1 2 3"} if path == COMPLETIONS else {"messages": HI}
    return {"model": served.name, "temperature": 0, "seed": 7, "max_tokens": 4, **source, **fields}


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    """The text of a choice, on either route."""
    choice = answer["choices"][index]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def check_error(response: httpx2.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Check the status, and that the body is an error as every client can read it; return the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return check_error_body(response.json(), param)


def check_error_body(body: Any, param: str | None = None) -> dict[str, Any]:
    """Check an error's shape: OpenAI's four keys, a message for people, nothing about our files."""
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["type"] in _ERROR_TYPES
    assert error["param"] is None or isinstance(error["param"], str)
    assert isinstance(error["code"], str)
    assert not re.search(r"Traceback|\.py\b|line \d+, in|object at 0x|_[A-Z]\w+Body", error["message"])
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    return error


def read_events(data: bytes) -> list[dict[str, Any]]:
    """Check the framing of a whole stream; return its JSON values, without `[DONE]`."""
    assert _STREAM.fullmatch(data), data[:300]
    events = [event for event in data.decode().split("\n\n")[:-1] if event.startswith("data: ")]
    assert [event for event in events if event == "data: [DONE]"] == events[-1:]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Post a streaming request and return its chunks."""
    response = served.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].split(";")[0] == "text/event-stream"
    return read_events(response.content)


def fold(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put a stream together again: what its answer would be without `stream`, but for id and time."""
    for chunk in chunks:
        assert (chunk["id"], chunk["model"], chunk["created"]) == tuple(chunks[0][key] for key in _HEAD)
    choices: dict[int, dict[str, Any]] = {}
    for entry in (entry for chunk in chunks for entry in chunk["choices"]):
        choice = choices.setdefault(entry["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "a chunk after the finish reason"
        assert "finish_reason" in entry
        choice["finish_reason"] = entry["finish_reason"]
        delta = entry.get("delta", entry)
        assert ("content" in delta or "text" in delta) != ("reasoning_content" in delta)
        choice["text"] += delta.get("text", "") + delta.get("content", "")
        if "reasoning_content" in delta:
            assert not choice["text"], "thinking after content"
            choice["reasoning"] = choice.get("reasoning", "") + delta["reasoning_content"]
        if entry.get("logprobs") is not None:
            choice["logprobs"] = _joined(choice["logprobs"], entry["logprobs"])
    assert all(choice["finish_reason"] for choice in choices.values())
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage[0] if usage else None}


_HEAD = ("id", "model", "created")


def _joined(left: dict[str, Any] | None, right: dict[str, Any]) -> dict[str, Any]:
    return right if left is None else {key: left[key] + right[key] for key in right}


def _thought(message: dict[str, Any]) -> dict[str, Any]:
    return {} if message.get("reasoning_content") is None else {"reasoning": message["reasoning_content"]}


def folded(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer, reduced to what `fold` returns."""
    choices = [
        {
            "text": text_of(answer, at),
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            **_thought(choice.get("message", {})),
        }
        for at, choice in enumerate(answer["choices"])
    ]
    return {"choices": choices, "usage": answer["usage"]}


def together(call: Callable[[Item], Result], items: Sequence[Item], workers: int = 8) -> list[Result]:
    """Make calls in parallel; return the results in order."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(call, items))


def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def num_running(served: Served) -> int:
    """How many Jobs hold a place, as the server says it, and how many run, as the engine counts them: the larger."""
    counts = served.get("/health").json()["models"][served.name]
    return max(int(counts["running"] + counts["waiting"]), int(served.engine.counters()["running"]))


def is_idle(served: Served) -> bool:
    """Whether nothing runs or waits."""
    return num_running(served) == 0


def is_established(connection: socket.socket) -> bool:
    """Whether the server's end of a connection over IPv4 is open still."""
    ends = [f":{end[1]:04X}" for end in (connection.getpeername(), connection.getsockname())]
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
    return any(row[3] == "01" and [row[1][8:], row[2][8:]] == ends for row in rows)


def num_sockets() -> int:
    """How many sockets this process has open. Its files are no measure: the store opens some whenever it likes."""
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.append(os.readlink(path))
    return sum(target.startswith("socket:") for target in targets)


def own_threads() -> set[threading.Thread]:
    """The threads of this process, but for those of event loops' pools, which are kept for what comes next."""
    return {thread for thread in threading.enumerate() if "asyncio" not in thread.name}


@contextmanager
def stays_alive(served: Served) -> Iterator[None]:
    """Check that what happens inside leaves the server as it was: same text at once, same worker."""
    before = _pulse(served)
    yield
    assert _pulse(served) == before


def _pulse(served: Served) -> tuple[str, int]:
    started = time.monotonic()
    assert served.get("/health").json()["status"] == "ok"
    text = text_of(served.complete("One, two, three,", max_tokens=4))
    assert time.monotonic() - started < 2
    return text, served.engine.counters().get("restarts", 0)
