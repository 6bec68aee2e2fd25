"""Exact cycles of tokens: a model that repeats itself to the letter goes on until its limit.

It receives the token ids of a text, one by one, and says when their end has become a cycle. It does no I/O, and does
not know texts, engines or requests.

The end of a text has the period p for as long as each token is the one p places before it. It is a cycle when it has
had its period for `MIN_CYCLES` periods and for `MIN_TOKENS` tokens, which rulers and blank lines do not reach.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["MAX_PERIOD", "MAX_TOKENS", "MIN_CYCLES", "MIN_TOKENS", "Cycle"]

MIN_CYCLES = 4
MIN_TOKENS = 256
MAX_PERIOD = 128
MAX_TOKENS = max(MIN_TOKENS, MIN_CYCLES * MAX_PERIOD)
"""A cycle is found after at most so many tokens of it."""


class Cycle:
    """Follows a text's tokens. `before` are those that stand in front of what is fed; they may begin a cycle."""

    def __init__(self, before: Sequence[int] = ()) -> None:
        self._recent: deque[int] = deque(maxlen=MAX_PERIOD)
        """The newest first."""
        self._runs: dict[int, int] = {}
        """By period: how many tokens up to the newest are those one period before."""
        for id in before[-MAX_TOKENS:]:
            self.feed(id)

    def feed(self, id: int) -> bool:
        """Whether the text, with this token, ends in a cycle."""
        self._runs = {
            period: self._runs.get(period, 0) + 1 for period, earlier in enumerate(self._recent, 1) if earlier == id
        }
        self._recent.appendleft(id)
        return any(period + run >= max(MIN_TOKENS, MIN_CYCLES * period) for period, run in self._runs.items())
