"""LangChain's clients of OpenAI, Mistral and Ollama."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_mistralai import ChatMistralAI
from langchain_ollama import OllamaLLM
from langchain_openai import ChatOpenAI, OpenAI

from tests.conformance.reading import marked, text_of, user
from tests.conftest import Served

COUNT = "Count: 1 2 3"
PROMPTS = [COUNT, "The capital of Fran", "def add(a, b):\n    return"]
TURNS: list[BaseMessage] = [HumanMessage("Count."), AIMessage(COUNT)]
MARKED: list[BaseMessage] = [TURNS[0], AIMessage(COUNT, additional_kwargs={"prefix": True})]


@pytest.fixture
def options(small: Served) -> Iterator[dict[str, Any]]:
    """What both models of OpenAI need to reach the server."""
    with openai.DefaultHttpxClient() as http:
        yield {
            "model": small.name,
            "base_url": f"{small.url}/v1",
            "api_key": "any",
            "max_retries": 0,
            "max_tokens": 8,
            "temperature": 0,
            "http_client": http,
        }


@pytest.fixture(scope="module")
def continued(small: Served) -> str:
    """What comes after the count, where it is the beginning of the answer."""
    return text_of(small.chat(user("Count."), marked(COUNT), max_tokens=8))


def test_r8_r9_prompts_in_a_list_are_answered_in_order(small: Served, options: Any) -> None:
    """It slices the choices by position and adds up the usage."""
    result = OpenAI(**options, n=2).generate(PROMPTS)
    alone = [text_of(small.complete(prompt, max_tokens=8)) for prompt in PROMPTS]
    assert [[choice.text for choice in choices] for choices in result.generations] == [[text] * 2 for text in alone]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 48


def test_completes_and_streams(small: Served, options: Any) -> None:
    model = OpenAI(**options)
    text = text_of(small.complete(COUNT, max_tokens=8))
    assert model.invoke(COUNT) == text
    pieces = list(model.stream(COUNT))
    assert "".join(pieces) == text
    assert len(pieces) > 4
    assert model.invoke(COUNT, stop=[" 6"]) == text.partition(" 6")[0]


@pytest.mark.parametrize("second", [{}, {"add_generation_prompt": False}])
def test_r10_a_flag_of_the_request_continues_the_message(options: Any, continued: str, second: dict[str, bool]) -> None:
    model = ChatOpenAI(**options, extra_body={"continue_final_message": True, **second})
    answer = model.invoke(TURNS)
    assert answer.content == continued
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(str(piece.content) for piece in model.stream(TURNS)) == answer.content
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_mark_on_the_message_is_not_sent(small: Served, options: Any) -> None:
    """LangChain drops it, so that a new turn begins: the flag of the request is the way."""
    answer = ChatOpenAI(**options).invoke(MARKED)
    plain = {"role": "assistant", "content": COUNT}
    assert answer.content == text_of(small.chat(user("Count."), plain, max_tokens=8))


def test_r3_a_mistake_is_a_bad_request_with_the_field(options: Any) -> None:
    for model in (OpenAI(**options), ChatOpenAI(**options)):
        with pytest.raises(openai.BadRequestError, match=r"`stop\[1\]`") as caught:
            model.invoke("Hi", stop=["a", ""])
        assert caught.value.param == "stop"


def test_mistrals_model_continues_a_marked_message(small: Served, continued: str) -> None:
    options: Any = {"model_name": small.name, "endpoint": f"{small.url}/v1", "api_key": "any"}
    model = ChatMistralAI(**options, max_tokens=8, temperature=0)
    with closing(model.client):
        answer = model.invoke(MARKED)
        assert answer.content == continued
        assert "".join(str(piece.content) for piece in model.stream(MARKED)) == answer.content


def test_ollamas_model_completes_and_streams(small: Served) -> None:
    leaving = {"headers": {"Connection": "close"}}
    model = OllamaLLM(model=small.name, base_url=small.url, temperature=0, num_predict=8, sync_client_kwargs=leaving)
    text = model.invoke(COUNT)
    assert text
    assert "".join(model.stream(COUNT)) == text
    raw = text_of(small.complete(COUNT, max_tokens=8))
    assert model.invoke(COUNT, raw=True) == raw
