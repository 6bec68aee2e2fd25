"""Rows of logits that are known, by the tokens they follow, and how the tokens of two sequences are compared.

A text is often continued where another answer ended, or once more: its first choices then need no decode. It receives
and returns values and runs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowCache", "Tokens", "shared_head"]

Tokens = NDArray[np.int32]


def shared_head(left: Tokens, right: Tokens) -> int:
    """Return how many leading tokens two arrays have in common."""
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


class RowCache:
    """Rows for those who share entries (`salt`), the least recently used given up first.

    An exact row was computed by the kernels that round alike for every shape, behind entries that were too; another
    one may differ from it in the last bits, so it is not given to who asks for an exact one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._num_bytes = 0

    def put(
        self, tokens: Sequence[int], row: NDArray[np.float32], salt: str = "", *, is_exact: bool
    ) -> NDArray[np.float32]:
        """Keep a copy of the row that follows the tokens, and return it."""
        key = _key(tokens, salt, is_exact)
        if key in self._rows:
            self._num_bytes -= row.nbytes
        kept = self._rows[key] = row.copy()
        self._rows.move_to_end(key)
        self._num_bytes += row.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return kept

    def get(self, tokens: Sequence[int], salt: str = "", *, is_exact: bool) -> NDArray[np.float32] | None:
        """Return the row that follows the tokens, if it is known; unless it has to be exact, an inexact one first: it
        is what would be computed again. It is not to be changed.
        """
        for kind in (True,) if is_exact else (False, True):
            key = _key(tokens, salt, kind)
            row = self._rows.get(key)
            if row is not None:
                self._rows.move_to_end(key)
                return row
        return None


def _key(tokens: Sequence[int], salt: str, is_exact: bool) -> bytes:
    owner = f"{salt}{'' if is_exact else ' fast'}\0".encode()
    return blake2b(owner + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()
