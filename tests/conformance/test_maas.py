"""MaaS: the vendor's examples, its fields, its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conformance.reading import text_of, user
from tests.conformance.vendors import MAAS, MAAS_FLAGS, body, refused, run_example
from tests.conftest import SMALL, Served, serve_script, serve_weights

SORT: dict[str, Any] = {
    "model": "deepseek-v3.2",
    "messages": [
        {
            "role": "user",
            "content": "Implement quick sort for an array using Python. Do not add any additional content.",
        },
        {"role": "assistant", "content": "def quick_sort(array)", "prefix": True},
    ],
    "temperature": 0.6,
    "stream": False,
}
SUM: dict[str, Any] = {
    "model": "deepseek-v3.2",
    "continue_final_message": True,
    "add_generation_prompt": False,
    "messages": [
        {"role": "user", "content": "You are a calculator, please calculate: 1 + 1"},
        {"role": "assistant", "content": "="},
    ],
    "temperature": 0.6,
    "stream": False,
}
STORY = [
    {
        "role": "user",
        "content": "Please continue the following story with a conversation theme: "
        "In a lush green forest, there lives a rabbit named Little White.",
    },
    {"role": "assistant", "content": "", "prefix": True},
]


@pytest.fixture(scope="module")
def vendor() -> Iterator[Served]:
    """A small model with a small context, so that an answer without a limit ends soon."""
    with serve_weights(SMALL, context_length=384) as served:
        yield served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_script([b" more"]) as served:
        yield served


@pytest.mark.parametrize(("path", "example"), [(MAAS, SORT), (MAAS_FLAGS, SUM)])
def test_the_documented_bodies(vendor: Served, path: str, example: dict[str, Any]) -> None:
    response = vendor.post(path, example)
    assert response.status_code == 200, response.text
    assert "legato-ignored" not in response.headers
    answer = response.json()
    assert answer["model"] == "deepseek-v3.2"
    assert answer["object"] == "chat.completion"
    assert text_of(answer)
    assert not text_of(answer).startswith(example["messages"][-1]["content"])


@pytest.mark.parametrize(
    "name", ["maas_quick_sort.py", "maas_quick_sort.java", "maas_role_play.py", "maas_role_play_flags.py"]
)
def test_the_documented_programs(vendor: Served, name: str, tmp_path: Path) -> None:
    """As they are, but for a comma that both role plays lack."""
    status, _, text = run_example(vendor, name, tmp_path).partition("\n")
    assert status == "200"
    assert text_of(json.loads(text))
    assert (tmp_path / "response.txt").read_text("utf-8").startswith("Status Code: 200\n")


def test_the_documented_command(vendor: Served, tmp_path: Path) -> None:
    assert text_of(json.loads(run_example(vendor, "maas_quick_sort.sh", tmp_path)))


def test_the_documented_loop_as_it_is(served: Served, tmp_path: Path) -> None:
    printed = run_example(served, "maas_long_output.py", tmp_path, {"deepseek-v3.2": "m"})
    assert printed == " Final Complete Content:\n more\n"


def test_the_documented_loop_stops_after_30_rounds(served: Served, tmp_path: Path) -> None:
    changes = {"deepseek-v3.2": "m", '"stream": False': '"stream": False, "max_tokens": 2'}
    printed = run_example(served, "maas_long_output.py", tmp_path, changes)
    assert printed == f" Reached max loop limit 30, stopped.\n Final Complete Content:\n{' m' * 30}\n"


def test_the_rounds_of_the_documented_loop_are_one_text(vendor: Served, tmp_path: Path) -> None:
    """Sampled as documented; only a seed and a limit for each round are added."""
    changes = {'"stream": False': '"stream": False, "seed": 7, "max_tokens": 8'}
    run_example(vendor, "maas_long_output.py", tmp_path, changes)
    whole = vendor.post(
        MAAS, {"model": "deepseek-v3.2", "messages": STORY, "temperature": 0.6, "seed": 7, "max_tokens": 240}
    ).json()
    assert text_of(whole).startswith((tmp_path / "final_output.txt").read_text("utf-8"))
    assert len((tmp_path / "final_output.txt").read_text("utf-8")) > 400


@pytest.mark.parametrize("base", ["v2", "openai/v1"])
def test_the_official_client(vendor: Served, base: str) -> None:
    flags = {} if base == "v2" else {"continue_final_message": True, "add_generation_prompt": False}
    with openai.OpenAI(base_url=f"{vendor.url}/{base}", api_key="any", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "deepseek-v3.2", "messages": SORT["messages"], "extra_body": flags}
        whole = client.chat.completions.create(**asked, max_tokens=8, temperature=0)
        chunks = list(client.chat.completions.create(**asked, max_tokens=8, temperature=0, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="deepseek-v3.2", messages=[])
        assert caught.value.code == "ModelArts.81001"
        assert caught.value.type == "BadRequest"
        assert "messages is empty" in caught.value.message


def test_the_list_of_models(vendor: Served) -> None:
    assert vendor.get("/openai/v1/models").json() == vendor.get("/v1/models").json()


@pytest.mark.parametrize("path", [MAAS, MAAS_FLAGS])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "Failed to format request body, model is empty."),
        ({"model": ""}, "Failed to format request body, model is empty."),
        ({"messages": None}, "Failed to format request body, messages is empty."),
        ({"messages": []}, "Failed to format request body, messages is empty."),
        (
            {"messages": [user("a"), {"role": "SYSTEM", "content": "b"}]},
            "Failed to format request body, messages[1].role is SYSTEM, "
            "not one of ['system', 'user', 'assistant', 'function', 'tool'].",
        ),
        (
            {"messages": [user("a"), {"role": "developer", "content": "b"}]},
            "Failed to format request body, messages[1].role is developer, "
            "not one of ['system', 'user', 'assistant', 'function', 'tool'].",
        ),
        (
            {"messages": [user("a"), {"role": "assistant"}, user("b")]},
            "Inference failed: request param validation error, Value error, "
            "message[1] as 'assistant' must have 'content' or 'tool_calls'.",
        ),
        ({"messages": "a"}, "`messages` must be a valid list, got 'a'"),
        ({"messages": ["a"]}, "`messages[0]` must be an object, got 'a'"),
        ({"messages": [{"content": "a"}]}, "`messages[0].role` is required"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content` is required"),
        ({"temperature": 2.1}, "`temperature` must be less than or equal to 2, got 2.1"),
        ({"temperature": "1"}, "`temperature` must be a valid number, got '1'"),
        ({"top_p": 1.5}, "`top_p` must be a number > 0 and <= 1, got 1.5"),
        ({"top_k": -2}, "`top_k` must be greater than or equal to -1, got -2"),
        ({"max_tokens": -1}, "`max_tokens` must be greater than or equal to 0, got -1"),
        ({"stop": [""]}, "`stop[0]` must have 1 to 256 bytes, got 0"),
        (
            {"response_format": {"type": "json_object"}},
            "`response_format` is not something that the engine of `m` can do",
        ),
        (
            {"messages": [user("a" * 5000)]},
            "Inference failed: this model's maximum context length is 4096 tokens, but the prompt has 5022; "
            "at least one must be left for the answer",
        ),
    ],
)
def test_what_is_refused(served: Served, path: str, fields: dict[str, Any], message: str) -> None:
    assert refused(served, path, 400, **fields) == ("ModelArts.81001", message)


def test_stream_options_need_a_stream(served: Served) -> None:
    response = served.post(MAAS, body(MAAS, stream_options={"include_usage": True}))
    assert response.status_code == 400
    assert response.json()["error_msg"] == "`stream_options` is only allowed when `stream` is true"


def test_what_is_taken(served: Served) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        user("a"),
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "b", "tool_call_id": "1"},
        {"role": "function", "content": "c", "name": "f"},
    ]
    for stop in ("r", ["r", "x"], [], None):
        response = served.post(
            MAAS,
            body(MAAS, messages=messages, stop=stop, temperature=0, top_p=1, top_k=-1, presence_penalty=1.0, n=2),
        )
        assert response.status_code == 200, response.text
        assert "legato-ignored" not in response.headers
        assert [text_of(response.json(), at) for at in (0, 1)] == [" mo" if stop else " more"] * 2


@pytest.mark.parametrize(
    ("flags", "continues"),
    [
        ({"continue_final_message": True}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"add_generation_prompt": False}, False),
        ({"add_generation_prompt": True}, False),
        ({}, False),
    ],
)
def test_the_pair_of_flags(small: Served, flags: dict[str, Any], continues: bool) -> None:
    asked = {"model": small.name, "messages": SUM["messages"], "temperature": 0, "max_tokens": 6}
    response = small.post(MAAS_FLAGS, {**asked, **flags})
    expected = small.post("/v1/chat/completions", {**asked, "continue_final_message": continues})
    assert text_of(response.json()) == text_of(expected.json())
    alone = flags == {"add_generation_prompt": False}
    assert response.headers.get("legato-ignored") == ("add_generation_prompt" if alone else None)


def test_both_flags_contradict_each_other(served: Served) -> None:
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    flags = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(served, MAAS_FLAGS, 400, messages=messages, **flags) == (
        "ModelArts.81001",
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
    )
    _, message = refused(served, MAAS_FLAGS, 400, continue_final_message=True)
    assert "`messages[0]` is `user`" in message
