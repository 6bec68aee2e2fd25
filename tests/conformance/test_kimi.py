"""Kimi's partial mode on the neutral path, as Kimi's documentation has it, with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from legato.config import ModelSettings, ServerSettings, Settings
from legato.engines.scripted import Fault, Pause
from legato.run.admission import Admission
from legato.run.models import Models, load_models
from legato.types import Tags
from tests.conformance.reading import CHAT, check_error, fold, folded, stream, together, user
from tests.conformance.vendors import KEY, run_example
from tests.conftest import SMALL, Served, serve, serve_script

MODEL = "kimi-k3.1-pro"
TAGS = Tags("<think>", "</think>")
PRIME = user("Is 91 prime? Think first.")
THOUGHT = (b"<think>", b"7 * 13", b" is 91.</th", b"ink>No", b", it is", b" not.")
OPENED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[assistant]<think>\n' }}"


def partial(content: str, reasoning: str | None = None, **fields: Any) -> dict[str, Any]:
    """An assistant's message that is to be continued."""
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": "assistant", "content": content, "partial": True, **thought, **fields}


@pytest.fixture(scope="module")
def kimi() -> Iterator[Served]:
    """The small model under Kimi's name, with a key, as if it thought between tags."""

    async def load() -> Models:
        model = ModelSettings(context_length=512, reasoning_open="<think>", reasoning_close="</think>")
        return await load_models(Settings(models={SMALL: model}, aliases={MODEL: SMALL}))

    with serve(load, ServerSettings(port=0, api_keys=(KEY,))) as served:
        yield served


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    """An engine that thinks in tags which are cut anywhere."""
    with serve_script(THOUGHT, reasoning=TAGS) as served:
        yield served


@pytest.fixture
def client(kimi: Served) -> Iterator[openai.OpenAI]:
    """The client of Kimi's documentation."""
    with openai.OpenAI(api_key=KEY, base_url=f"{kimi.url}/v1", max_retries=0) as client:
        yield client


