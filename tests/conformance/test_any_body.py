"""Whatever the body is, the answer is one: 2xx or an error that the caller can read, never a failure of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legato.config import ServerSettings
from legato.storage.keys import Key
from tests.conformance.reading import CHAT, COMPLETIONS, check_error, read_events
from tests.conformance.test_access import routes
from tests.conftest import NO_TLS, Served, serve_script

NAMES = [
    "model", "prompt", "messages", "suffix", "instructions", "stream", "stream_options", "max_tokens", "n", "best_of",
    "max_completion_tokens", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logprobs",
    "frequency_penalty", "repetition_penalty", "logit_bias", "echo", "response_format", "seam", "canonical", "tools",
    "stop_across_seam", "report", "continue_final_message", "add_generation_prompt", "top_logprobs", "tool_choice",
    "min_tokens", "ignore_eos", "stop_token_ids", "return_token_ids", "detect_loops",
    "auto_continue", "resumable",
    "role", "content", "name", "prefix", "partial", "reasoning_content", "tool_calls", "tool_call_id", "type", "text",
    "include_usage", "function", "arguments", "5", "",
]  # fmt: skip
WORDS = ["m", "user", "assistant", "system", "tool", "text", "none", "heal", "auto", "json_object", "<|end|>", "{", "x"]

KEYS = st.sampled_from(NAMES) | st.text(max_size=6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.integers(-2, 40),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0, 1),
    st.sampled_from(WORDS),
    st.text(max_size=12),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5), max_leaves=12
)

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
        optional={
            "content": st.none() | st.text(max_size=12) | st.lists(st.fixed_dictionaries({"type": st.just("text")}))
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}), max_size=3),
            "prefix": st.booleans() | st.none(),
            "partial": st.booleans() | st.none(),
            "name": st.text(max_size=5),
            "reasoning_content": st.text(max_size=5),
            "tool_calls": st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=2),
            "tool_call_id": st.text(max_size=3),
        },
    ),
    max_size=4,
)  # fmt: skip
PROMPTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=8), max_size=4),
    st.lists(st.integers(-1, 300), max_size=6),
    st.lists(st.lists(st.integers(0, 256), max_size=4), max_size=3),
)
PLAUSIBLE = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "prompt": PROMPTS,
        "messages": MESSAGES,
        "stream": st.booleans(),
        "max_tokens": st.integers(0, 30),
        "n": st.integers(0, 17),
        "best_of": st.integers(0, 17),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=34),
        "echo": st.booleans(),
        "suffix": st.text(max_size=4),
        "instructions": st.text(max_size=4),
        "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.floats(-101, 101), max_size=3),
        "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        "seed": st.integers(-(2**63), 2**64),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "stop_across_seam": st.booleans(),
        "report": st.booleans(),
        "seam": st.sampled_from(["heal", "none"]),
        "min_tokens": st.integers(0, 30),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(-1, 300), max_size=34),
        "return_token_ids": st.booleans(),
        "detect_loops": st.booleans(),
        "auto_continue": st.fixed_dictionaries(
            {}, optional={"max_rounds": st.integers(0, 4), "max_total_tokens": st.integers(0, 40)}
        ),
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled", "auto"])}),
        "reasoning_effort": st.sampled_from(["none", "low", "max"]),
    },
)
BODIES = st.one_of(
    PLAUSIBLE,
    st.builds(lambda known, wild: {**known, **wild}, PLAUSIBLE, st.dictionaries(KEYS, VALUES, max_size=2)),
    st.dictionaries(KEYS, VALUES, max_size=5),
    VALUES,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server that plays a short text."""
    with serve_script([b"some ", "t\u00e9xt".encode(), b" </s>"]) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[httpx2.Client]:
    """A client with kept connections: an answer that upsets the next request shows up."""
    with httpx2.Client(base_url=server.url, verify=NO_TLS, timeout=30) as client:
        yield client


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=BODIES)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_any_json_is_answered_or_refused(client: httpx2.Client, server: Served, path: str, body: Any) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    if response.status_code == 200:
        if response.headers["content-type"] == "application/json":
            assert response.json()["choices"]
        else:
            assert read_events(response.content)
    else:
        assert response.status_code in (400, 404)
        check_error(response, response.status_code)
    assert server.engine.counters()["running"] == 0


