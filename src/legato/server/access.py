"""Looks up API keys: those of the configuration, and those of the store.

It receives the bytes that a caller presents and returns a `Key`. An answer of the store is cached for a second, so most
requests cause no query, and a revoked key is refused everywhere a second later. While the store does not answer, its
last answer is used for a while, without waiting. It knows no requests.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from legato.errors import NotAuthenticated, StoreUnavailable
from legato.storage.keys import Key, hash_key
from legato.storage.store import Store
from legato.system.supervisor import Supervisor

__all__ = ["Access"]

_BELIEVED_S = 1.0
"""How long an answer of the store is used without a new query."""
_BELIEVED_AWAY_S = 900.0
"""How long the last answer is used while the store does not answer."""
_PATIENCE_S = 0.25
"""How long a caller waits for a new answer if there is a last one to use instead."""
_MAX_QUERIES = 10_000

_Answer = TypeVar("_Answer")


class Access:
    """Looks up keys. `configured` are the hashes of those that stand in the configuration."""

    def __init__(self, configured: Sequence[bytes], store: Store, supervisor: Supervisor) -> None:
        self._configured = configured
        self._store = store
        self._supervisor = supervisor
        self._queries: dict[bytes, _CachedQuery[Key | None]] = {}
        """Queries for keys that exist, by hash."""
        self._has_keys = bool(configured)
        self._has_keys_query = _CachedQuery(lambda: store.has_keys(), store, supervisor)
        self._availability_query = _CachedQuery(lambda: store.has_keys(), store, supervisor)

    async def is_open(self) -> bool:
        """Whether requests need no key, because none was ever created.

        Raises:
            StoreUnavailable: the store does not answer, and has not answered for long.
        """
        if not self._has_keys:
            self._has_keys = await self._has_keys_query.answer()
        return not self._has_keys

    async def is_answered(self) -> bool:
        """Whether the store answers within `_PATIENCE_S`."""
        return await self._availability_query.is_answered()

    async def find(self, presented: bytes) -> Key:
        """Return the key that was presented.

        Raises:
            NotAuthenticated: there is none, or it is revoked or expired.
            StoreUnavailable: the store does not answer, and has not answered for long.
        """
        digest = hash_key(presented)
        matches = [
            hmac.compare_digest(digest, known) for known in self._configured
        ]  # Compares with all: time must not tell which one matched.
        if any(matches):
            return Key(f"sha256:{digest.hex()[:12]}")
        query = self._queries.get(digest)
        if query is None:
            query = _CachedQuery(lambda: self._store.find_key(digest), self._store, self._supervisor)
        key = await query.answer()
        if key is None:
            self._queries.pop(digest, None)
            raise NotAuthenticated("Incorrect API key provided")
        if digest not in self._queries:
            if len(self._queries) >= _MAX_QUERIES:
                self._queries.clear()
            self._queries[digest] = query
        if key.revoked_at is not None:
            raise NotAuthenticated(f"the key {key.prefix}... was revoked")
        if key.expires_at is not None and key.expires_at <= time.time():
            raise NotAuthenticated(f"the key {key.prefix}... has expired")
        return key


class _CachedQuery(Generic[_Answer]):
    """A query to the store and its last answer. Callers at the same time share one query."""

    def __init__(self, call: Callable[[], _Answer], store: Store, supervisor: Supervisor) -> None:
        self._call = call
        self._store = store
        self._supervisor = supervisor
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -_BELIEVED_AWAY_S
        self._answer: _Answer
        self._answered_at = -math.inf
        """When the query that gave `_answer` was sent."""
        self._error: Exception | None = None
        """Why the last query failed."""

    async def answer(self) -> _Answer:
        """Return the store's answer, or a recent one.

        Raises:
            StoreUnavailable: the store does not answer, and has not answered for long.
        """
        now = time.monotonic()
        if now - self._answered_at <= _BELIEVED_S:
            return self._answer
        waited_s = now - self._asked_at
        if now - self._answered_at > _BELIEVED_AWAY_S:
            await asyncio.wait((self._ask(),))
            if self._error is not None:
                raise self._error.with_traceback(None)
        elif self._task is None and (self._error is None or waited_s > _BELIEVED_S):
            await asyncio.wait((self._ask(),), timeout=_PATIENCE_S)
        elif self._task is not None and waited_s < _PATIENCE_S:
            await asyncio.wait((self._task,), timeout=_PATIENCE_S)
        return self._answer

    async def is_answered(self) -> bool:
        """Whether the store answers now, within `_PATIENCE_S`."""
        task = self._ask()
        await asyncio.wait((task,), timeout=_PATIENCE_S)
        return task.done() and self._error is None

    def _ask(self) -> asyncio.Task[None]:
        """Send the query, or return the one that is under way."""
        if self._task is None:
            self._asked_at = time.monotonic()
            self._task = self._supervisor.once("a question to the database", self._wait())
        return self._task

    async def _wait(self) -> None:
        try:
            self._answer = await self._store.reads.run(self._call)
            self._answered_at, self._error = self._asked_at, None
        except StoreUnavailable as error:
            self._error = error
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else StoreUnavailable("the server is shutting down")
            raise
        finally:
            self._task = None
