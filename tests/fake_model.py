"""A model that remembers what each of its cells was fed, in the place of `binding.Model`.

It computes a row of logits from the entries that a sequence really has at the positions before it, and refuses to
compute anything behind a sequence that has a hole, or two entries at one position, or entries out of order. Entries
and rows that were computed by the fast kernels, or behind such entries, are others than exact ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from legato.engines.llamacpp.binding import Batch, Model, Vocabulary

__all__ = ["Entry", "FakeModel", "MergeTokenizer"]

_MERGES = ("ab", "ca", " a", "abc", " ab", "bb", "caab", "b ", " abc", "cc", "abab")
"""In the order in which a byte-pair encoder makes them."""


class MergeTokenizer(Vocabulary):
    """A byte-pair encoder over four letters; the last id ends an answer."""

    def __init__(self) -> None:
        self.pieces: Sequence[bytes] = [b"a", b"b", b"c", b" ", *(word.encode() for word in _MERGES), b"<|end|>"]
        self.end_ids = self.control_ids = frozenset([len(self.pieces) - 1])
        self.start_id = None
        self.metadata: Mapping[str, str] = {}
        self.context_length = 0

    def encode(self, data: bytes, *, special: bool) -> list[int]:
        """Merge what can be merged, the first of `_MERGES` first."""
        parts = [bytes([byte]) for byte in data]
        for merged in self.pieces[4:-1]:
            at = 0
            while at < len(parts) - 1:
                if parts[at] + parts[at + 1] == merged:
                    parts[at : at + 2] = [merged]
                at += 1
        return [self.pieces.index(part) for part in parts]


@dataclass(slots=True)
class Entry:
    """What a cell holds."""

    position: int
    token: int
    state: bytes
    """Names all that was computed on the way here."""
    is_exact: bool
    sequences: set[int] = field(default_factory=set)


class FakeModel(Model):
    """Cells without weights."""

    def __init__(self, *, context_length: int, max_sequences: int, fast_is_other: bool = True) -> None:
        self.vocabulary = MergeTokenizer()
        self.context_length = context_length
        self.num_cells = context_length + 2 * max_sequences
        self._cells: list[Entry | None] = [None] * self.num_cells
        self._rows: list[NDArray[np.float32]] = []
        self._fast_is_other = fast_is_other

    def entries(self, sequence: int) -> list[Entry]:
        """Return what a sequence has, in the order of its cells."""
        return [entry for entry in self._cells if entry is not None and sequence in entry.sequences]

    def sequences(self) -> set[int]:
        """Return the sequences that have anything."""
        return {sequence for entry in self._cells if entry is not None for sequence in entry.sequences}

    def decode(self, batch: Batch, *, exact: bool = False) -> bool:
        """Put the batch's tokens into the lowest free cells, and compute the rows that it wants."""
        native = batch.native
        free = [index for index, entry in enumerate(self._cells) if entry is None]
        if native.n_tokens > len(free):
            return False
        self._rows = []
        for index, place in zip(range(native.n_tokens), free, strict=False):
            sequence, position = native.seq_id[index][0], native.pos[index]
            before = self.entries(sequence)
            assert [entry.position for entry in before] == [*range(position)], "what a sequence has is no text"
            last = before[-1] if before else Entry(-1, -1, b"", True)
            is_exact = last.is_exact and (exact or not self._fast_is_other)
            state = blake2b(last.state + bytes([native.token[index], is_exact]), digest_size=16).digest()
            self._cells[place] = Entry(position, native.token[index], state, is_exact, {sequence})
            if native.logits[index]:
                self._rows.append(self.row([*(entry.token for entry in before), native.token[index]], state))
        return True

    def row(self, tokens: Sequence[int], state: bytes) -> NDArray[np.float32]:
        """Return the logits behind some tokens."""
        draws = np.random.default_rng(int.from_bytes(state[:8], "big"))
        row = 2 * draws.standard_normal(len(self.vocabulary.pieces))
        row[-1] -= 2  # Answers go on for a while.
        return row.astype(np.float32)

    def rows(self, num: int) -> NDArray[np.float32]:
        """Return the rows of the last batch."""
        assert len(self._rows) == num
        return np.stack(self._rows) if num else np.empty((0, len(self.vocabulary.pieces)), np.float32)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share the entries of `source` from position `start` to `end` (-1: to its end)."""
        for entry in self.entries(source):
            if start <= entry.position and (entry.position < end or end < 0):
                entry.sequences.add(target)

    def forget(self, sequence: int, start: int) -> None:
        """Take entries out of a sequence, and free the cells that nobody shares."""
        for index, entry in enumerate(self._cells):
            if entry is not None and entry.position >= start:
                entry.sequences.discard(sequence)
                if not entry.sequences:
                    self._cells[index] = None

    def save(self, sequence: int) -> bytes:
        """Return a sequence's entries."""
        saved = [(entry.position, entry.token, entry.state, entry.is_exact) for entry in self.entries(sequence)]
        return pickle.dumps(saved)

    def load(self, sequence: int, data: bytes) -> int:
        """Give a sequence what `save` returned, in free cells; return its number of tokens."""
        saved: Iterable[tuple[int, int, bytes, bool]] = pickle.loads(data)
        entries = [Entry(*values, {sequence}) for values in saved]
        free = [index for index, entry in enumerate(self._cells) if entry is None]
        if len(entries) > len(free):
            raise RuntimeError("no room")
        assert not self.entries(sequence)
        for index, entry in zip(free, entries, strict=False):
            self._cells[index] = entry
        return max(entry.position for entry in entries) + 1

    def clear(self) -> None:
        """Forget every sequence."""
        self._cells = [None] * self.num_cells
