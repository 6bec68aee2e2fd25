"""Ending the thinking: where the closing tag is put, and that it depends on the tokens alone."""

from __future__ import annotations

import pytest

from legato.decoding.seam import Seam
from legato.engines.llamacpp.thinking import Budget
from legato.engines.scripted import ByteTokenizer
from legato.types import Job, Prompt, Sampling, Thinking
from tests.scaling import growth

TOKENIZER = ByteTokenizer()
SEAM = Seam(TOKENIZER)
CLOSE = b"</think>"


def job(scaffold: bytes, *, max_tokens: int | None, is_opened: bool = False) -> Job:
    """A Job whose turn begins behind a scaffold."""
    prompt = Prompt(tuple(scaffold), (), b"", 0, len(scaffold), "", turn=len(scaffold), is_opened=is_opened)
    return Job("id", 0, prompt, 99, Sampling(0, 0), thinking=Thinking(tuple(b"<think>"), tuple(CLOSE), max_tokens))


def written(text: bytes, *, max_tokens: int | None, is_opened: bool = False) -> bytes:
    """What becomes of a text if each token that is forced stands in place of the one that the model chose."""
    tokens = list(b"[a]")
    budget = Budget(job(b"[a]", max_tokens=max_tokens, is_opened=is_opened), TOKENIZER.pieces, SEAM)
    for byte in text:
        fresh = Budget(job(b"[a]", max_tokens=max_tokens, is_opened=is_opened), TOKENIZER.pieces, SEAM)
        token = budget.forced(tokens)
        assert token == fresh.forced(tokens)
        tokens.append(byte if token is None else token)
    return bytes(tokens[3:])


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        (b"<think>abcdefghijklmnop", 3, b"<think>abc</think>lmnop"),
        (b"<think>abcdefghijklmnop", 0, b"<think></think>ijklmnop"),
        (b"<think>abcdefghijklmnop", None, b"<think>abcdefghijklmnop"),
        (b"<think>ab</think>cdefghijkl", 12, b"<think>ab</think>cdefghijkl"),
        (b"<think>ab</thi", 6, b"<think>ab</th<"),
        (b"abcdefghijklmnopqrstuvw", 3, b"abcdefghijklmnopqrstuvw"),
        ("<think>aé234567890".encode(), 2, "<think>aé</think>0".encode()),
    ],
)
def test_after_so_many_tokens_the_closing_tag_is_written(text: bytes, max_tokens: int | None, expected: bytes) -> None:
    assert written(text, max_tokens=max_tokens) == expected


def test_thinking_that_the_prompt_has_opened_counts_from_its_beginning() -> None:
    assert written(b"abcdefghijklmn", max_tokens=3, is_opened=True) == b"abc</think>lmn"


def test_once_it_is_over_nothing_is_looked_at_again() -> None:
    budget = Budget(job(b"[a]", max_tokens=1), TOKENIZER.pieces, SEAM)
    assert budget.forced(list(b"[a]<think>a")) == CLOSE[0]
    assert not budget.is_over
    assert budget.forced(list(b"[a]<think>a</think>b")) is None
    assert budget.is_over


@pytest.mark.alone
def test_thinking_costs_as_much_as_it_is_long() -> None:
    def think(num: int) -> None:
        budget = Budget(job(b"[a]", max_tokens=num), TOKENIZER.pieces, SEAM)
        tokens = list(b"[a]<think>")
        while not budget.is_over:
            token = budget.forced(tokens)
            tokens.append(ord("x") if token is None else token)
        assert num < len(tokens) < num + 30

    assert growth(think, 1000) < 10


def test_a_job_with_thinking_comes_back_from_json() -> None:
    original = job(b"[a]", max_tokens=5)
    assert Job.from_json(original.to_json()) == original