BIASED = st.integers(0, 256) | st.text(max_size=3)
NATIVE = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just("m") | SCALARS,
        "prompt": VALUES | PROMPTS,
        "suffix": SCALARS,
        "input_prefix": st.text(max_size=4),
        "input_suffix": st.text(max_size=4),
        "input_extra": VALUES | st.lists(st.fixed_dictionaries({"text": st.text(max_size=3)}), max_size=2),
        "n_predict": st.integers(-2, 20),
        "n": st.integers(0, 17),
        "logit_bias": VALUES | st.lists(st.tuples(BIASED, st.booleans() | st.floats(-5, 5)), max_size=3),
        "t_max_prompt_ms": st.floats(0, 5),
        "think": st.booleans() | st.sampled_from(["low", "max", "all"]),
        "options": VALUES | st.dictionaries(st.sampled_from(["num_predict", "stop", "top_k"]), VALUES, max_size=2),
        "stream": st.booleans(),
        "raw": st.booleans(),
        "content": SCALARS,
        "tokens": VALUES | st.lists(st.integers(-1, 300), max_size=4),
        "messages": MESSAGES,
    },
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(body=NATIVE | VALUES)
@pytest.mark.parametrize(
    "path", ["/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/api/generate"]
)
def test_any_json_is_answered_or_refused_on_native_paths(
    client: httpx2.Client, server: Served, path: str, body: Any
) -> None:
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 501), response.text
    assert server.engine.counters()["running"] == 0


@settings(deadline=None)
@given(data=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\u0dtrue1e-. ', max_size=40).map(str.encode))
def test_any_bytes_are_refused_or_answered(client: httpx2.Client, data: bytes) -> None:
    response = client.post(COMPLETIONS, content=data, headers={"content-type": "application/json"})
    check_error(response, 400)


# ---------------------------------------------------------------------------------------------------------------------
# Every route, and whatever headers


PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip)
SENT = (
    "accept", "content-encoding", "content-type", "cookie", "expect", "host", "last-event-id", "origin", "range",
    "traceparent", "upgrade", "user-agent", "x-api-key", "x-request-id", "x-any",
)  # fmt: skip
HEADERS = st.dictionaries(
    st.sampled_from(SENT),
    PRINTABLE | st.sampled_from(["application/json", "text/plain", "identity", "localhost", "h2c", "3", "-1"]),
    max_size=2,
)
QUERIES = st.just("") | st.dictionaries(
    st.sampled_from(["after", "since", "until", "x"]),
    st.sampled_from(["0", "3", "-1", "2020-01-01", "2020-99-99"]) | st.text(max_size=5),
    max_size=2,
).map(urlencode)
NEW_KEYS = st.fixed_dictionaries(
    {"name": st.text("ab.", max_size=5)}, optional={"models": VALUES, "expires_at": VALUES}
)


@pytest.fixture(scope="module")
def managed() -> Iterator[tuple[Served, dict[str, str], str]]:
    """A server with keys, what the headers of one that may do everything are, and the id of a generation of its own."""
    with serve_script([b"some text"], server=ServerSettings(port=0, api_keys=("plain",))) as served:
        headers = {"authorization": f"Bearer {served.store.create_key(Key('root', admin=True))}"}
        body = {"model": "m", "prompt": "x", "resumable": True}
        yield served, headers, served.post(COMPLETIONS, body, headers=headers).json()["id"]


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_any_request_on_any_route_is_answered_or_refused(
    managed: tuple[Served, dict[str, str], str], caplog: pytest.LogCaptureFixture, method: str, data: st.DataObject
) -> None:
    served, key, id = managed
    path = data.draw(st.sampled_from([path for _, path in routes()]))
    name = data.draw(st.sampled_from(["m", "spare"]) | st.text(max_size=6))
    if "/generations/" in path and method != "DELETE":
        name = data.draw(st.sampled_from([id, name]))
    path = "/".join(quote(name, safe="") if part == "m" else part for part in path.split("/"))
    body = data.draw(
        (NEW_KEYS if "/admin/" in path else BODIES | NATIVE).map(json.dumps).map(str.encode) | st.binary(max_size=20)
    )
    headers = data.draw(HEADERS) | (key if data.draw(st.integers(0, 9)) else {})
    query = data.draw(QUERIES)
    with httpx2.Client(verify=NO_TLS, timeout=30) as client:
        response = client.request(
            method, f"{served.url}{path}?{query}", headers=headers, content=None if method == "GET" else body
        )
    assert response.status_code < 500 or response.status_code == 501, response.text
    assert "Traceback" not in response.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert served.engine.counters()["running"] == 0


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [64, 65, 1000, 100_000])
def test_depth_is_bounded(client: httpx2.Client, opening: str, depth: int) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    inner = opening * (depth - 1) + "0" + closing * (depth - 1)
    data = f'{{"model": "m", "prompt": "x", "deep": {inner}}}'
    response = client.post(COMPLETIONS, content=data, headers={"content-type": "application/json"})
    if depth <= 64:
        assert response.status_code == 200
        assert response.headers["legato-ignored"] == "deep"
    else:
        assert "64" in check_error(response, 400)["message"]