def ask(kimi: Served, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Chat and return the first choice."""
    body = {"model": MODEL, "messages": [PRIME, *messages], "temperature": 0, "seed": 7, **fields}
    response = kimi.post(CHAT, body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


# ---------------------------------------------------------------------------------------------------------------------
# The documentation's examples


def test_the_documented_program(kimi: Served, tmp_path: Path) -> None:
    """It prints the opening and what it was given: a server that returned the opening would show it twice."""
    printed = run_example(kimi, "kimi_opening.py", tmp_path)
    opening, _, rest = printed.partition("Dear customer, hello,")
    assert opening == ""
    assert rest.strip()
    assert not rest.startswith("Dear")


def test_what_was_cut_is_continued_with_its_thinking(client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "Please recite the complete Chu Shi Biao."}
    options: Any = {"model": "kimi-k3.1-pro", "seed": 3, "extra_body": {"thinking_budget": 6}}
    opened: Any = partial("", "")
    completion: Any = client.chat.completions.create(messages=[question, opened], max_tokens=24, **options)
    if completion.choices[0].finish_reason == "length":
        prefix = completion.choices[0].message.content
        reasoning_content = completion.choices[0].message.reasoning_content

        messages: Any = [
            question,
            {
                "role": "assistant",
                "content": prefix,
                "partial": True,
                "reasoning_content": reasoning_content,
            },
        ]
        continuation: Any = client.chat.completions.create(messages=messages, max_tokens=20, **options)
        full_text = prefix + continuation.choices[0].message.content
    whole: Any = client.chat.completions.create(messages=[question, opened], max_tokens=44, **options)
    assert full_text == whole.choices[0].message.content
    assert reasoning_content == whole.choices[0].message.reasoning_content
    assert continuation.choices[0].message.reasoning_content is None


def test_a_role_keeps_its_name(kimi: Served, client: openai.OpenAI) -> None:
    messages: Any = [PRIME, partial("", name="Kelsier")]
    completion = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    spelled = ask(kimi, partial("Kelsier: "), max_tokens=12)
    assert completion.choices[0].message.content == spelled["message"]["content"]


def test_a_name_has_no_place_inside_the_thinking(kimi: Served) -> None:
    body = {"model": MODEL, "messages": [PRIME, partial("", "7 *", name="Kelsier")], "max_tokens": 1}
    response = kimi.post(CHAT, body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.headers["legato-ignored"] == "messages[1].name"


# ---------------------------------------------------------------------------------------------------------------------
# Cut and resumed


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_thinking_that_was_cut_anywhere_goes_on_as_if_it_had_not_been(kimi: Served, temperature: float) -> None:
    fields = {"temperature": temperature, "thinking_budget": 8, "seed": 4}
    whole = ask(kimi, partial("", ""), max_tokens=20, **fields)["message"]
    assert whole["reasoning_content"]
    assert whole["content"]

    def resumed(cut: int) -> tuple[str, str]:
        thought, said, num = "", "", 0
        while num < 20:
            answer = ask(kimi, partial(said, thought), max_tokens=cut, **fields)["message"]
            thought += answer["reasoning_content"] or ""
            said += answer["content"]
            num += cut if num == 0 else 20
            cut = 20
        return thought, said

    for thought, said in together(resumed, (2, 7, 8, 9, 10, 11, 12, 15), workers=4):
        assert thought == whole["reasoning_content"]
        assert said.startswith(whole["content"])


def test_c095_thinking_goes_on_and_closed_thinking_stays_closed(client: openai.OpenAI) -> None:
    def answer(message: Any, **fields: Any) -> Any:
        messages: Any = [PRIME, message]
        return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8, **fields)

    deltas = [chunk.choices[0].delta for chunk in answer(partial("", "91 = 7 * 1"), stream=True)]
    assert "reasoning_content" in deltas[1].model_dump(exclude_unset=True)
    closed, bare = answer(partial("No, 91", "91 = 7 * 13.")), answer(partial("No, 91"))
    assert closed.choices[0].message.reasoning_content is None
    assert closed.usage.prompt_tokens > bare.usage.prompt_tokens


def test_c094_tags_in_the_prefix_say_where_the_answer_begins(kimi: Served) -> None:
    closed = ask(kimi, partial("<think>17*20=340, 17*3=51</think>"), max_tokens=8)["message"]
    assert closed["content"]
    assert closed["reasoning_content"] is None
    opened = ask(kimi, partial("<think>17*2"), max_tokens=4)["message"]
    assert opened == ask(kimi, partial("", "17*2"), max_tokens=4)["message"]
    assert opened["reasoning_content"]


# ---------------------------------------------------------------------------------------------------------------------
# The budget


OFF = {"thinking": {"type": "disabled"}}
ON = {"thinking": {"type": "enabled"}}


def test_thinking_can_be_turned_off(kimi: Served) -> None:
    for marks in ((), (partial("", ""),)):
        expected = ask(kimi, *marks, max_tokens=8, reasoning_effort="none")
        assert expected["message"]["content"]
        assert ask(kimi, *marks, max_tokens=8, **OFF) == expected
        assert ask(kimi, *marks, max_tokens=8, **OFF, thinking_budget=0) == expected
        assert ask(kimi, *marks, max_tokens=8, **ON) == ask(kimi, *marks, max_tokens=8)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v2/chat/completions", OFF),
        ("/openai/v1/chat/completions", OFF),
        ("/beta/chat/completions", OFF),
        ("/compatible-mode/v1/chat/completions", OFF),
        ("/compatible-mode/v1/chat/completions", {"enable_thinking": False}),
    ],
)
def test_thinking_can_be_turned_off_in_other_dialects(kimi: Served, path: str, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [PRIME], "temperature": 0, "seed": 7, "max_tokens": 8}
    response = kimi.post(path, {**body, **fields}, headers={"Authorization": f"Bearer {KEY}"})
    assert "legato-ignored" not in response.headers
    expected = ask(kimi, max_tokens=8, reasoning_effort="none")["message"]["content"]
    assert response.json()["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(("effort", "max_tokens"), [("low", 20), ("max", 20), ("max", 5), ("none", 4), ("minimal", 4)])
def test_an_effort_leaves_room_for_an_answer(kimi: Served, effort: str, max_tokens: int) -> None:
    answer = ask(kimi, partial("", ""), max_tokens=max_tokens, reasoning_effort=effort)
    assert answer["message"]["content"]
    assert answer["message"]["reasoning_content"] is not None
    assert "<" not in answer["message"]["reasoning_content"]


def test_without_an_effort_thinking_may_take_all(kimi: Served) -> None:
    answer = ask(kimi, partial("", ""), max_tokens=6)
    assert answer["finish_reason"] == "length"
    assert (answer["message"]["content"], bool(answer["message"]["reasoning_content"])) == ("", True)


def test_a_budget_counts_the_thinking_of_the_prefix(kimi: Served) -> None:
    answer = ask(kimi, partial("", "7 times 13 is 91, so the answer must be"), max_tokens=5, thinking_budget=3)
    assert answer["message"]["content"]
    assert answer["message"]["reasoning_content"] == ""


# ---------------------------------------------------------------------------------------------------------------------
# Channels, with the scripted engine


def test_tags_are_never_shown_and_a_stream_is_the_answer(thinker: Served) -> None:
    body = {"model": "m", "messages": [PRIME], "n": 2}
    answer = thinker.post(CHAT, body).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "No, it is not.", "reasoning_content": "7 * 13 is 91."}
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 2 * len(b"<think>7 * 13 is 91.</think>")}
    chunks = stream(thinker, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert fold(chunks) == folded(answer)


@pytest.mark.parametrize("stops", [["13"], ["</think>"], ["91.No"], ["<think>"]])
def test_stops_are_looked_for_in_content_alone(thinker: Served, stops: list[str]) -> None:
    answer = thinker.chat(PRIME, stop=stops)["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("No, it is not.", "stop")
    assert thinker.chat(PRIME, stop=["it"])["choices"][0]["message"]["content"] == "No, "


def test_an_unfinished_tag_at_a_cut_is_left_out() -> None:
    for num, (thought, said) in {3: (None, ""), 12: ("7 * 1", ""), 25: ("7 * 13 is 91.", "")}.items():
        with serve_script(THOUGHT, reasoning=TAGS) as served:
            message = served.chat(PRIME, max_tokens=num)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == (thought, said)


def test_a_template_that_opens_the_thinking() -> None:
    with serve_script((b"7 * 13", b"</think>", b"No"), reasoning=TAGS, chat_template=OPENED) as served:
        message = served.chat(PRIME)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("7 * 13", "No")
        message = served.chat(PRIME, partial("Well"))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (None, "7 * 13</think>No")


def test_echo_returns_the_thinking_too(thinker: Served) -> None:
    message = thinker.chat(PRIME, partial("So: ", "91"), echo=True)["choices"][0]["message"]
    assert message["reasoning_content"] == "91"
    assert message["content"] == "So: " + b"".join(THOUGHT).decode()


def test_a_model_that_does_not_think_says_what_it_ignores() -> None:
    with serve_script((b"Hi",)) as served:
        body = {"model": "m", "messages": [PRIME, partial("", "91 =")]}
        for fields in ({"reasoning_effort": "high"}, {"thinking_budget": 5}, ON):
            response = served.post(CHAT, {**body, **fields})
            assert response.headers["legato-ignored"] == f"{next(iter(fields))}, messages[1].reasoning_content"
        assert response.json()["choices"][0]["message"]["reasoning_content"] is None
        assert served.get("/v1/models/m").json()["capabilities"]["reasoning"] is False
        kept = {"thinking": {"type": "disabled", "keep": "all"}}
        for off in ({"reasoning_effort": "none"}, OFF, {**OFF, "thinking_budget": 0}):
            response = served.post(CHAT, {"model": "m", "messages": [PRIME], **off})
            assert "legato-ignored" not in response.headers
        response = served.post(CHAT, {"model": "m", "messages": [PRIME], **kept})
        assert response.headers["legato-ignored"] == "thinking.keep"


# ---------------------------------------------------------------------------------------------------------------------
# Refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"reasoning_effort": "tiny"},
            "reasoning_effort",
            "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
        ),
        ({"reasoning_effort": 3}, "reasoning_effort", "got 3"),
        ({"thinking_budget": -1}, "thinking_budget", "greater than or equal to 0, got -1"),
        ({"thinking_budget": "9"}, "thinking_budget", "got '9'"),
        ({"thinking": {"type": "auto"}}, "thinking", "`thinking.type` must be 'enabled' or 'disabled', got 'auto'"),
        ({**OFF, "reasoning_effort": "low"}, "thinking", "`reasoning_effort` turns thinking on, but `thinking` turns"),
        ({**ON, "thinking_budget": 0}, "thinking_budget", "`thinking` turns thinking on, but `thinking_budget` turns"),
        ({"thinking_budget": 9, "reasoning_effort": "low"}, "thinking_budget", "cannot be used together"),
        ({"response_format": {"type": "json_object"}}, "response_format", "at byte 0 of it stands 'No'"),
        ({"messages": [partial("a"), PRIME]}, "messages", "only the last message"),
        ({"messages": [{**PRIME, "partial": True}]}, "messages", "not `assistant`"),
        ({"messages": [PRIME, {"role": "assistant", "partial": True}]}, "messages", "is required to be continued"),
        ({"messages": [PRIME, partial("a", 5)]}, "messages", "`messages[1].reasoning_content`"),  # type: ignore[arg-type]
        ({"messages": [PRIME, partial("a" * 3000)]}, "messages", "maximum context length is 512 tokens"),
    ],
)
def test_bad_input_is_refused_with_the_field(kimi: Served, fields: dict[str, Any], param: str, words: str) -> None:
    body = {"model": MODEL, "messages": [PRIME, partial("No")], "max_tokens": 2, **fields}
    response = kimi.post(CHAT, body, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_an_engine_that_cannot_end_the_thinking_refuses_a_budget(thinker: Served) -> None:
    for fields in ({"reasoning_effort": "low"}, {"thinking_budget": 5}, OFF):
        response = thinker.post(CHAT, {"model": "m", "messages": [PRIME], **fields})
        assert check_error(response, 400, next(iter(fields)))["code"] == "unsupported"


def test_a_key_a_model_and_a_place_are_needed(kimi: Served) -> None:
    body = {"model": MODEL, "messages": [PRIME]}
    check_error(kimi.post(CHAT, body), 401)
    check_error(kimi.post(CHAT, body, headers={"Authorization": "Bearer sk-wrong"}), 401)
    response = kimi.post(CHAT, {**body, "model": "kimi-k9"}, headers={"Authorization": f"Bearer {KEY}"})
    check_error(response, 404, "model")
    admission = Admission(max_running=1, max_waiting=1)
    with serve_script((Pause(1.0), b"a"), reasoning=TAGS, admission=admission) as served:
        answers = together(lambda _: served.post(CHAT, {"model": "m", "messages": [PRIME]}), range(4))
        assert sorted({answer.status_code for answer in answers}) == [200, 429]
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)


def test_a_failure_inside_the_thinking_ends_the_stream_with_an_error() -> None:
    with serve_script((b"<think>7", Fault("invalid state transition")), reasoning=TAGS) as served:
        body = {"model": "m", "messages": [PRIME]}
        check_error(served.post(CHAT, body), 500)
        chunks = stream(served, CHAT, body)
        assert [chunk["choices"][0]["delta"].get("reasoning_content") for chunk in chunks[:-1]] == [None, "", "7"]
        assert chunks[-1]["error"]["message"] == "invalid state transition"
