"""Scores against a reference: a plain decode through the binding, without our scheduler, seam and server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from legato.decoding.sampling import log_softmax
from legato.engines.llamacpp.binding import Batch, Model
from tests.conformance.reading import together
from tests.conftest import DEFAULT, SMALL, Served, weights

TEXT = "The keeper of the lighthouse wrote in the log. " + " ".join(
    f"Day {day}: wind {day * 7 % 13} knots from the {('north', 'south', 'east')[day % 3]}, {day * day % 97} gulls."
    for day in range(1, 13)
)
SHARED = TEXT[: len(TEXT) // 2]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Reference:
    """A model that decodes as plainly as can be."""

    model: Model

    def score(self, text: str) -> list[float]:
        """The log-probability of each token but the first, from the raw logits."""
        ids = self.model.vocabulary.encode(text.encode(), special=True)
        self.model.clear()
        batch = Batch(len(ids))
        batch.add(0, 0, ids, num_wanted=len(ids))
        assert self.model.decode(batch, exact=True)
        rows = self.model.rows(len(ids))
        return [float(log_softmax(row)[id]) for row, id in zip(rows, ids[1:], strict=False)]


@pytest.fixture(scope="module", params=[SMALL, DEFAULT])
def pair(request: pytest.FixtureRequest) -> tuple[Served, Reference]:
    """A server and the reference for its model."""
    served: Served = request.getfixturevalue("small" if request.param == SMALL else "default")
    model = Model(
        weights(request.param), context_length=1024, num_cells=0, max_batch=512, max_sequences=2, num_threads=2
    )
    return served, Reference(model)


def score(served: Served, text: str) -> list[float]:
    """The log-probabilities that the server gives a text's tokens."""
    arrays = served.complete(text, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert arrays["token_logprobs"][0] is None
    logprobs: list[float] = arrays["token_logprobs"][1:]
    return logprobs


@pytest.mark.timeout(400)
def test_c046_scores_are_those_of_a_plain_decode_whatever_ran_before(pair: tuple[Served, Reference]) -> None:
    served, reference = pair
    texts = [TEXT, f"{SHARED} And then the lamp went out.", "A fox and a hen."]
    expected = {text: reference.score(text) for text in texts}
    assert len(expected[TEXT]) > 200

    def check(text: str) -> None:
        difference = np.abs(np.subtract(score(served, text), expected[text]))
        assert difference.max() < TOLERANCE, (text[-20:], difference.max(), difference.argmax())

    check(TEXT)
    served.complete(f"{SHARED} So", max_tokens=3)
    check(TEXT)
    check(TEXT)
    together(check, [texts[1], TEXT, texts[2], TEXT])
