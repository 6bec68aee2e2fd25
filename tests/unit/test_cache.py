"""Shared heads, rows that are known, and states outside the cells."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.engines.llamacpp.cache import RowCache, Tokens, shared_head
from legato.engines.llamacpp.spill import Spill

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, np.int32)


def common(left: list[int], right: list[int]) -> int:
    size = 0
    while size < min(len(left), len(right)) and left[size] == right[size]:
        size += 1
    return size


@given(TOKENS, TOKENS)
def test_shared_head(left: list[int], right: list[int]) -> None:
    assert shared_head(array(left), array(right)) == common(left, right)


def test_rows_are_known_by_their_tokens_and_the_oldest_go() -> None:
    rows = [np.full(4, value, np.float32) for value in range(3)]
    cache = RowCache(max_bytes=2 * rows[0].nbytes)
    cache.put([1], rows[0], is_exact=True)
    cache.put([1, 2], rows[1], is_exact=True)
    rows[0][:] = 9
    assert cache.get([1], is_exact=True) is not None
    cache.put([1], np.zeros(4, np.float32), is_exact=True)
    cache.put([3], rows[2], is_exact=True)
    assert cache.get([1, 2], is_exact=True) is None
    assert cache.get([1], "other", is_exact=True) is None
    assert np.array_equal(cache.get([1], is_exact=True), [0, 0, 0, 0])  # type: ignore[arg-type]
    assert np.array_equal(cache.get([3], is_exact=True), rows[2])  # type: ignore[arg-type]


def test_who_reads_exactly_gets_no_row_that_is_not() -> None:
    rows = [np.full(4, value, np.float32) for value in range(2)]
    cache = RowCache(max_bytes=1000)
    cache.put([1], rows[0], is_exact=False)
    assert cache.get([1], is_exact=True) is None
    assert cache.get([1], is_exact=False) is not None
    cache.put([1], rows[1], is_exact=True)
    assert np.array_equal(cache.get([1], is_exact=True), rows[1])  # type: ignore[arg-type]
    assert np.array_equal(cache.get([1], is_exact=False), rows[0])  # type: ignore[arg-type]


# -- states outside the cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_states_come_back_within_the_bound(tmp_path: Path, on_disk: bool) -> None:
    spill = Spill(250, tmp_path if on_disk else None, "model")
    spill.put(array([1, 2, 3]), "", b"a" * 100)
    spill.put(array([1, 2, 4]), "", b"b" * 100)
    name, length = spill.longest(array([1, 2, 3, 9]), "")
    assert (spill.get(name), length) == (b"a" * 100, 3)
    assert spill.longest(array([1, 2, 3]), "salt") == ("", 0)
    spill.put(array([5]), "", b"c" * 100)  # The second was used least recently.
    assert spill.longest(array([1, 2, 4]), "")[1] == 2
    spill.put(array([6]), "", b"d" * 251)
    assert len(spill) == 2
    spill.put(array([1, 2, 3, 7]), "", b"e" * 100)  # It holds all that the first held.
    assert len(spill) == 2
    assert spill.longest(array([1, 2, 3, 7]), "")[1] == 4


def test_states_outlive_the_process(tmp_path: Path) -> None:
    spill = Spill(1000, tmp_path, "model")
    spill.put(array([1, 2]), "salt", b"state")
    assert spill.is_kept
    again = Spill(1000, tmp_path, "model")
    name, length = again.longest(array([1, 2, 3]), "salt")
    assert (again.get(name), length) == (b"state", 2)
    assert os.listdir(tmp_path) == [name]
    assert len(Spill(2, tmp_path, "model")) == 0  # A smaller bound holds at once.


def test_a_state_of_another_model_or_a_damaged_one_is_not_read(tmp_path: Path) -> None:
    Spill(1000, tmp_path, "model").put(array([1, 2]), "", b"state")
    (tmp_path / "broken.kv").write_bytes(b"{")
    spill = Spill(1000, tmp_path, "model")
    name, _ = spill.longest(array([1, 2]), "")
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:-1] + b"X")
    assert spill.get(name) is None
    assert (len(spill), os.listdir(tmp_path)) == (0, [])
    Spill(1000, tmp_path, "model").put(array([1, 2]), "", b"state")
    assert len(Spill(1000, tmp_path, "another")) == 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_loses_the_state_and_no_more(tmp_path: Path) -> None:
    spill = Spill(1000, tmp_path / "gone", "model")
    (tmp_path / "gone").rmdir()
    spill.put(array([1, 2]), "", b"state")
    assert len(spill) == 0
