"""The scheduler over a model whose choices are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from legato.decoding.seam import Seam
from legato.engines.llamacpp.scheduler import Scheduler
from legato.engines.llamacpp.spill import Spill
from legato.errors import LegatoError
from legato.types import Job, Prompt, Sampling, Step, Thinking, Token
from tests.fake_model import FakeModel, MergeTokenizer

TOKENIZER = MergeTokenizer()
END = b"<|end|>"
MAX_SEQUENCES = 9


class WrittenDown(FakeModel):
    """Writes what `says` returns for the text so far."""

    def __init__(self, says: Callable[[bytes], bytes]) -> None:
        super().__init__(context_length=200, max_sequences=MAX_SEQUENCES)
        self._says = says

    def row(self, tokens: Sequence[int], state: bytes) -> NDArray[np.float32]:
        """Return logits that are highest for the token that is said."""
        text = b"".join(TOKENIZER.pieces[id] for id in tokens)
        row = np.zeros(len(TOKENIZER.pieces), np.float32)
        row[TOKENIZER.pieces.index(self._says(text))] = 10.0
        return row


def run(says: Callable[[bytes], bytes], job: Job) -> tuple[list[Token], str | None]:
    """Return the tokens of a Job and why it ended."""
    scheduler = Scheduler(
        WrittenDown(says),
        Seam(TOKENIZER),
        context_length=200,
        max_batch=64,
        max_sequences=MAX_SEQUENCES,
        spill=Spill(0, None, ""),
    )
    scheduler.submit(job)
    told: list[tuple[str, Step | LegatoError]] = []
    while not scheduler.is_idle:
        told += scheduler.step()
    steps = [step for _, step in told if isinstance(step, Step)]
    assert len(steps) == len(told), told
    return [token for step in steps for token in step.tokens], steps[-1].finish


def thinker(close: Sequence[bytes], **options: object) -> Job:
    """A Job in whose turn thinking has begun."""
    thinking = Thinking((0,), tuple(TOKENIZER.pieces.index(piece) for piece in close))
    prompt = Prompt((3,), (), b"", 1, 1, "", turn=1, is_opened=True)
    return Job("id", 0, prompt, 12, Sampling(0, 0.0), thinking=thinking, **options)  # type: ignore[arg-type]


def ends_while_it_thinks(text: bytes) -> bytes:
    """Think for two letters, then end; behind the closing tag say two letters and end."""
    if b"bb" not in text:
        return END if text.endswith(b"c") else b"c"
    return END if text.endswith(b"aa") else b"a"


@pytest.mark.parametrize("close", [(b"bb",), (b"b", b"b")])
def test_an_end_inside_the_thinking_closes_it_and_an_answer_follows(close: tuple[bytes, ...]) -> None:
    job = thinker(close, canonical=False)
    tokens, finish = run(ends_while_it_thinks, job)
    assert (b"".join(token.data for token in tokens), finish) == (b"cbbaa", "stop")
    for num in (0, 1, 1 + len(close), 2 + len(close)):  # A tag is told as a whole.
        rest, finish = run(ends_while_it_thinks, job.resumed(tokens[:num]))
        assert ([*tokens[:num], *rest], finish) == (tokens, "stop")


def test_a_model_that_says_nothing_behind_its_thinking_has_ended() -> None:
    tokens, finish = run(lambda text: b"c" if text == b" " else END, thinker((b"bb",)))
    assert (b"".join(token.data for token in tokens), finish) == (b"cbb", "stop")


def test_an_id_that_the_caller_stops_at_ends_the_thinking_too() -> None:
    job = thinker((b"bb",), stop_ids=(TOKENIZER.pieces.index(b"c"),))
    assert run(ends_while_it_thinks, job) == ([], "stop")
