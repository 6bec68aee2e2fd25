"""A model that remembers what each of its cells was fed, in the place of `binding.Model`.

It computes a row of logits from the entries that a sequence really has at the positions before it, and refuses to
compute anything behind a sequence that has a hole, or two entries at one position, or entries out of order. Entries
and rows that were computed by the fast kernels, or behind such entries, are others than exact ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappop, heappush

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


@dataclass(slots=True, eq=False)
class Entry:
    """What a cell holds."""

    cell: int
    position: int
    token: int
    state: bytes
    """Names all that was computed on the way here."""
    is_exact: bool
    num_sequences: int = 1


class FakeModel(Model):
    """Cells without weights."""

    def __init__(self, *, context_length: int, max_sequences: int, fast_is_other: bool = True) -> None:
        self.vocabulary = MergeTokenizer()
        self.context_length = context_length
        self.num_cells = context_length + 2 * max_sequences
        self._rows: list[NDArray[np.float32]] = []
        self._fast_is_other = fast_is_other
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self._free = [*range(self.num_cells)]
        """A heap: the lowest comes first."""
        self._sequences: dict[int, list[Entry]] = {}

    def entries(self, sequence: int) -> list[Entry]:
        """Return what a sequence has, in the order of its cells."""
        return self._sequences.get(sequence, [])

    def sequences(self) -> set[int]:
        """Return the sequences that have anything."""
        return {*self._sequences}

    def _put(self, sequence: int, entries: list[Entry]) -> None:
        if entries:
            self._sequences[sequence] = sorted(entries, key=lambda entry: entry.cell)
        else:
            self._sequences.pop(sequence, None)

    def decode(self, batch: Batch, *, exact: bool = False) -> bool:
        """Put the batch's tokens into the lowest free cells, and compute the rows that it wants."""
        native = batch.native
        if native.n_tokens > len(self._free):
            return False
        self._rows = []
        for index in range(native.n_tokens):
            position, token = native.pos[index], native.token[index]
            before = self._sequences.setdefault(native.seq_id[index][0], [])
            last = before[-1] if before else Entry(-1, -1, -1, b"", True)
            is_text = len(before) == position == last.position + 1
            assert is_text, f"the sequence has {len(before)} entries, the last at {last.position}, before {position}"
            is_exact = last.is_exact and (exact or not self._fast_is_other)
            state = blake2b(last.state + bytes([token, is_exact]), digest_size=16).digest()
            cell = heappop(self._free)
            assert cell > last.cell, "entries are out of order"
            before.append(Entry(cell, position, token, state, is_exact))
            if native.logits[index]:
                self._rows.append(self.row([entry.token for entry in before], state))
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
        has = {entry.cell for entry in self.entries(target)}
        last = self.num_cells if end < 0 else end - 1
        wanted = [entry for entry in self.entries(source) if start <= entry.position <= last]
        shared = [entry for entry in wanted if entry.cell not in has]
        for entry in shared:
            entry.num_sequences += 1
        self._put(target, [*self.entries(target), *shared])

    def forget(self, sequence: int, start: int) -> None:
        """Take entries out of a sequence, and free the cells that nobody shares."""
        for entry in self.entries(sequence):
            if entry.position >= start:
                entry.num_sequences -= 1
                if not entry.num_sequences:
                    heappush(self._free, entry.cell)
        self._put(sequence, [entry for entry in self.entries(sequence) if entry.position < start])

    def save(self, sequence: int) -> bytes:
        """Return a sequence's entries."""
        saved = [(entry.position, entry.token, entry.state, entry.is_exact) for entry in self.entries(sequence)]
        return pickle.dumps(saved)

    def load(self, sequence: int, data: bytes) -> int:
        """Give a sequence what `save` returned, in free cells; return its number of tokens."""
        saved: list[tuple[int, int, bytes, bool]] = pickle.loads(data)
        if len(saved) > len(self._free):
            raise RuntimeError("no room")
        assert not self.entries(sequence)
        self._put(sequence, [Entry(heappop(self._free), *values) for values in saved])
        return saved[-1][0] + 1
