"""The second law: where a text is cut does not matter. Over HTTP, on texts of 12 kinds, condition by condition.

Every uncut text is written alone and at once. Then parts of it are sent back, and the answers must be its rest. Prompts
here are at most 128 tokens long, or ask for `deterministic`, or are in the cache: there the engine promises the same
bits, so not one answer may differ. `bench.equality` measures what it does not promise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from bench.texts import KINDS, PASSAGES
from tests.conftest import Served

STARTS = {
    **{kind: KINDS[kind] for kind in ("prose", "Python", "table", "JSON", "URLs and numbers")},
    **{kind: KINDS[kind] for kind in ("German", "Russian", "Chinese", "Japanese")},
    "Thai": "ภาษาไทยเป็นภาษาที่",
    "emoji": "My week in emoji: Monday 😀🌧️, Tuesday 🎉🍕, Wednesday",
    "YAML": 'services:\n  web:\n    image: nginx:1.25\n    ports:\n      - "8080:80"\n  db:\n',
}
LONG_STARTS = {"long prose": PASSAGES["English"][1][:720], "long German": PASSAGES["German"][0][:440]}
"""Of more than 128 tokens."""
NUM_TOKENS = 24
HORIZON = 8
"""Tokens that are compared behind a cut."""
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Uncut:
    """A text that the server wrote, alone and at once."""

    start: str
    text: str
    """Up to the first bytes that are no character: they cannot be sent back."""
    finish: str
    fixed: Mapping[str, Any]
    """Fields that every part is asked for with."""

    def cuts(self, every: int) -> Iterator[tuple[Uncut, int]]:
        """Every so many characters, and not always from the first on."""
        first = 1 + sum(self.start.encode()) % every
        return ((self, at) for at in range(min(first, len(self.text) - 1), len(self.text), every))

    def differs(self, at: int, text: str, finish: str) -> str | None:
        """Say how an answer to the text cut at `at` is not its rest, as far as both go."""
        rest = self.text[at:]
        ended_early = finish == "stop" and (len(text) < len(rest) or self.finish != "stop")
        same = rest.startswith(text) or text.startswith(rest)
        return None if same and not ended_early else f"{self.start[-9:]}{self.text[:at]}: {rest!r}, {finish} {text!r}"


def ask(served: Served, prompt: str, **fields: Any) -> tuple[str, str]:
    """Return the first choice's text and why it ended."""
    choice = served.complete(prompt, **fields)["choices"][0]
    return choice["text"], choice["finish_reason"]


def ask_streamed(served: Served, prompt: str, **fields: Any) -> tuple[str, str]:
    """The same, by the official client and as a stream."""
    own = {name: fields.pop(name) for name in ("cache_salt", "deterministic") if name in fields}
    text, finish = "", ""
    with served.client() as client:
        stream = client.completions.create(
            model=served.name, prompt=prompt, seed=7, stream=True, extra_body=own, **fields
        )
        for event in stream:
            text += event.choices[0].text
            finish = event.choices[0].finish_reason or finish
    return text, finish


def write(served: Served, starts: Mapping[str, str], **fixed: Any) -> list[Uncut]:
    """Write the uncut texts, one after the other."""
    uncut = []
    for start in starts.values():
        text, finish = ask(served, start, max_tokens=NUM_TOKENS, **fixed)
        uncut.append(Uncut(start, text.split("\ufffd")[0], finish, fixed))
    assert all(len(item.text) > 8 for item in uncut)
    return uncut


def different(
    served: Served,
    cuts: Iterable[tuple[Uncut, int]],
    *,
    num_beside: int = 7,
    ask: Callable[..., tuple[str, str]] = ask,
    fields: Callable[[int], Mapping[str, Any]] = lambda index: {},
) -> tuple[list[str], int]:
    """Ask for what follows each cut; return the answers that are not the rest of the text, and how many there were."""

    def check(index: int, item: Uncut, at: int) -> str | None:
        asked = {"max_tokens": HORIZON, **item.fixed, **fields(index)}
        return item.differs(at, *ask(served, item.start + item.text[:at], **asked))

    with ThreadPoolExecutor(num_beside + 1) as pool:
        answers = [pool.submit(check, index, *cut) for index, cut in enumerate(cuts)]
    return [answer for future in answers if (answer := future.result())], len(answers)


