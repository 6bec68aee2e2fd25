"""What ends an answer, and what does not (`C...`): end tokens, stop ids, too early, never, and loops."""

from __future__ import annotations

from typing import Any

import pytest

from legato.text.cycles import MAX_TOKENS, MIN_TOKENS
from tests.conformance.reading import (
    CHAT,
    COMPLETIONS,
    body_for,
    check_error,
    fold,
    marked,
    stream,
    text_of,
    user,
)
from tests.conftest import Served, serve_script

BOTH = [COMPLETIONS, CHAT]
SEAM = "The capital of Fran"


def eager(served: Served) -> dict[str, Any]:
    """Fields under which the model ends as soon as it may."""
    return {"logit_bias": {str(id): 100 for id in served.engine.tokenizer.end_ids}}


def both_ways(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    """The answer, which is the same streamed."""
    body = body_for(served, path, return_token_ids=True, **fields)
    answer: dict[str, Any] = served.post(path, body).json()
    streamed = fold(stream(served, path, body))["choices"][0]
    assert (streamed["text"], streamed["finish_reason"]) == (text_of(answer), answer["choices"][0]["finish_reason"])
    return answer


def ending(answer: dict[str, Any]) -> tuple[str, int]:
    """Why the answer ended, and after how many tokens."""
    return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_has_its_least_number_of_tokens(small: Served, path: str, temperature: float) -> None:
    fields = {"temperature": temperature, "max_tokens": 12, **eager(small)}
    assert ending(both_ways(small, path, **fields)) == ("stop", 0)
    for num in (1, 7):
        assert ending(both_ways(small, path, **fields, min_tokens=num)) == ("stop", num)
    assert ending(both_ways(small, path, **fields, min_tokens=12)) == ("length", 12)


def test_the_least_number_of_tokens_is_counted_behind_the_seam(small: Served) -> None:
    fields = {"max_tokens": 12, "min_tokens": 5, **eager(small)}
    answer = both_ways(small, COMPLETIONS, prompt=SEAM, **fields)
    assert ending(answer) == ("stop", 5)
    assert len(answer["choices"][0]["token_ids"]) == 5
    assert ending(both_ways(small, CHAT, messages=[user("Hi"), marked(SEAM)], **fields)) == ("stop", 5)


def test_a_stop_string_waits_for_the_least_number_of_tokens(small: Served) -> None:
    body: dict[str, Any] = {"prompt": "Count: 1 2 3", "max_tokens": 30}
    calm = small.complete(**body, logprobs=0)["choices"][0]
    assert calm["text"].count(" ") > 8
    for num in (0, 4, 9):
        early = "".join(calm["logprobs"]["tokens"][:num])
        expected = calm["text"][: calm["text"].index(" ", len(early))]
        answer = both_ways(small, COMPLETIONS, **body, min_tokens=num, stop=[" "])
        assert text_of(answer) == expected
        assert answer["usage"]["completion_tokens"] > num


@pytest.mark.parametrize("path", BOTH)
def test_the_end_is_ignored(small: Served, path: str) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, **eager(small)}
    for temperature in (0, 1):
        answer = both_ways(small, path, **fields, temperature=temperature)
        assert ending(answer) == ("length", 12)
        assert not set(answer["choices"][0]["token_ids"]) & small.engine.tokenizer.end_ids
        assert "<|" not in text_of(answer)


def test_rounds_that_ignore_the_end_are_one_run(small: Served) -> None:
    prompt = "Question: What is 2 + 2?\nAnswer: 4<|im_end|>\n"
    one = text_of(small.complete(prompt, max_tokens=36, ignore_eos=True))
    rounds = ""
    for _ in range(3):
        rounds += text_of(small.complete(prompt + rounds, max_tokens=12, ignore_eos=True))
    assert rounds == one


@pytest.mark.parametrize("path", BOTH)
def test_a_stop_id_ends_the_answer_and_is_not_shown(small: Served, path: str) -> None:
    source: dict[str, Any] = {"prompt": SEAM} if path == COMPLETIONS else {"messages": [user("Hi"), marked(SEAM)]}
    fields = {**source, "max_tokens": 12, "ignore_eos": True}
    calm = both_ways(small, path, **fields)
    ids = calm["choices"][0]["token_ids"]
    for id in {*ids[1:6]} - {ids[0]}:  # The first reaches over the seam.
        first = ids.index(id)
        answer = both_ways(small, path, **fields, stop_token_ids=[id])
        assert ending(answer) == ("stop", first)
        assert answer["choices"][0]["token_ids"] == ids[:first]
        assert text_of(calm).startswith(text_of(answer))
        later = both_ways(small, path, **fields, stop_token_ids=[id], min_tokens=first + 2)
        assert id not in later["choices"][0]["token_ids"]
        assert ending(later)[1] >= first + 2


