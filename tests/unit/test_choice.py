"""What a Job rules out, wherever its tokens are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from legato.decoding.choice import Choosing, ends_of
from legato.decoding.seam import Seam
from legato.engines.scripted import ByteTokenizer
from legato.types import Job, Prompt, Sampling, Thinking


class TaggedTokenizer(ByteTokenizer):
    """Has a control token that ends nothing."""

    pieces = (*ByteTokenizer.pieces, b"<|tag|>")
    control_ids = frozenset([256, 257])


TOKENIZER = TaggedTokenizer()
END, CONTROL = 256, 257
A, B = b"ab"
JOB = Job("", 0, Prompt((A,), (), b"", origin=1, floor=0, prefix="a"), 8, Sampling(seed=1, temperature=0.0))


def chosen(job: Job, *best: int, num_written: int = 0, is_healing: bool = False, **options: object) -> int:
    """What a Job chooses where the model wants `best`, the first of them most."""
    row = np.zeros(len(TOKENIZER.pieces), np.float32)
    row[list(best)] = np.arange(len(best), 0, -1)
    choosing = Choosing(job, TOKENIZER, Seam(TOKENIZER))
    place = {"offset": 1, "counts": {}, "num_written": num_written, "is_healing": is_healing}
    return choosing.choose(row, [A], **place, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "num_written", "expected"),
    [({}, 0, END), ({"ignore_end": True}, 0, A), ({"min_tokens": 2}, 1, A), ({"min_tokens": 2}, 2, END)],
)
def test_an_end_is_chosen_where_it_may_stand(fields: dict[str, int], num_written: int, expected: int) -> None:
    assert chosen(replace(JOB, **fields), END, A, num_written=num_written) == expected  # type: ignore[arg-type]


def test_a_stop_id_is_text_inside_the_heal_bytes() -> None:
    job = replace(JOB, stop_ids=(A,), min_tokens=2)
    assert ends_of(job, TOKENIZER) == {A, END}
    assert chosen(job, A, B) == B
    assert chosen(job, A, B, is_healing=True) == A


def test_control_tokens_are_chosen_only_as_stops_and_as_tags_of_thinking() -> None:
    assert chosen(JOB, CONTROL, A) == A
    assert chosen(replace(JOB, stop_ids=(CONTROL,)), CONTROL, A) == CONTROL
    assert chosen(replace(JOB, stop_ids=(CONTROL,)), CONTROL, A, is_healing=True) == A
    tags = Thinking(open_ids=(CONTROL,), close_ids=())
    assert chosen(replace(JOB, thinking=tags), CONTROL, A, accept=lambda token: False) == CONTROL


def test_what_a_constraint_refuses_is_not_chosen() -> None:
    allowed = np.ones(len(TOKENIZER.pieces), np.bool_)
    allowed[A] = False
    assert chosen(JOB, A, B, CONTROL, allowed=allowed) == B
    assert chosen(JOB, A, B, accept=lambda token: token != A) == B
