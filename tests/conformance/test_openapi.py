"""What `/openapi.json` says is what the server does, whatever is sent: schemathesis reads it and makes the requests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from legato.config import ServerSettings
from legato.server.openapi.document import GENERATIONS
from legato.storage.keys import Key
from tests.conformance.reading import CHAT, HI, is_idle, read_events
from tests.conformance.test_access import routes
from tests.conftest import SMALL, Served, serve_script, serve_weights

NUM_CASES = 2000
SCRIPT = [b"some ", "t\u00e9xt".encode(), b" </s>"]


@pytest.fixture(scope="module")
def open_server() -> Iterator[Served]:
    """A server that plays a short text."""
    with serve_script(SCRIPT) as served:
        yield served


@pytest.fixture(scope="module")
def managed() -> Iterator[tuple[Served, str]]:
    """A server with keys, and one that may manage them."""
    with serve_script(SCRIPT, server=ServerSettings(port=0, api_keys=("plain",))) as served:
        yield served, f"Authorization: Bearer {served.store.create_key(Key('root', admin=True))}"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server with keys."""
    with serve_script(SCRIPT, server=ServerSettings(port=0, api_keys=("right",))) as served:
        yield served


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    """A server with a model that thinks."""
    with serve_weights(SMALL, context_length=1024, reasoning_open="<think>", reasoning_close="</think>") as served:
        yield served


def explore(served: Served, folder: Path, *options: str) -> int:
    """Let schemathesis look for requests that are not answered as the document says; return how many it made."""
    command = [str(Path(sys.executable).with_name("st")), "run", served.url + "/openapi.json", "--no-color"]
    # Rules between fields, such as `best_of` >= `n`, are no part of the document: what fits it may still be refused.
    rules = ["--exclude-checks", "positive_data_acceptance", "--continue-on-failure", *options]
    done = subprocess.run([*command, *rules], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout
    return int(found[1])


def test_the_document_has_every_path_of_the_neutral_surface(locked: Served) -> None:
    document = locked.get("/openapi.json").json()
    served = {path for _, path in routes() if path.startswith(("/v1/", "/admin/"))}
    described = {path.replace("{name}", "m").replace("{id}", "m") for path in document["paths"]}
    assert described == {*served, "/health", "/ready", "/metrics"}
    assert document["openapi"] == "3.1.0"
    bodies = [document["components"]["schemas"][name] for name in ("CompletionsBody", "ChatBody", "InfillBody")]
    assert [body["properties"]["model"]["enum"] for body in bodies] == [["m"]] * 3


@pytest.mark.timeout(300)
def test_any_request_is_answered_as_the_document_says(open_server: Served, tmp_path: Path) -> None:
    assert explore(open_server, tmp_path, "--generation-deterministic", "--max-examples", "200") >= NUM_CASES
    assert is_idle(open_server)


@pytest.mark.timeout(120)
def test_keys_are_managed_as_the_document_says(managed: tuple[Served, str], tmp_path: Path) -> None:
    served, key = managed
    options = ["--include-path-regex", "^/(admin|metrics)", "--max-examples", "30", "--header", key]
    assert explore(served, tmp_path, "--generation-deterministic", *options) > 100


WISHES: Sequence[Mapping[str, Any]] = (
    {},
    {"stop": ["e"], "report": True, "foo": 1, "stream_options": {"include_usage": True}},
    {"logprobs": 2, "n": 2, "return_token_ids": True},
    {"echo": True, "report": True, "logprobs": 0},
    {"reasoning_effort": "low"},
)


@pytest.mark.parametrize("wishes", WISHES, ids=" ".join)
@pytest.mark.parametrize("path", GENERATIONS)
def test_answers_and_chunks_have_what_the_document_says(thinking: Served, path: str, wishes: Mapping[str, Any]) -> None:
    """With all that the scripted engine does not tell: schemathesis cannot look into chunks either."""
    fields = {"stop": wishes.get("stop")} if path.startswith("/v1/fim/") else dict(wishes)
    if path == CHAT and "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    source = {"messages": HI} if path == CHAT else {"prompt": "One, two,"}
    body = {"model": thinking.name, "max_tokens": 6, **source, **fields}
    chunks = read_events(thinking.post(path, {**body, "stream": True}).content)
    assert len(chunks) > 1
    for chunk in chunks:
        GENERATIONS[path].chunk.model_validate(chunk, strict=True)
    answer = thinking.post(path, {name: value for name, value in body.items() if name != "stream_options"})
    GENERATIONS[path].answer.model_validate(answer.json(), strict=True)


@pytest.mark.timeout(120)
def test_a_key_is_wanted_wherever_the_document_says_so(locked: Served, tmp_path: Path) -> None:
    key = ["--header", "Authorization: Bearer right"]
    assert explore(locked, tmp_path, "--max-examples", "10", "--checks", "ignored_auth", *key) > 0
