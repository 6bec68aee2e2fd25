"""Several servers of one model: which one gets a request, and which are left alone for a while.

It receives the tokens of prompts and how requests went; it returns addresses. It makes no requests.

A prompt goes to the server that has read most of it: every 16 tokens the hash of all up to there is remembered with the
server that got them. A server that is busy with many more requests than another is passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Replicas"]

_BLOCK = 16
_MAX_BLOCKS = 1 << 17
_MAX_LEAD = 4
"""How many more requests than the least busy server a server may have and still get those whose head it knows."""
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class _Replica:
    num_running: int = 0
    pause_s: float = 0.0
    """How long it was left alone after its last failure; 0: it works."""
    resumes_at: float = 0.0


class Replicas:
    """Servers of the same model, by address. `clock` returns seconds."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        self._replicas = {url: _Replica() for url in urls}
        self._clock = clock
        self._known: OrderedDict[int, str] = OrderedDict()
        """By the hash of a head: who has read it last."""

    def order(self, ids: Sequence[int]) -> list[str]:
        """Return all addresses, the best for a prompt first, those that have just failed last."""
        knows = {url: num for num, url in enumerate(self._heads_known(ids), 1)}
        least = min(replica.num_running for replica in self._replicas.values())

        def rank(url: str) -> tuple[bool, int, int]:
            replica = self._replicas[url]
            is_busy = replica.num_running - least > _MAX_LEAD
            return replica.resumes_at > self._clock(), 0 if is_busy else -knows.get(url, 0), replica.num_running

        return sorted(self._replicas, key=rank)

    @contextmanager
    def running(self, url: str, ids: Sequence[int]) -> Iterator[None]:
        """Count a request that a server has, and remember what it reads."""
        for head in _heads(ids):
            self._known[head] = url
            self._known.move_to_end(head)
        while len(self._known) > _MAX_BLOCKS:
            self._known.popitem(last=False)
        self._replicas[url].num_running += 1
        try:
            yield
        finally:
            self._replicas[url].num_running -= 1

    def failed(self, url: str) -> None:
        """Leave a server alone for a while, twice as long each time."""
        replica = self._replicas[url]
        replica.pause_s = min(_MAX_PAUSE_S, 2 * replica.pause_s or _FIRST_PAUSE_S)
        replica.resumes_at = self._clock() + replica.pause_s

    def worked(self, url: str) -> None:
        """Take a server for healthy again."""
        replica = self._replicas[url]
        replica.pause_s = replica.resumes_at = 0.0

    @property
    def num_failed(self) -> int:
        """How many are left alone now."""
        return sum(replica.resumes_at > self._clock() for replica in self._replicas.values())

    def _heads_known(self, ids: Sequence[int]) -> Iterator[str]:
        """Yield who has read the prompt's heads, the shortest first, as long as each was read."""
        for head in _heads(ids):
            if (url := self._known.get(head)) is None:
                return
            yield url


def _heads(ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash for every 16 tokens, of all tokens up to there."""
    head = 0
    for start in range(0, len(ids) - _BLOCK + 1, _BLOCK):
        head = hash((head, *ids[start : start + _BLOCK]))
        yield head
