"""What is remembered of an answer, and for which Jobs."""

from __future__ import annotations

import timeit
from dataclasses import replace

import pytest

from legato.engines.llamacpp.recall import Recall
from legato.types import FinishReason, Job, Prompt, Sampling, Token

SCAFFOLD = (1, 2, 3)


def job(text: bytes, heal: bytes = b"", *, max_tokens: int = 8, seed: int = 7) -> Job:
    """A Job that continues `text` + `heal`, a token for every byte."""
    prompt = Prompt((*SCAFFOLD, *text), (), heal, len(text), len(SCAFFOLD), (text + heal).decode())
    return Job("j", 0, prompt, max_tokens, Sampling(seed, 0.5), is_typed=True)


def tokens(text: bytes) -> tuple[Token, ...]:
    """A token for every byte."""
    return tuple(Token(byte, bytes([byte])) for byte in text)


def remembered(finish: FinishReason | None = "stop") -> Recall:
    """What `ab` with `cd` to be healed went on as."""
    recall = Recall()
    recall.keep(job(b"ab", b"cd"), tokens(b"cdefgh"), finish)
    return recall


@pytest.mark.parametrize(
    ("asked", "text", "finish"),
    [
        (job(b"ab", b"cd"), b"cdefgh", "stop"),
        (job(b"abcd"), b"efgh", "stop"),
        (job(b"abcd", b"e"), b"efgh", "stop"),
        (job(b"abcdefgh"), b"", "stop"),
        (job(b"abcd", b"e", max_tokens=2), b"efg", "length"),
        (replace(job(b"abcd", b"e"), num_resumed=2, reference=(1,), max_round_tokens=4), b"efgh", "stop"),
    ],
)
def test_who_types_what_was_foretold_gets_the_rest(asked: Job, text: bytes, finish: FinishReason) -> None:
    assert remembered().find(asked) == (tokens(text), finish)


@pytest.mark.parametrize(
    "asked",
    [
        job(b"abx"),
        job(b"ab", b"x"),
        job(b"ab", b"c"),
        job(b"ab"),
        job(b"abc", b"d"),
        job(b"ab", b"cde"),
        job(b"a"),
        job(b"abcdefghi"),
        job(b"abcd", seed=8),
        job(b"abcd", max_tokens=0),
        replace(job(b"abcd"), is_typed=False),
        replace(job(b"abcd"), choice=1),
        replace(job(b"abcd"), cache_salt="other"),
        replace(job(b"abcd"), stop_ids=(5,)),
        replace(job(b"abcd"), min_tokens=1),
        replace(job(b"abcd"), prompt=Prompt((9, 2, 3, *b"abcd"), (), b"", 4, 3, "abcd")),
        replace(job(b"abcd"), prompt=Prompt((*SCAFFOLD, *b"abcd"), (), b"", 5, 3, "abcd")),
    ],
)
def test_any_other_job_is_written_anew(asked: Job) -> None:
    assert remembered().find(asked) is None


def test_ends_are_ruled_out_behind_each_seam_anew() -> None:
    recall = Recall()
    asked = replace(job(b"ab"), min_tokens=2)
    recall.keep(asked, tokens(b"cd"), "stop")
    assert recall.find(asked) == (tokens(b"cd"), "stop")
    assert recall.find(replace(job(b"abc"), min_tokens=2)) is None


def test_what_was_cut_off_is_gone_on_with() -> None:
    recall = remembered(None)
    assert recall.find(job(b"abcde")) == (tokens(b"fgh"), None)
    assert recall.find(job(b"abcde", b"fgh")) is None  # Nothing new would come of it.
    recall.keep(job(b"abcde"), tokens(b"fghi"), "stop")
    assert recall.find(job(b"abcde")) == (tokens(b"fghi"), "stop")


def test_only_the_last_answers_are_kept() -> None:
    recall = remembered()
    for seed in range(100, 164):
        recall.keep(job(b"ab", seed=seed), tokens(b"c"), "stop")
    assert recall.find(job(b"abcd")) is None
    assert recall.find(job(b"ab", seed=100)) is not None


@pytest.mark.alone
def test_what_else_is_remembered_hardly_costs_anything() -> None:
    """Answers at one gap, of 8,000 ids that differ in the last one: 64 are no more than 16 times one."""
    asked = job(b"ab" * 4000)

    def seconds(num_answers: int) -> float:
        recall = Recall()
        for num in range(num_answers):
            recall.keep(job(b"ab" * 3999 + b"a", bytes([num])), tokens(bytes([num]) * 1000), "stop")
        assert recall.find(asked) is None
        return min(timeit.repeat(lambda: recall.find(asked), number=1, repeat=20))

    assert seconds(64) < 16 * seconds(1)
