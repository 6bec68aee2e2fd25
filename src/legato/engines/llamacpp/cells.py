"""The cells of the KV cache, and the one account of what they hold.

It receives token ids to feed and returns rows of logits; it shares, gives up, spills and reads back what sequences
have. Who runs Jobs asks it what a `Slot` holds, and keeps no account of that: what was once meant to be fed is not what
is there, and a copy of the wrong cells is another text.

A cell is known by its number, in the order in which cells were written. What two slots have in common is a matter of
numbers where cells are moved, so nobody's entries are ever replaced by others that were computed for the same tokens;
it is a matter of tokens where a slot takes its head from another one.

Cells are used as a log. Attention adds up in the order of the cells, so that order must not depend on who else came and
went, and llama.cpp fills the lowest free cell first. So what is given up is first buried (moved to a sequence of its
own); when the log has grown, or no room is left, what is alive is written again from the first cell on, bit for bit
and in order (`_compact`). Attention looks at every cell below the highest that is used, so a short log is also a fast
one: a thousand cells cost about 2 % of a decode step.

Entries that a prompt's chunk got from the fast kernels differ in the last bits from exact ones, and so does all that
is computed behind them. A slot knows how much of its beginning is exact, and who has to be exact takes no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from legato.engines.llamacpp.binding import Batch, Model
from legato.engines.llamacpp.cache import Tokens, shared_head
from legato.engines.llamacpp.spill import Spill

__all__ = ["Cells", "Feed", "Slot"]

_WORTH_LOADING = 64
"""A spilled sequence is kept, and read back, for at least so many tokens."""
_MAX_LOG = 1024
"""Tokens decoded from one compaction to the next."""
_MAX_RETAINED = 4096
"""Tokens of retained slots that a compaction keeps, shared cells counted once; the most recently used stay."""


def _no_tokens() -> Tokens:
    return np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence of the model, and what its cells hold: `Cells` alone changes it."""

    id: int
    salt: str
    """Who may share its entries."""
    length: int = 0
    """How many tokens it has."""
    num_exact: int = 0
    """How many at its beginning are exact."""
    is_open: bool = True
    """Whether it is somebody's."""
    _ids: Tokens = field(default_factory=_no_tokens)
    _numbers: Tokens = field(default_factory=_no_tokens)

    @property
    def ids(self) -> Tokens:
        """Its tokens, by position."""
        return self._ids[: self.length]

    @property
    def numbers(self) -> Tokens:
        """The numbers of its cells, by position."""
        return self._numbers[: self.length]

    @property
    def is_exact(self) -> bool:
        """Whether all of it is exact."""
        return self.num_exact == self.length

    def extend(self, ids: Sequence[int] | Tokens, numbers: Tokens, *, exact: bool) -> None:
        """Take note of further tokens and their cells."""
        end = self.length + len(ids)
        if end > self._ids.size:
            size = max(64, 2 * end)
            self._ids, self._numbers = (np.resize(old, size) for old in (self._ids, self._numbers))
        self._ids[self.length : end] = ids
        self._numbers[self.length : end] = numbers
        if exact and self.is_exact:
            self.num_exact = end
        self.length = end

    def take(self, other: Slot, length: int) -> None:
        """Take note of another's head."""
        self._ids, self._numbers = other.ids[:length].copy(), other.numbers[:length].copy()
        self.length, self.num_exact = length, min(length, other.num_exact)

    def cut(self, length: int) -> None:
        """Take note that what follows the first `length` tokens is gone."""
        self.length, self.num_exact = length, min(length, self.num_exact)

    def renumber(self, source: Slot | None, shared: int, first: int) -> None:
        """Take note of new cells: the first `shared` are now those of `source`, the others are numbered on."""
        numbers = np.arange(first - shared, first - shared + self.length, dtype=np.int32)
        if source is not None:
            numbers[:shared] = source.numbers[:shared]
        self._ids, self._numbers = self.ids.copy(), numbers


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that a slot gets in one call."""

    slot: Slot
    ids: Sequence[int]
    num_rows: int
    """So many of the last ones have their rows of logits returned."""


class Cells:
    """The KV cache of one model, whose sequences nobody else touches."""

    def __init__(self, model: Model, *, max_batch: int, max_sequences: int, spill: Spill) -> None:
        self._model = model
        self._batch = Batch(max_batch)
        self._spare, self._grave = max_sequences - 1, max_sequences - 2
        self._free = list(range(self._grave - 1, -1, -1))
        self._open: dict[int, Slot] = {}
        """Slots in use, by id."""
        self._retained: OrderedDict[int, Slot] = OrderedDict()
        """Slots that nobody uses, kept for who begins alike; the most recently used last."""
        self._num_written = 0
        """Cells in use, alive and buried: the number of the next one."""
        self._num_logged = 0
        """Tokens written since the last compaction."""
        self._spill = spill
        self.max_feed = max_batch
        """Tokens of one call."""

    # -- slots --------------------------------------------------------------------------------------------------------

    def open(self, salt: str) -> Slot | None:
        """Return an empty slot, if need be that of the least recently used retained one; None: all are in use, but for
        one that is left to `fork`: whoever waits for a branch gets it when the others have ended.
        """
        return self._open_one(salt) if len(self._free) + len(self._retained) > 1 else None

    def _open_one(self, salt: str) -> Slot | None:
        if not self._free:
            if not self._retained:
                return None
            oldest = next(iter(self._retained.values()))
            self._save(oldest)
            self.close(oldest)
        slot = Slot(self._free.pop(), salt)
        self._open[slot.id] = slot
        return slot

    def close(self, slot: Slot) -> None:
        """Give up a slot and what it holds."""
        self.cut(slot, 0)
        self._open.pop(slot.id, None)
        self._retained.pop(slot.id, None)
        self._free.append(slot.id)
        slot.is_open = False

    def retain(self, slot: Slot) -> None:
        """Keep what a slot holds, as the most recently used, unless another one has all of it; close it for its user.

        Those that hold nothing else are given up for it.
        """
        for other in [*self._retained.values()]:
            if other.salt == slot.salt and (length := min(other.length, slot.length)) == shared_head(
                other.ids, slot.ids
            ):
                if length == slot.length and min(other.num_exact, length) >= slot.num_exact:
                    self._retained.move_to_end(other.id)
                    self.close(slot)
                    return
                if length == other.length and min(slot.num_exact, length) >= other.num_exact:
                    self.close(other)
        if not slot.length:
            self.close(slot)
            return
        del self._open[slot.id]
        self._retained[slot.id] = slot
        slot.is_open = False

    def suspend(self, slot: Slot) -> None:
        """Close a slot whose user goes on later; what it holds is spilled, if that is worth it."""
        self._save(slot)
        self.close(slot)
        self._compact(0)

    def fork(self, slot: Slot, length: int) -> Slot | None:
        """Return a new slot with the first `length` tokens of another; None: no slot is free."""
        branch = self._open_one(slot.salt)
        if branch is not None and length:
            self._share(slot, branch, length)
        return branch

    def cut(self, slot: Slot, length: int) -> None:
        """Give up what follows the first `length` tokens."""
        if length < slot.length:
            self._model.copy(slot.id, self._grave, length, -1)
            self._model.forget(slot.id, length)
            slot.cut(length)

    def cut_to(self, slot: Slot, tokens: Sequence[int], num_same: int) -> None:
        """Give up what a slot holds that is not the beginning of `tokens`; up to `num_same` they are known to agree."""
        start = min(num_same, slot.length)
        self.cut(slot, start + shared_head(slot.ids[start:], np.asarray(tokens[start:], np.int32)))

    def _share(self, source: Slot, slot: Slot, length: int) -> None:
        self._model.copy(source.id, slot.id, 0, length)
        slot.take(source, length)

    # -- heads --------------------------------------------------------------------------------------------------------

    def longest(self, wanted: Tokens, salt: str, *, exact: bool) -> int:
        """Return how many tokens of `wanted`, from its beginning, some slot holds for who has this salt.

        `exact`: only those that are exact.
        """
        return self._longest(wanted, salt, exact)[1]

    def take_head(self, slot: Slot, wanted: Tokens, *, exact: bool) -> int:
        """Give an empty slot as much of the beginning of `wanted` as there is; return how many tokens that is.

        `exact`: only what is exact.
        """
        _, length = self._longest(wanted, slot.salt, exact)
        if not self._load(slot, wanted, length + _WORTH_LOADING, exact):
            source, length = self._longest(wanted, slot.salt, exact)
            if source is not None:
                self._share(source, slot, length)
        return slot.length

    def _longest(self, wanted: Tokens, salt: str, exact: bool) -> tuple[Slot | None, int]:
        source, length = None, 0
        for slot in (*reversed(self._retained.values()), *self._open.values()):
            most = slot.num_exact if exact else slot.length
            if slot.salt != salt or most <= length or wanted.size <= length or slot.ids[length] != wanted[length]:
                continue
            if (shared := min(most, shared_head(slot.ids, wanted))) > length:
                source, length = slot, shared
        if source is not None and not source.is_open:
            self._retained.move_to_end(source.id)
        return source, length

    # -- calls --------------------------------------------------------------------------------------------------------

    def decode(self, feeds: Sequence[Feed], *, exact: bool) -> list[NDArray[np.float32]] | None:
        """Compute one call; return the wanted rows of each feed, valid until the next call.

        None: there is no room among the cells, and nothing was changed (`make_room`).

        Args:
            feeds: at most `max_feed` tokens in all, of different slots.
            exact: compute each row with the same bits whatever else the call holds.

        Raises:
            RuntimeError: llama.cpp failed.
        """
        self._batch.clear()
        firsts = [self._batch.add(feed.slot.id, feed.slot.length, feed.ids, num_wanted=feed.num_rows) for feed in feeds]
        num = self._batch.num_tokens
        if not self._model.decode(self._batch, exact=exact):
            return None
        for feed in feeds:
            feed.slot.extend(feed.ids, self._number(len(feed.ids)), exact=exact)
        self._num_logged += num
        rows = self._model.rows(sum(feed.num_rows for feed in feeds))
        return [rows[first : first + feed.num_rows] for first, feed in zip(firsts, feeds, strict=True)]

    def _number(self, num: int) -> Tokens:
        """Return the numbers of the next cells."""
        first = self._num_written
        self._num_written += num
        return np.arange(first, self._num_written, dtype=np.int32)

    # -- room ---------------------------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Shorten the log if it has grown."""
        if self._num_logged > _MAX_LOG:
            self._compact(_MAX_RETAINED)

    def make_room(self) -> bool:
        """Free cells: those that are buried, and the older half of what is retained. False: there are none."""
        num_open = _num_cells(self._open.values())
        num_alive = _num_cells((*self._open.values(), *self._retained.values()))
        num_dead = self._num_written - num_alive
        self._compact((num_alive - num_open) // 2)  # What it shares with open slots would free nothing.
        return num_dead > 0 or num_alive > num_open

    def _compact(self, max_retained: int) -> None:
        """Write all that is alive again from the first cell on, and retain about `max_retained` tokens."""
        kept: list[tuple[Slot, Slot | None, int]] = []
        room = max_retained
        for slot in (*self._open.values(), *reversed([*self._retained.values()])):
            source, shared = None, 0
            for other, _, _ in kept:
                if (length := shared_head(other.numbers, slot.numbers)) > shared:
                    source, shared = other, length
            if not slot.is_open:
                room -= slot.length - shared
                if room < 0:
                    self._save(slot)
                    self.close(slot)
                    continue
            kept.append((slot, source, shared))
        tails = [self._tail(slot, shared) for slot, _, shared in kept]
        self._model.clear()
        self._num_written = self._num_logged = 0
        for (slot, source, shared), tail in zip(kept, tails, strict=True):
            if source is not None:
                self._model.copy(source.id, slot.id, 0, shared)
            if tail:
                self._model.load(self._spare, tail)
                self._model.copy(self._spare, slot.id, 0, -1)
                self._model.forget(self._spare, 0)
            slot.renumber(source, shared, self._num_written)
            self._num_written += slot.length - shared

    def _tail(self, slot: Slot, start: int) -> bytes:
        """Return the entries of a slot from a position on."""
        if start == slot.length:
            return b""
        self._model.copy(slot.id, self._spare, start, -1)
        data = self._model.save(self._spare)
        self._model.forget(self._spare, 0)
        return data

    # -- what has left the cells --------------------------------------------------------------------------------------

    def spill(self) -> None:
        """Spill what is retained, if that outlives this process."""
        if self._spill.is_kept:
            for slot in self._retained.values():
                self._save(slot)

    def _save(self, slot: Slot) -> None:
        """Keep a copy of what a slot holds outside the cells, if reading it back would be worth it."""
        if self._spill.max_bytes and slot.length >= _WORTH_LOADING:
            self._spill.put(slot.ids.copy(), _namespace(slot.salt, slot.is_exact), self._model.save(slot.id))

    def _load(self, slot: Slot, wanted: Tokens, least: int, exact: bool) -> bool:
        """Read a spilled sequence into an empty slot, if one shares at least `least` tokens with `wanted`."""
        kinds = (True,) if exact else (True, False)
        found = [(*self._spill.longest(wanted, _namespace(slot.salt, kind)), kind) for kind in kinds]
        name, length, is_exact = max(found, key=lambda entry: entry[1])
        state = self._spill.get(name) if length >= least else None
        if state is None:
            return False
        num_open = sum(other.length for other in self._open.values())
        for room in (None, self._model.num_cells - num_open - wanted.size - _MAX_LOG, 0):
            if room is not None:
                self._compact(max(0, min(room, _MAX_RETAINED)))
            try:
                num = self._model.load(slot.id, state)
            except RuntimeError:
                self._model.forget(slot.id, 0)
                continue
            # All that was read takes cells; of it, only what is known to be wanted is told.
            numbers = self._number(num)
            self._num_logged += num
            self._model.copy(slot.id, self._grave, length, -1)
            self._model.forget(slot.id, length)
            slot.extend(wanted[:length], numbers[:length], exact=is_exact)
            return True
        return False

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def num_retained(self) -> int:
        """How many slots are kept that nobody uses."""
        return len(self._retained)

    @property
    def num_retained_tokens(self) -> int:
        """How many cells they take, shared ones counted once."""
        return _num_cells(self._retained.values())

    @property
    def num_spilled(self) -> int:
        """How many sequences are kept outside the cells."""
        return len(self._spill)


def _num_cells(slots: Iterable[Slot]) -> int:
    """Return how many cells some slots take, shared ones counted once."""
    numbers = [slot.numbers for slot in slots]
    return int(np.unique(np.concatenate(numbers)).size) if numbers else 0


def _namespace(salt: str, is_exact: bool) -> str:
    """Return what spilled sequences are kept under."""
    return f"{salt} {'exact' if is_exact else 'fast'}"
