"""Whose a key is: those of the configuration, and those of the store.

It receives the bytes that a caller presents and returns a `Key`. What the store says is believed for a second, so a
request seldom asks it, and a revoked key is wrong a second later everywhere. It knows no requests.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence

from legato.errors import NotAuthenticated
from legato.store import Key, Store, hash_key

__all__ = ["Access"]

_BELIEVED_S = 1.0
_MAX_KNOWN = 10_000


class Access:
    """Knows all keys. `configured` are the hashes of those that are not in the store."""

    def __init__(self, configured: Sequence[bytes], store: Store) -> None:
        self._configured = configured
        self._store = store
        self._known: dict[bytes, tuple[float, Key]] = {}
        """By hash: until when it is believed, and the key."""
        self._is_open_until = 0.0
        self._has_keys = bool(configured)

    async def is_open(self) -> bool:
        """Whether no key is asked for, because there never was one.

        Raises:
            StoreUnavailable: who knows?
        """
        if not self._has_keys and time.monotonic() > self._is_open_until:
            self._has_keys = await asyncio.to_thread(self._store.has_keys)
            self._is_open_until = time.monotonic() + _BELIEVED_S
        return not self._has_keys

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
        until, key = self._known.get(digest, (0.0, None))
        if time.monotonic() > until:
            key = await asyncio.to_thread(self._store.find_key, digest)
            self._known.pop(digest, None)
            if key is not None:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[digest] = (time.monotonic() + _BELIEVED_S, key)
        if key is None:
            raise NotAuthenticated("Incorrect API key provided")
        if key.revoked_at is not None:
            raise NotAuthenticated(f"the key {key.prefix}... was revoked")
        if key.expires_at is not None and key.expires_at <= time.time():
            raise NotAuthenticated(f"the key {key.prefix}... has expired")
        return key
