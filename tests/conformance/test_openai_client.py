"""The official client, sync and async, against a running server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from legato.config import ServerSettings
from legato.engines.scripted import Fault, Pause, Script
from legato.run.admission import Admission
from legato.types import Job
from tests.conformance.reading import eventually, is_idle, num_running
from tests.conftest import VENDOR_NAMES, Served, serve_script

COUNT = "Count: 1 2 3"
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator[openai.OpenAI]:
    """A client of the small model's server."""
    with small.client() as client:
        yield client


def run_async(served: Served, use: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    """Use the asynchronous client."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            await use(client)

    asyncio.run(main())


def chat(prefix: str) -> list[Any]:
    """A chat whose last message is the beginning of the answer."""
    return [{"role": "user", "content": "Count."}, {"role": "assistant", "content": prefix}]


ODD_PREFIXES = ["  x = [\n    ", "\r\n\t", "a \u200b", "\ufeffé\u2028", '{"a": "\\', ""]


@pytest.mark.parametrize("prefix", ODD_PREFIXES)
def test_c018_the_prefix_arrives_as_it_was_given(prefix: str) -> None:
    arrived = []

    def record(job: Job) -> Script:
        arrived.append(job.prompt.prefix)
        return [b"\n  1, 2"]

    with serve_script(record) as served, served.client() as client:

        def ask(messages: list[Any], **fields: Any) -> str | None:
            return (
                client.chat.completions.create(model="m", messages=messages, extra_body=fields)
                .choices[0]
                .message.content
            )

        question, begun = chat(prefix)
        for messages, fields in (
            ([question, {**begun, "prefix": True}], {}),
            ([question, {**begun, "partial": True}], {}),
            ([question, begun], {"continue_final_message": True}),
        ):
            assert ask(messages, **fields) == "\n  1, 2"
            assert ask(messages, **fields, echo=True) == f"{prefix}\n  1, 2"
        assert arrived == [prefix] * 6
        if prefix:
            arrived.clear()
            answer = client.completions.create(model="m", prompt=prefix)
            assert (arrived, answer.choices[0].text) == ([prefix], "\n  1, 2")


def test_completes_and_streams(small: Served, client: openai.OpenAI) -> None:
    whole = client.completions.create(model=small.name, prompt=COUNT, max_tokens=8, **GREEDY)
    assert whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (8, 8)
    assert whole.usage.total_tokens == 16
    chunks = list(client.completions.create(model=small.name, prompt=COUNT, max_tokens=8, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_chats_and_streams(small: Served, client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hello."}]
    whole = client.chat.completions.create(model=small.name, messages=messages, max_tokens=8, **GREEDY)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(
            model=small.name,
            messages=messages,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_stream_helper_accumulates_the_whole_answer() -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hello."}]
    with (
        serve_script([b"Hello ", b"there", b"!"]) as served,
        served.client() as client,
        client.chat.completions.stream(model="m", messages=messages) as stream,
    ):
        assert stream.get_final_completion().choices[0].message.content == "Hello there!"


def test_async_completes_chats_and_streams(small: Served, client: openai.OpenAI) -> None:
    expected = client.completions.create(model=small.name, prompt=COUNT, max_tokens=8, **GREEDY).choices[0].text

    async def use(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": small.name, "prompt": COUNT, "max_tokens": 8, **GREEDY}
        answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(4)))
        assert {answer.choices[0].text for answer in answers} == {expected}
        stream = await client.completions.create(**asked, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected
        answer = await client.chat.completions.create(
            model=small.name, messages=chat(COUNT), max_tokens=4, extra_body={"continue_final_message": True}, **GREEDY
        )
        assert answer.choices[0].message.content

    run_async(small, use)


def test_lists_and_retrieves_models(small: Served, client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == [small.name, *VENDOR_NAMES]
    for name in names:
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "legato")


def test_an_alias_is_served_and_an_unknown_name_is_not(small: Served, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": COUNT, "max_tokens": 4, **GREEDY}
    own = client.completions.create(model=small.name, **asked)
    alias = client.completions.create(model="deepseek-v3.2", **asked)
    assert (alias.model, alias.choices[0].text) == ("deepseek-v3.2", own.choices[0].text)
    for name in ("deepseek-v", "gpt-4o", small.name.upper(), f"{small.name} "):
        with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
            client.completions.create(model=name, **asked)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)


@pytest.mark.parametrize(
    ("fields", "param", "pattern"),
    [
        ({"max_tokens": -1}, "max_tokens", "`max_tokens` must be greater than or equal to 0, got -1"),
        ({"temperature": 3}, "temperature", "2, got 3"),
        ({"stop": ["a", ""]}, "stop", r"stop\[1\]"),
        ({"extra_body": {"seam": "off"}}, "seam", "'heal' or 'none'"),
        ({"suffix": "b"}, "suffix", "no infill|infill tokens"),
        ({"prompt": []}, "prompt", "`prompt` must be"),
        ({"prompt": COUNT * 3000}, "prompt", "8192 tokens"),
    ],
)
def test_mistakes_are_bad_requests_with_the_field(
    small: Served, client: openai.OpenAI, fields: dict[str, Any], param: str, pattern: str
) -> None:
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError, match=pattern) as caught:
            client.completions.create(**{"model": small.name, "prompt": COUNT, **fields}, stream=streamed)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"
        assert caught.value.status_code == 400
        assert caught.value.request_id


def test_a_wrong_key_and_a_full_server_raise_the_right_classes() -> None:
    with (
        serve_script([b"ok"], server=ServerSettings(port=0, api_keys=("any",))) as served,
        served.client() as right,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as wrong,
    ):
        assert right.completions.create(model="m", prompt="x").choices[0].text == "ok"
        with pytest.raises(openai.AuthenticationError) as refused:
            wrong.completions.create(model="m", prompt="x")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
    admission = Admission(max_running=1, max_waiting=0)
    with serve_script([Pause(30)], admission=admission) as served, served.client() as client:
        with client.completions.create(model="m", prompt="x", stream=True):
            with pytest.raises(openai.RateLimitError) as full:
                client.completions.create(model="m", prompt="x")
            assert int(full.value.response.headers["retry-after"]) > 0
        assert eventually(lambda: is_idle(served))


def test_a_failure_in_a_stream_is_raised_with_its_message() -> None:
    with serve_script([b"some ", b"text", Fault("the engine has had enough")]) as served, served.client() as client:
        chunks = client.completions.create(model="m", prompt="x", stream=True)
        assert "".join(next(chunks).choices[0].text for _ in b"some text") == "some text"
        with pytest.raises(openai.APIError, match="the engine has had enough"):
            next(chunks)
        with pytest.raises(openai.InternalServerError, match="the engine has had enough"):
            client.completions.create(model="m", prompt="x")


def test_a_retrying_client_does_not_repeat_mistakes_and_repeats_when_there_is_no_room() -> None:
    asked: list[str] = []

    def note(job: Any) -> list[bytes | Fault]:
        asked.append(job.prompt.prefix)
        return [b"ok"] if len(asked) > 1 else [Fault()]

    with (
        serve_script(note) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=2) as client,
    ):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="m", prompt="x", max_tokens=-1)
        assert asked == []
        assert client.completions.create(model="m", prompt="x").choices[0].text == "ok"
        assert len(asked) == 2


@contextmanager
def counting(url: str, max_retries: int = 2) -> Iterator[tuple[openai.OpenAI, list[str]]]:
    """A client that retries, and the paths that it has asked for."""
    asked: list[str] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [lambda request: asked.append(request.url.path)]})
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=max_retries, http_client=http) as client:
        yield client, asked


@contextmanager
def cut_after(served: Served, sign: bytes) -> Iterator[str]:
    """A way to the server that is cut, without a word, as soon as `sign` has passed."""
    host, port = served.url.removeprefix("http://").split(":")

    def pump(source: socket.socket, target: socket.socket) -> None:
        seen = b""
        with suppress(OSError):
            while sign not in seen and (data := source.recv(65536)):
                seen += data
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)

    def relay() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                with near, socket.create_connection((host, int(port))) as far:
                    sending = threading.Thread(target=pump, args=[near, far])
                    sending.start()
                    pump(far, near)
                    sending.join(10)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=relay)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def read_into(texts: list[str], client: openai.OpenAI) -> None:
    """Stream an answer."""
    for chunk in client.completions.create(model="m", prompt="x", stream=True):
        texts.append(chunk.choices[0].text)


def test_c060_a_mistake_is_asked_once() -> None:
    with serve_script([b"ok"]) as served, counting(served.url) as (client, asked):
        mistakes: list[dict[str, Any]] = [{"max_tokens": -1}, {"stop": ""}, {"stream": True, "n": 99}]
        for fields in mistakes:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(**{"model": "m", "prompt": "x", **fields})
        assert len(asked) == 3


@pytest.mark.parametrize(("max_waiting", "error"), [(0, openai.RateLimitError), (9, openai.InternalServerError)])
@pytest.mark.parametrize("streamed", [False, True])
def test_c060_no_place_is_asked_for_again_after_the_time_that_we_say(
    max_waiting: int, error: type[openai.APIStatusError], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(sleep=waits.append, time=time.time))
    admission = Admission(max_running=1, max_waiting=max_waiting, max_wait_s=0.05)
    with serve_script([Pause(30)], admission=admission) as served, counting(served.url) as (client, asked):
        with served.client() as other, other.completions.create(model="m", prompt="x", stream=True):
            with pytest.raises(error) as caught:
                client.completions.create(model="m", prompt="x", stream=streamed)
            assert len(asked) == 3
            assert waits == [int(caught.value.response.headers["retry-after"])] * 2
            assert caught.value.status_code == (429 if error is openai.RateLimitError else 503)
        assert eventually(lambda: is_idle(served))


def test_c060_a_stream_that_fails_is_not_begun_again() -> None:
    with serve_script([b"some ", b"text", Fault()]) as served, counting(served.url) as (client, asked):
        texts: list[str] = []
        with pytest.raises(openai.APIError):
            read_into(texts, client)
        assert ("".join(texts), len(asked)) == ("some text", 1)


def test_c060_a_stream_that_is_cut_off_is_not_begun_again() -> None:
    with (
        serve_script([b"some ", b"text", Pause(0.2), b" never seen"]) as served,
        cut_after(served, b'"text":"t"') as url,
        counting(url) as (client, asked),
    ):
        texts: list[str] = []
        with pytest.raises(openai.APIConnectionError):
            read_into(texts, client)
        assert "some text".startswith("".join(texts))
        assert len(asked) == 1
        assert eventually(lambda: is_idle(served))


def test_extra_fields_continue_echo_and_report(small: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": small.name, "messages": chat(COUNT), "max_tokens": 4, **GREEDY}
    bare = {"continue_final_message": True}
    plain = client.chat.completions.create(**fields, extra_body=bare).choices[0].message.content
    both_flags = client.chat.completions.create(**fields, extra_body={**bare, "add_generation_prompt": False})
    assert both_flags.choices[0].message.content == plain
    echoed = client.chat.completions.create(**fields, extra_body={**bare, "echo": True, "report": True})
    assert echoed.choices[0].message.content == f"{COUNT}{plain}"
    report = (echoed.model_extra or {})["legato"]
    assert report["seed"] == 7
    assert report["rounds"] == 1
    assert set(report) >= {"healed_bytes", "cached_tokens", "ignored", "clipped"}
    without = client.chat.completions.create(**fields, extra_body=bare)
    assert "legato" not in (without.model_extra or {})


def test_a_mark_on_the_message_passes_through(small: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": small.name, "max_tokens": 4, **GREEDY}
    texts = set()
    for mark in ("prefix", "partial"):
        messages: list[Any] = [{"role": "user", "content": "Count."}]
        messages.append({"role": "assistant", "content": COUNT, mark: True})
        texts.add(client.chat.completions.create(**fields, messages=messages).choices[0].message.content)
    assert len(texts) == 1


def test_the_report_of_a_stream_is_in_its_last_chunk(small: Served, client: openai.OpenAI) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(
            client.completions.create(
                model=small.name, prompt=COUNT, max_tokens=4, stream=True, extra_body={"report": True, **options}
            )
        )
        assert ["legato" in (chunk.model_extra or {}) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("streamed", [False, True])
def test_raw_responses_carry_the_report_headers(small: Served, client: openai.OpenAI, streamed: bool) -> None:
    response = client.completions.with_raw_response.create(
        model=small.name,
        prompt="The capital of Fran",
        max_tokens=9000,
        stop=[" ", "."],
        stream=streamed,
        extra_body={"foo": 1, "top_a": 0.2},
    )
    headers = response.headers
    assert headers["legato-ignored"] == "foo, top_a"
    assert headers["legato-clipped"] == "max_tokens"
    assert headers["legato-healed"] == str(len(" Fran"))
    seed = int(headers["legato-seed"])
    parsed: Any = response.parse()
    text = "".join(answer.choices[0].text for answer in (parsed if streamed else [parsed]))
    again = client.completions.create(
        model=small.name, prompt="The capital of Fran", max_tokens=9000, stop=[" ", "."], seed=seed
    )
    assert again.choices[0].text == text


def test_choices_of_one_prompt_and_of_several_are_in_order(small: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": small.name, "max_tokens": 4, "seed": 5}
    pair = client.completions.create(**fields, prompt=COUNT, n=2, temperature=1)
    assert [choice.index for choice in pair.choices] == [0, 1]
    assert pair.usage is not None
    assert pair.usage.completion_tokens <= 8
    prompts = [COUNT, "The capital of Fran", "def add(a, b):\n    return"]
    alone = [client.completions.create(**fields, prompt=prompt, temperature=0).choices[0].text for prompt in prompts]
    many = client.completions.create(**fields, prompt=prompts, n=2, temperature=0)
    assert [choice.index for choice in many.choices] == list(range(6))
    assert [choice.text for choice in many.choices] == [text for text in alone for _ in range(2)]
    assert many.usage is not None
    first = client.completions.create(**fields, prompt=COUNT, temperature=0)
    assert first.usage is not None
    assert many.usage.prompt_tokens > first.usage.prompt_tokens


def test_several_choices_of_a_chat_differ_and_are_repeatable(small: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": small.name,
        "messages": [{"role": "user", "content": "Pick a word."}],
        "max_tokens": 6,
        "n": 3,
        "temperature": 1.2,
        "seed": 11,
    }
    one, two = (client.chat.completions.create(**fields) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in two.choices]
    assert len(set(texts)) > 1


def test_logprobs_are_what_the_client_expects(small: Served, client: openai.OpenAI) -> None:
    legacy = client.completions.create(model=small.name, prompt=COUNT, max_tokens=4, logprobs=2, **GREEDY)
    arrays = legacy.choices[0].logprobs
    assert arrays is not None
    assert arrays.tokens is not None
    assert arrays.token_logprobs is not None
    assert arrays.top_logprobs is not None
    assert "".join(arrays.tokens) == legacy.choices[0].text
    assert all(len(top) == 2 for top in arrays.top_logprobs)
    assert all(
        top[token] == logprob == max(top.values())
        for token, logprob, top in zip(arrays.tokens, arrays.token_logprobs, arrays.top_logprobs, strict=True)
    )
    answer = client.chat.completions.create(
        model=small.name, messages=chat(COUNT), max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    facts = answer.choices[0].logprobs
    assert facts is not None
    assert facts.content is not None
    assert "".join(entry.token for entry in facts.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in facts.content)


@pytest.mark.parametrize("route", ["completions", "chat"])
def test_leaving_a_stream_early_frees_the_slot(small: Served, client: openai.OpenAI, route: str) -> None:
    fields: dict[str, Any] = {"model": small.name, "max_tokens": 3000, "stream": True, **GREEDY}
    stream: Any
    if route == "chat":
        stream = client.chat.completions.create(**fields, messages=[{"role": "user", "content": "Tell a long story."}])
    else:
        stream = client.completions.create(**fields, prompt=COUNT)
    for index, _ in enumerate(stream):
        if index == 3:
            break
    assert num_running(small) == 1
    stream.close()
    assert eventually(lambda: is_idle(small))


def test_async_leaving_a_stream_early_frees_the_slot(small: Served) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": small.name, "prompt": COUNT, "max_tokens": 3000, **GREEDY}
        stream = await client.completions.create(**asked, stream=True)
        async for _ in stream:
            break
        await stream.close()
        task = asyncio.create_task(client.completions.create(**asked))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_async(small, use)
    assert eventually(lambda: is_idle(small))


def test_infill_and_its_refusal(small: Served, default: Served, client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "prompt": "def add(a, b):\n    return ",
        "suffix": "\n\nprint(add(1, 2))\n",
        "max_tokens": 8,
    }
    with default.client() as other:
        answer = other.completions.create(model=default.name, **fields, **GREEDY)
        assert "a + b" in answer.choices[0].text
        assert "<|" not in answer.choices[0].text
        assert [model.model_extra["capabilities"]["infill"] for model in other.models.list() if model.model_extra]
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=small.name, **fields)