def test_control_tokens_can_be_stop_ids(small: Served) -> None:
    tokenizer = small.engine.tokenizer
    control = max(tokenizer.control_ids - tokenizer.end_ids)
    end = min(tokenizer.end_ids)
    fields = {"max_tokens": 6, "prompt": "One, two,"}
    for id, ignored in ((control, False), (control, True), (end, True)):
        bias = {str(id): 100}
        plain = both_ways(small, COMPLETIONS, **fields, logit_bias=bias, ignore_eos=ignored)
        assert ending(plain) == ("length", 6)
        assert "<" not in text_of(plain)
        answer = both_ways(
            small, COMPLETIONS, **fields, logit_bias=bias, ignore_eos=ignored, stop_token_ids=[id], min_tokens=2
        )
        assert ending(answer) == ("stop", 2)


def test_what_cannot_be_asked_for(small: Served) -> None:
    def refused(served: Served, path: str, field: str, **fields: Any) -> dict[str, Any]:
        return check_error(served.post(path, body_for(served, path, **fields)), 400, field)

    for path in BOTH:
        assert "got 9 and 8" in refused(small, path, "min_tokens", min_tokens=9, max_tokens=8)["message"]
        refused(small, path, "stop_token_ids", stop_token_ids=[len(small.engine.tokenizer.pieces)])
    assert (
        "17 and 16, its default" in refused(small, COMPLETIONS, "min_tokens", min_tokens=17, max_tokens=None)["message"]
    )
    with serve_script([b"ok"]) as served:
        for field, value in (("min_tokens", 1), ("ignore_eos", True), ("stop_token_ids", [5])):
            for path in BOTH:
                assert refused(served, path, field, **{field: value})["code"] == "unsupported"
                same = {field: type(value)()}
                assert served.post(path, body_for(served, path, **same)).status_code == 200


# ---------------------------------------------------------------------------------------------------------------------
# Loops


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("period", [1, 7, 60])
def test_c102_a_loop_ends_with_a_reason_of_its_own(path: str, period: int) -> None:
    text = "Once. " + "".join(chr(ord("!") + at) for at in range(period)) * 3000
    with serve_script([text[at : at + 11].encode() for at in range(0, 3000, 11)]) as served:
        answer = both_ways(served, path, max_tokens=2000, detect_loops=True)
        reason, num = ending(answer)
        assert reason == "repetition"
        assert num - len("Once. ") <= max(4 * period, 512)
        assert text_of(answer) == text[:num]
        plain = both_ways(served, path, max_tokens=2000)
        assert (text_of(plain), ending(plain)) == (text[:2000], ("length", 2000))


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"| {row} | lamp lit | wind north | 0 ships |\n" for row in range(50)),
        "Title\n" + "=" * 200 + "\nText, and so on.\n" + "=" * 200,
    ],
)
def test_c102_tables_and_rulers_are_no_loops(text: str) -> None:
    with serve_script([text.encode()]) as served:
        on, off = (both_ways(served, CHAT, max_tokens=4000, detect_loops=detect) for detect in (True, False))
        assert text_of(on) == text_of(off) == text
        assert ending(on)[0] == "stop"


def test_c102_a_loop_in_rounds_ends_where_it_does_in_one() -> None:
    with serve_script([b"ab" * 400]) as served:
        fields = {"model": served.name, "max_tokens": 100, "detect_loops": True}
        text = "Once: "
        sizes = []
        for _ in range(4):
            answer = served.post(COMPLETIONS, {**fields, "prompt": text}).json()
            sizes.append(ending(answer))
            text += text_of(answer)
        rest = MIN_TOKENS - 200
        assert sizes == [("length", 100), ("length", 100), ("repetition", rest), ("repetition", 1)]


def test_c102_a_model_that_loops_is_stopped(small: Served) -> None:
    body: dict[str, Any] = {"prompt": "ha ha ha ha ha ha ha ha ha ha ha ha", "max_tokens": 700}
    looped = small.complete(**body, detect_loops=True)
    reason, num = ending(looped)
    assert reason == "repetition"
    assert num <= MAX_TOKENS
    text = text_of(looped)
    assert text.count(text[-40:]) >= 4
