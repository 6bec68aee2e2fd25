"""An engine on other servers: its tokenizer is the model's, the seam holds over plain requests, and servers may die."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.engines.llamacpp.binding import Vocabulary
from legato.engines.upstream.replicas import Replicas
from legato.engines.upstream.tokenizer import JsonTokenizer, read_profile
from legato.errors import ConfigError
from tests.conftest import NO_TLS, SMALL, Served, serve_front, serve_process, serve_script, tokenizer_folder, weights

TEXT = "The lighthouse keeper had not spoken to anyone for three weeks when"


@pytest.fixture(scope="module")
def tokenizer() -> JsonTokenizer:
    return JsonTokenizer(tokenizer_folder())


@pytest.fixture(scope="module")
def own() -> Vocabulary:
    """The same tokenizer as llama.cpp has it."""
    return Vocabulary.load(weights(SMALL))


@pytest.fixture(scope="module")
def front(small: Served) -> Iterator[Served]:
    with serve_front(small.url) as served:
        yield served


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer


def test_its_tokens_are_those_of_the_model(tokenizer: JsonTokenizer, own: Vocabulary) -> None:
    assert list(tokenizer.pieces) == list(own.pieces)
    assert tokenizer.control_ids == own.control_ids
    assert tokenizer.start_id == own.start_id


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60) | st.text("ab \n1é<|im_end>", max_size=40))
def test_texts_are_cut_as_llamacpp_cuts_them(tokenizer: JsonTokenizer, own: Vocabulary, text: str) -> None:
    """But for a few code points that are no characters yet, such as U+4C000, around which llama.cpp always cuts."""
    for special in (False, True):
        marked = f"{text}<|im_end|>".encode()
        assert tokenizer.encode(marked, special=special) == own.encode(marked, special=special)


def test_the_profile_is_read_from_the_files(tokenizer: JsonTokenizer) -> None:
    profile = read_profile(tokenizer_folder(), tokenizer, 0)
    assert (profile.context_length, profile.can_chat, profile.end_text) == (2048, True, "<|im_end|>")
    assert read_profile(tokenizer_folder(), tokenizer, 512).context_length == 512


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        JsonTokenizer(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Time


def test_an_answer_begins_as_soon_as_a_server_takes_it_on() -> None:
    """And not with the first token: what a stream's beginning costs is spent while the server computes."""
    has_begun = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            text = "soon" if has_begun.wait(3) else "late"
            self.wfile.write(b'data: {"choices": [{"text": "%s", "finish_reason": "stop"}]}\n\n' % text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        body = {"model": "front", "prompt": "Once ", "seam": "none", "max_tokens": 8, "stream": True}
        with (
            serve_front(url, upstream_model="m") as served,
            httpx2.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60, verify=NO_TLS) as answer,
        ):
            has_begun.set()
            assert '"soon"' in answer.read().decode()
        other.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# The seam


