"""The cells: who has the longest head, who goes first, and what is exact."""

from __future__ import annotations

import numpy as np
import pytest

from legato.engines.llamacpp.cache import Tokens
from legato.engines.llamacpp.cells import Cells, Feed, Slot
from legato.engines.llamacpp.spill import Spill
from tests.fake_model import FakeModel

HEAD = [0, 1, 2, 3] * 20


def cells_with(*, max_sequences: int = 9, spill_bytes: int = 0) -> Cells:
    """Cells for 300 tokens."""
    model = FakeModel(context_length=300, max_sequences=max_sequences)
    return Cells(model, max_batch=256, max_sequences=max_sequences, spill=Spill(spill_bytes, None, ""))


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, np.int32)


def fed(cells: Cells, tokens: list[int], *, salt: str = "", exact: bool = True, took: bool = False) -> Slot:
    """A slot that has some tokens, of which a head may be another's."""
    slot = cells.open(salt)
    assert slot is not None
    if took:
        cells.take_head(slot, array(tokens), exact=exact)
    if slot.length < len(tokens):
        assert cells.decode([Feed(slot, tokens[slot.length :], 1)], exact=exact) is not None
    assert slot.ids.tolist() == tokens
    return slot


def test_the_longest_head_is_found_in_what_is_there_of_the_same_salt() -> None:
    cells = cells_with()
    cells.retain(fed(cells, [*HEAD, 5, 6]))
    running = fed(cells, [*HEAD, 5, 7, 8])
    fed(cells, [*HEAD, 9, 9, 9], salt="other")
    assert cells.longest(array([*HEAD, 5, 6, 7]), "", exact=True) == 82
    assert cells.longest(array([*HEAD, 5, 7, 8, 8]), "", exact=True) == 83
    assert cells.longest(array([*HEAD, 9, 9]), "", exact=True) == 80
    assert cells.longest(array([4]), "", exact=True) == 0
    cells.cut(running, 81)
    assert cells.longest(array([*HEAD, 5, 7, 8, 8]), "", exact=True) == 81


def test_a_shared_head_takes_no_cells_again() -> None:
    cells = cells_with()
    for end in range(3):
        cells.retain(fed(cells, [*HEAD, end], took=True))
    assert cells.num_retained_tokens == len(HEAD) + 3


@pytest.mark.parametrize("first", [True, False])
def test_of_two_slots_one_of_which_has_all_of_the_other_one_is_kept(first: bool) -> None:
    cells = cells_with()
    texts = [HEAD, [*HEAD, 1]] if first else [[*HEAD, 1], HEAD]
    for tokens in texts:
        cells.retain(fed(cells, tokens))
    assert cells.num_retained == 1
    assert cells.longest(array([*HEAD, 1]), "", exact=True) == 81


def test_what_is_exact_is_kept_beside_a_longer_text_that_is_not() -> None:
    cells = cells_with()
    cells.retain(fed(cells, HEAD))
    cells.retain(fed(cells, [*HEAD, 1], exact=False))
    assert cells.num_retained == 2
    assert cells.longest(array([*HEAD, 1]), "", exact=True) == 80
    assert cells.longest(array([*HEAD, 1]), "", exact=False) == 81


def test_behind_an_inexact_head_nothing_is_exact() -> None:
    cells = cells_with()
    slot = fed(cells, HEAD, exact=False)
    assert cells.decode([Feed(slot, [1, 2], 1)], exact=True) is not None
    assert (slot.num_exact, slot.is_exact) == (0, False)
    mixed = fed(cells, HEAD[:10])
    assert cells.decode([Feed(mixed, [1] * 5, 1)], exact=False) is not None
    assert cells.decode([Feed(mixed, [1] * 5, 1)], exact=True) is not None
    assert (mixed.num_exact, mixed.length) == (10, 20)


def test_the_least_recently_used_goes_first() -> None:
    cells = cells_with(max_sequences=5)
    for end in range(3):
        cells.retain(fed(cells, [*HEAD[:8], end]))
    assert cells.longest(array([*HEAD[:8], 0]), "", exact=True) == 9  # Now it is the last that was used.
    assert cells.open("") is not None
    assert cells.longest(array([*HEAD[:8], 1]), "", exact=True) == 8
    assert cells.longest(array([*HEAD[:8], 0]), "", exact=True) == 9


def test_the_last_slot_is_a_branchs() -> None:
    cells = cells_with(max_sequences=5)
    slots = [fed(cells, [end, 1]) for end in range(2)]
    assert cells.open("") is None
    branch = cells.fork(slots[0], 1)
    assert branch is not None
    assert branch.ids.tolist() == [0]
    assert cells.fork(slots[0], 1) is None
    cells.close(branch)
    assert cells.open("") is None
    assert cells.fork(slots[1], 2) is not None


def test_a_slot_is_the_same_after_a_compaction() -> None:
    cells = cells_with(max_sequences=9)
    first = fed(cells, [*HEAD, 1])
    second = fed(cells, [*HEAD, 2, 2], took=True)
    cells.close(fed(cells, [3] * 40))
    assert cells.make_room()
    assert first.ids.tolist() == [*HEAD, 1]
    assert second.ids.tolist() == [*HEAD, 2, 2]
    assert second.numbers.tolist() == [*range(80), 81, 82]
    assert not cells.make_room()


def test_what_was_spilled_is_as_exact_as_it_was() -> None:
    for exact in (True, False):
        cells = cells_with(spill_bytes=10**6)
        cells.suspend(fed(cells, HEAD, exact=exact))
        assert cells.num_spilled == 1
        slot = cells.open("")
        assert slot is not None
        assert cells.take_head(slot, array([*HEAD[:70], 9]), exact=True) == (70 if exact else 0)
        if not exact:
            assert cells.take_head(slot, array([*HEAD[:70], 9]), exact=False) == 70
        assert slot.is_exact == exact


def test_what_is_retained_and_shared_with_an_open_slot_makes_no_room() -> None:
    cells = cells_with()
    slot = fed(cells, HEAD)
    branch = cells.fork(slot, 70)
    assert branch is not None
    cells.retain(branch)
    assert (cells.num_retained, cells.make_room(), slot.ids.tolist()) == (1, False, HEAD)