@pytest.fixture(scope="module", params=TEMPERATURES, ids=["greedy", "sampled"])
def uncut(small: Served, request: pytest.FixtureRequest) -> list[Uncut]:
    """A text of each kind."""
    return write(small, STARTS, temperature=request.param)


def every(items: Iterable[Uncut], num: int) -> Iterator[tuple[Uncut, int]]:
    return itertools.chain.from_iterable(item.cuts(num) for item in items)


def test_l2_a_cut_anywhere_goes_on_with_the_same_text_beside_seven_others(small: Served, uncut: list[Uncut]) -> None:
    wrong, total = different(small, every(uncut, 3))
    assert not wrong
    assert total > 150


def test_l2_a_cut_goes_on_alone(small: Served, uncut: list[Uncut]) -> None:
    wrong, total = different(small, every(uncut, 31), num_beside=0)
    assert not wrong
    assert total >= len(uncut)


def test_l2_a_cut_goes_on_with_nothing_in_the_cache(small: Served, uncut: list[Uncut]) -> None:
    salt = f"cold {uncut[0].fixed}"
    wrong, total = different(small, every(uncut, 29), fields=lambda index: {"cache_salt": f"{salt} {index}"})
    assert not wrong
    assert total > 20


def test_l2_a_cut_goes_on_as_a_stream(small: Served, uncut: list[Uncut]) -> None:
    wrong, total = different(small, every(uncut, 41), ask=ask_streamed)
    assert not wrong
    assert total >= len(uncut)


def test_l2_rounds_are_one_run(small: Served, uncut: list[Uncut]) -> None:
    def in_rounds(item: Uncut, num: int, ask: Callable[..., tuple[str, str]]) -> str:
        text, finish, size = "", "length", NUM_TOKENS // num
        while len(text) < len(item.text) and finish != "stop":
            part, finish = ask(small, item.start + text, max_tokens=size, **item.fixed)
            # A round that ends inside a character gives it up, and the next must be larger.
            size = NUM_TOKENS // num if part else 2 * size
            text += part
        return text

    cases = [
        (item, num, (ask, ask_streamed)[index % 3 == 0])
        for num, step in ((1, 4), (4, 2), (16, 1))
        for index, item in enumerate(uncut[::step])
    ]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(in_rounds, *zip(*cases, strict=True)))
    assert [
        (num, text) for (item, num, _), text in zip(cases, texts, strict=True) if text[: len(item.text)] != item.text
    ] == []


def test_l2_a_choice_is_the_same_among_others(small: Served, uncut: list[Uncut]) -> None:
    wrong, _ = different(small, every(uncut[::2], 41), fields=lambda index: {"n": 4})
    assert not wrong
    for item in uncut[:3]:
        four = small.complete(item.start, max_tokens=HORIZON, n=4, **item.fixed)["choices"]
        two = small.complete(item.start, max_tokens=HORIZON, n=2, **item.fixed)["choices"]
        assert four[:2] == two
        assert len({choice["text"] for choice in four}) == 1 or item.fixed["temperature"]
        assert item.text.startswith(two[0]["text"])


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["greedy", "sampled"])
def test_l2_long_prompts_from_the_cache(small: Served, temperature: float) -> None:
    uncut = write(small, LONG_STARTS, temperature=temperature)
    wrong, total = different(small, every(uncut, 9))
    assert not wrong
    assert total > 10


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=["greedy", "sampled"])
def test_l2_long_prompts_read_again_if_deterministic(small: Served, temperature: float) -> None:
    uncut = write(small, LONG_STARTS, temperature=temperature, deterministic=True)
    salt = f"long {temperature}"
    wrong, total = different(small, every(uncut, 37), fields=lambda index: {"cache_salt": f"{salt} {index}"})
    assert not wrong
    assert total > 1
    wrong, total = different(small, every(uncut, 17))
    assert not wrong
    assert total > 4
