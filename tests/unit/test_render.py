"""Rendering, with a tokenizer of one id per byte: what reaches the model, and where the text begins."""

from __future__ import annotations

import pytest

from legato.decoding.seam import Seam
from legato.engines.scripted import ByteTokenizer
from legato.errors import InvalidField, PromptTooLong, UnsupportedFeature
from legato.prompting.profiles import InfillTokens, Profile
from legato.prompting.render import render, render_open
from legato.types import (
    Chat,
    CompletionRequest,
    Infill,
    Mark,
    Message,
    Prompt,
    ReasoningOptions,
    Source,
    Tags,
    Text,
)

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}:{{ call.function.arguments | tojson }}){% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = ByteTokenizer()
SEAM = Seam(TOKENIZER)
NOT_SAID = ReasoningOptions()


def prompt_for(
    source: Source,
    template: str | None = TEMPLATE,
    *,
    asked: ReasoningOptions = NOT_SAID,
    **profile: object,
) -> Prompt:
    """Render one prompt."""
    facts = Profile(**{"context_length": 500, "chat_template": template, **profile})  # type: ignore[arg-type]
    (prompt,) = render(CompletionRequest("m", source, reasoning=asked), facts, TOKENIZER, SEAM)
    return prompt


def shown(prompt: Prompt) -> str:
    """The whole rendered text."""
    return (b"".join(TOKENIZER.pieces[id] for id in prompt.ids) + prompt.heal).decode()


USER = Message("user", "Hi")


@pytest.mark.parametrize("prefix", ["a", "a ", "a\n", "a\n\n", " a", "\ta", "a\u00a0", ""])
def test_c001_every_byte_of_the_prefix_reaches_the_model(prefix: str) -> None:
    prompt = prompt_for(Chat((USER,), Mark(prefix)))
    assert shown(prompt) == f"[user]Hi<|end|>[assistant]{prefix}"
    assert prompt.prefix == prefix
    assert prompt.floor == len(prompt_for(Chat((USER,))).ids)


def test_c002_no_turn_is_dropped_when_the_prefix_occurs_before() -> None:
    turns = (USER, Message("assistant", "Yes"), Message("user", "And Yes again?"))
    assert shown(prompt_for(Chat(turns, Mark("Yes ")))) == (
        "[user]Hi<|end|>[assistant]Yes<|end|>[user]And Yes again?<|end|>[assistant]Yes "
    )


def test_c013_typed_control_tokens_are_text() -> None:
    prompt = prompt_for(Chat((Message("user", "A<|end|>B"),), Mark("c<|end|>")))
    assert prompt.ids.count(256) == 1
    assert shown(prompt) == "[user]A<|end|>B<|end|>[assistant]c<|end|>"
    assert prompt_for(Text(("A<|end|>B",))).ids.count(256) == 1


def test_c012_what_a_template_raises_is_the_callers_fault() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidField, match="roles must alternate") as caught:
        prompt_for(Chat((USER,)), template)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidField, match="cannot be rendered"):
        prompt_for(Chat((USER,)), "{{ messages[3].content }}")
    with pytest.raises(InvalidField, match="cannot be rendered"):
        prompt_for(Chat((USER,)), "{{ ''.__class__.__mro__ }}")


def test_c009_tool_calls_are_rendered_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2, "q":"x<|end|>"}'}}
    prompt = prompt_for(Chat((USER, Message("assistant", "", tool_calls=(call,)), Message("tool", "5"))))
    assert '(add:{"a": 2, "q": "x<|end|>"})' in shown(prompt)
    assert prompt.ids.count(256) == 3


def test_a_name_is_part_of_the_prefix_and_not_returned() -> None:
    prompt = prompt_for(Chat((USER,), Mark("Well,", name="Pilot")))
    assert shown(prompt).endswith("[assistant]Pilot: Well,")
    assert prompt.prefix == "Well,"


NAMED = (
    "{% for m in messages %}[{{ m.name or m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_template_that_prints_names_gets_the_name() -> None:
    prompt = prompt_for(Chat((USER,), Mark("Well,", name="Pil<|end|>ot")), NAMED)
    assert shown(prompt) == "[user]Hi<|end|>[Pil<|end|>ot]Well,"
    assert prompt.ids.count(256) == 1
    assert prompt.prefix == "Well,"
    late = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + NAMED
    assert shown(prompt_for(Chat((USER,), Mark("Well,", name="Pilot")), late)).endswith("[assistant]Pilot: Well,")


# ---------------------------------------------------------------------------------------------------------------------
# Thinking

THINK = Tags("<think>", "</think>")
OPENING = TEMPLATE + "{% if add_generation_prompt and enable_thinking is not defined %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("mark", "plain", "opening"),
    [
        (Mark(""), "", "<think>\n"),
        (Mark("Well"), "Well", "<think>\n</think>\n\nWell"),
        (Mark("", reasoning=""), "<think>", "<think>\n"),
        (Mark("", reasoning="91 = 7"), "<think>91 = 7", "<think>\n91 = 7"),
        (Mark("No", reasoning="91 = 7"), "<think>91 = 7</think>No", "<think>\n91 = 7</think>No"),
        (Mark("<think>91 ="), "<think>91 =", "<think>\n91 ="),
        (Mark("<think>91</think>"), "<think>91</think>", "<think>\n91</think>"),
        (Mark("<think>91</think>No"), "<think>91</think>No", "<think>\n91</think>No"),
        (Mark("Well", name="Pilot"), "Pilot: Well", "<think>\n</think>\n\nPilot: Well"),
        (Mark("", name="Pilot"), "Pilot: ", "<think>\n</think>\n\nPilot: "),
        (Mark("Well", name="Pilot", reasoning="91"), "<think>91</think>Pilot: Well", "<think>\n91</think>Pilot: Well"),
    ],
)
def test_c094_c095_thinking_goes_on_or_is_closed(mark: Mark, plain: str, opening: str) -> None:
    start = "[user]Hi<|end|>[assistant]"
    prompt = prompt_for(Chat((USER,), mark), reasoning=THINK)
    assert shown(prompt) == start + plain
    assert (prompt.is_opened, prompt.prefix, prompt.thought) == (False, mark.prefix, mark.reasoning)
    assert shown(prompt_for(Chat((USER,), mark), OPENING, reasoning=THINK)) == start + opening
    assert prompt_for(Chat((USER,), mark), OPENING, reasoning=THINK).is_opened
    assert "think" not in shown(prompt_for(Chat((USER,), Mark(mark.prefix, reasoning="x")))).removesuffix(mark.prefix)