def test_an_answer_is_the_models_own(front: Served, small: Served) -> None:
    expected = small.complete(TEXT, max_tokens=24)
    answer = front.complete(TEXT, max_tokens=24, report=True)
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["legato"]["absent"] == ["canonical"]
    scored = front.complete(TEXT, max_tokens=4, logprobs=2)["choices"][0]["logprobs"]
    own = small.complete(TEXT, max_tokens=4, logprobs=2)["choices"][0]["logprobs"]
    assert scored["tokens"] == own["tokens"]
    assert scored["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=0.05)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_cut_inside_a_word_goes_on_as_if_it_were_none(front: Served, temperature: float) -> None:
    asked = {"temperature": temperature, "max_tokens": 24}
    whole = front.complete(TEXT, **asked)["choices"][0]["text"]
    cuts = range(1, min(20, len(whole) - 8), 4)
    same = [
        front.complete(TEXT + whole[:at], **asked)["choices"][0]["text"].startswith(whole[at : at + 8]) for at in cuts
    ]
    assert sum(same) >= 0.95 * len(same), same


@pytest.mark.parametrize("prefix", ["The capital of Fran", "Once upon a ti", "def quick_so", "1, 2, 3, 4, 1"])
def test_a_prefix_that_is_not_the_models_own_is_covered_as_by_the_embedded_engine(
    front: Served, small: Served, prefix: str
) -> None:
    def told(served: Served) -> str:
        return str(served.complete(prefix, max_tokens=3)["choices"][0]["text"])

    assert told(front) == told(small)


def test_chats_and_infill_fields_are_judged_by_the_files(front: Served, small: Served) -> None:
    asked = {"role": "user", "content": "Name a colour."}
    start = {"role": "assistant", "content": "I like bl", "prefix": True}
    expected = small.chat(asked, start, max_tokens=8)["choices"][0]["message"]["content"]
    assert front.chat(asked, start, max_tokens=8)["choices"][0]["message"]["content"] == expected
    body = {"model": "front", "prompt": "a", "suffix": "b"}
    assert front.post("/v1/completions", body).status_code == 400


# ---------------------------------------------------------------------------------------------------------------------
# Servers that come and go


def test_a_prompt_goes_to_the_server_that_has_read_most_of_it() -> None:
    now = [0.0]
    replicas = Replicas(["a", "b"], lambda: now[0])
    head = list(range(64))
    first = replicas.order(head)[0]
    with replicas.running(first, head):
        assert replicas.order([*head, 1, 2, 3])[0] == first
        assert replicas.order([9, *head])[0] != first  # The other one has less to do.
    replicas.failed(first)
    assert replicas.order(head)[0] != first
    assert replicas.num_failed == 1
    now[0] = 2.0
    assert replicas.order(head)[0] == first
    replicas.failed(first)
    now[0] = 3.5
    assert replicas.num_failed == 1  # Twice as long as before.
    replicas.worked(first)
    assert replicas.num_failed == 0


def test_a_busy_server_is_passed_over() -> None:
    replicas = Replicas(["a", "b"], lambda: 0.0)
    head = list(range(32))
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(replicas.running("a", head))
        assert replicas.order(head)[0] == "b"


def test_a_server_that_is_gone_is_not_noticed(small: Served) -> None:
    expected = small.complete(TEXT, max_tokens=8)["choices"]
    with serve_front("http://127.0.0.1:9", small.url, upstream_model=SMALL) as served:
        for _ in range(3):
            assert served.complete(TEXT, max_tokens=8)["choices"] == expected
        assert served.engine.counters()["down"] <= 1


def test_without_any_server_that_is_said() -> None:
    with serve_front("http://127.0.0.1:9", upstream_model="m") as served:
        response = served.post("/v1/completions", {"model": "front", "prompt": "x"})
        assert response.status_code == 503, response.text
        assert "no server of this model answers" in response.json()["error"]["message"]
    with pytest.raises(ConfigError, match="upstream_model"), serve_front("http://127.0.0.1:9"):
        pass


def test_what_a_server_refuses_is_an_error_that_says_so() -> None:
    with serve_script([b"x"]) as other, serve_front(other.url, upstream_model="unknown") as served:
        response = served.post("/v1/completions", {"model": "front", "prompt": "x "})
        assert response.status_code == 500
        assert "refuses the request (404)" in response.json()["error"]["message"]
        with pytest.raises(ConfigError, match="status 404"), serve_front(f"{other.url}/nothing"):
            pass


@pytest.mark.timeout(300)
def test_one_of_two_servers_dies_under_eight_streams_and_all_end_with_their_texts() -> None:
    prompts = [f"Chapter {index}. In the year {1900 + index} the old clockmaker" for index in range(8)]
    with serve_process("--model", SMALL) as one, serve_process("--model", SMALL) as two:
        urls = (one.url, two.url)
        with serve_front(*urls, upstream_model=SMALL) as served:
            expected = [served.complete(prompt, max_tokens=40)["choices"][0]["text"] for prompt in prompts]
            asyncio.run(_killing(served, prompts, expected, one.pid))
            assert served.engine.num_lost > 0


async def _killing(served: Served, prompts: list[str], expected: list[str], pid: int) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
        num_events = 0

        async def write(prompt: str) -> str:
            nonlocal num_events
            text = ""
            stream = await client.completions.create(
                model="front", prompt=prompt, max_tokens=40, temperature=0, seed=7, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].text if chunk.choices else ""
                num_events += 1
                if num_events == 40:
                    os.kill(pid, signal.SIGKILL)
            return text

        assert await asyncio.gather(*map(write, prompts)) == expected
