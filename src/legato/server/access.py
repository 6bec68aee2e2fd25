"""Whose a key is: those of the configuration, and those of the store.

It receives the bytes that a caller presents and returns a `Key`. What the store says is believed for a second, so a
request seldom asks it, and a revoked key is wrong a second later everywhere. While the store does not answer, what it
said last is believed for a while, and nobody waits. It knows no requests.
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
_BELIEVED_AWAY_S = 900.0
"""So long what the store said last is believed while it does not answer."""
_PATIENCE_S = 0.25
"""So long somebody waits for the store who could do with what it said last."""
_MAX_QUERIES = 10_000

_Answer = TypeVar("_Answer")


class Access:
    """Knows all keys. `configured` are the hashes of those that are not in the store."""

    def __init__(self, configured: Sequence[bytes], store: Store, supervisor: Supervisor) -> None:
        self._configured = configured
        self._store = store
        self._supervisor = supervisor
        self._queries: dict[bytes, _CachedQuery[Key | None]] = {}
        """The questions for keys that there are, by hash."""
        self._has_keys = bool(configured)
        self._has_keys_query = _CachedQuery(lambda: store.has_keys(), store, supervisor)
        self._availability_query = _CachedQuery(lambda: store.has_keys(), store, supervisor)

    async def is_open(self) -> bool:
        """Whether no key is asked for, because there never was one.

        Raises:
            StoreUnavailable: who knows?
        """
        if not self._has_keys:
            self._has_keys = await self._has_keys_query.answer()
        return not self._has_keys

    async def is_answered(self) -> bool:
        """Whether the store answers, and soon."""
        return await self._availability_query.is_answered()

    async def find(self, presented: bytes) -> Key:
        """Return the key that was presented.

        Raises:
            NotAuthenticated: there is none, or it is revoked or expired.
            StoreUnavailable: who knows?
        """
        digest = hash_key(presented)
        matches = [hmac.compare_digest(digest, known) for known in self._configured]  # All of them: no early end.
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
    """A question to the store, and what it said last. Asked once at a time, whoever wants to know."""

    def __init__(self, call: Callable[[], _Answer], store: Store, supervisor: Supervisor) -> None:
        self._call = call
        self._store = store
        self._supervisor = supervisor
        self._task: asyncio.Task[None] | None = None
        self._asked_at = -_BELIEVED_AWAY_S
        self._answer: _Answer
        self._answered_at = -math.inf
        """When what is known was asked for."""
        self._error: Exception | None = None
        """Why there was no answer the last time."""

    async def answer(self) -> _Answer:
        """Return what the store says now, or said not long ago.

        Raises:
            StoreUnavailable: it does not answer, and did not for long.
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
        """Whether the store answers now, and soon."""
        task = self._ask()
        await asyncio.wait((task,), timeout=_PATIENCE_S)
        return task.done() and self._error is None

    def _ask(self) -> asyncio.Task[None]:
        """Ask, or join those who have asked and wait."""
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