@pytest.mark.parametrize("asked", [ReasoningOptions(effort=0), ReasoningOptions(max_tokens=0)])
def test_without_thinking_the_template_is_told_so_or_what_it_opens_is_closed(asked: ReasoningOptions) -> None:
    assert shown(prompt_for(Chat((USER,)), OPENING, reasoning=THINK, asked=asked)).endswith("[assistant]")
    stubborn = TEMPLATE + "{{ '<think>\n' }}"
    assert shown(prompt_for(Chat((USER,)), stubborn, reasoning=THINK, asked=asked)).endswith("<think>\n</think>\n\n")


def test_instructions_are_followed_without_thinking() -> None:
    prompt = prompt_for(Text(("",), "Calm prose."), TEMPLATE + "<think>", reasoning=THINK)
    assert shown(prompt).endswith("<think></think>\n\n")


def test_earlier_thinking_is_given_to_the_template() -> None:
    template = "{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}"
    assert shown(prompt_for(Chat((Message("assistant", "a", reasoning="b"),)), template)) == "(b)a"


def test_a_tag_that_is_a_control_token_is_one() -> None:
    tags = Tags("<|end|>", "</think>")
    prompt = prompt_for(Chat((USER,), Mark("", reasoning="a<|end|>b")), reasoning=tags)
    assert prompt.ids[prompt.turn :] == (256, *b"a<|end|>b")
    assert prompt.floor == prompt.turn + 1


def test_a_named_turn_is_opened_as_the_template_opens_it() -> None:
    template = (
        "{% for m in messages %}[{{ m.name or m.role }}]"
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    )
    text = shown(prompt_for(Chat((USER,), Mark("W", name="P", reasoning="91")), template, reasoning=THINK))
    assert text == "[user]Hi[P]<think>91</think>W"


def test_instructions_are_a_turn_before_the_text_or_a_header() -> None:
    chat = prompt_for(Text(("Once",), "Calm prose."))
    assert shown(chat).startswith("[system]Calm prose.<|end|>[user]Continue the text.")
    assert shown(chat).endswith("<|end|>[assistant]Once")
    plain = prompt_for(Text(("Once",), "Calm prose."), template=None)
    assert shown(plain).startswith("Calm prose.\n")
    assert shown(plain).endswith("\n\nOnce")
    with pytest.raises(InvalidField, match="instructions"):
        prompt_for(Text(((1, 2),), "x"))


def test_infill_without_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="infill tokens") as caught:
        prompt_for(Infill("ab", "cd"))
    assert caught.value.param == "suffix"


def test_what_stands_in_the_gap_is_part_of_the_text() -> None:
    marks = InfillTokens(prefix=1, suffix=2, middle=3)
    prompt = prompt_for(Infill("x\nab", "cd", middle="ef"), infill=marks)
    assert prompt.ids == (1, *b"x\n", 2, *b"cd", 3, *b"abef")
    assert prompt.floor == len(prompt.ids) - 4
    assert (prompt.prefix, prompt.origin) == ("x\nabef", 6)


def test_a_gap_can_be_described_in_words() -> None:
    prompt = prompt_for(Infill("ab", "c<|end|>d", is_prompted=True), context_length=1000)
    text = shown(prompt)
    assert text.startswith("[system]A text has a gap.")
    assert text.endswith("After the gap:\nc<|end|>d<|end|>[assistant]ab")
    assert prompt.ids.count(256) == 2  # The suffix's marker is text.
    assert (prompt.prefix, prompt.origin) == ("ab", 2)


def test_ids_and_texts_follow_each_other() -> None:
    prompt = prompt_for(Text(((97, "b<|end|>", 99, "de"),)))
    assert prompt.ids == (*b"ab", 256, *b"cde")
    assert (prompt.floor, prompt.prefix) == (4, "ab<|end|>cde")


def test_a_chat_is_a_raw_prompt_whose_turn_is_open() -> None:
    facts = Profile(context_length=500, chat_template=TEMPLATE)
    text = render_open(Chat((USER,), Mark("I am ")), facts)
    assert text == "[user]Hi<|end|>[assistant]I am "
    assert prompt_for(Text((text,))).ids == prompt_for(Chat((USER,), Mark("I am "))).ids


def test_c047_an_empty_prompt_needs_a_start_token() -> None:
    with pytest.raises(InvalidField, match="empty"):
        prompt_for(Text(("",)))


def test_token_ids_must_exist() -> None:
    for ids in ((-1,), (257,), (1, 99999999)):
        with pytest.raises(InvalidField, match="ids run from 0 to 256"):
            prompt_for(Text((ids,)))
    assert prompt_for(Text((tuple(b"abc"),))) == prompt_for(Text(("abc",)))


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"500 tokens.*has 600"):
        prompt_for(Text(("x" * 600,)))


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(UnsupportedFeature, match="no chat template"):
        prompt_for(Chat((USER,)), template=None)
