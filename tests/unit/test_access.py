"""Whose a key is, while the store answers, is slow, or is away (`legato.server.access`)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from legato.errors import NotAuthenticated, StoreUnavailable
from legato.server import access
from legato.server.access import Access
from legato.storage.keys import Key
from legato.storage.store import Store
from legato.system.supervisor import Supervisor, together
from tests.conftest import empty_store


class Slow:
    """Stands before a store; its methods wait until it may answer, or fail."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.may = threading.Event()
        self.may.set()
        self.is_away = False
        self.num_asked = 0
        self.reads = store.reads

    def has_keys(self) -> bool:
        """As the store does."""
        self._wait()
        return self._store.has_keys()

    def find_key(self, digest: bytes) -> Key | None:
        """As the store does."""
        self._wait()
        return self._store.find_key(digest)

    def _wait(self) -> None:
        self.num_asked += 1
        self.may.wait(20)
        if self.is_away:
            raise StoreUnavailable("away")


def run(test: Callable[[Access, Slow, bytes], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a store that has one key."""

    async def main(store: Store) -> None:
        supervisor = Supervisor()
        slow = Slow(store)
        key = store.create_key(Key("ann")).encode()
        await asyncio.wait_for(test(Access((), slow, supervisor), slow, key), 30)  # type: ignore[arg-type]
        slow.may.set()
        await supervisor.aclose()

    with empty_store() as store:
        asyncio.run(main(store))


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    """Return how long it takes."""
    begun = time.monotonic()
    await work
    return time.monotonic() - begun


def test_a_key_is_asked_for_once_a_second_whoever_wants_to_know() -> None:
    async def test(one: Access, slow: Slow, key: bytes) -> None:
        assert (await one.find(key)).name == "ann"
        assert slow.num_asked == 1
        await together(*(one.find(key) for _ in range(20)))
        assert slow.num_asked == 1
        await asyncio.sleep(access._BELIEVED_S + 0.1)
        await together(*(one.find(key) for _ in range(20)))
        assert slow.num_asked == 2

    run(test)


@pytest.mark.alone
def test_nobody_waits_for_a_slow_store_who_can_do_without() -> None:
    async def test(one: Access, slow: Slow, key: bytes) -> None:
        assert not await one.is_open()
        await one.find(key)
        assert await one.is_answered()
        await asyncio.sleep(access._BELIEVED_S + 0.1)
        slow.may.clear()
        assert await seconds(one.find(key)) < access._PATIENCE_S + 0.2  # The first waits a little,
        assert await seconds(one.find(key)) < 0.1  # and the next not at all.
        assert await seconds(one.is_answered()) < access._PATIENCE_S + 0.2
        assert not await one.is_answered()
        slow._store.revoke_key("ann")
        slow.may.set()
        await asyncio.sleep(access._BELIEVED_S + 0.1)
        with pytest.raises(NotAuthenticated, match="was revoked"):
            await one.find(key)
        assert await one.is_answered()

    run(test)


def test_a_store_that_is_away_is_asked_once_a_second() -> None:
    async def test(one: Access, slow: Slow, key: bytes) -> None:
        await one.find(key)
        await asyncio.sleep(access._BELIEVED_S + 0.1)
        slow.is_away = True
        before = slow.num_asked
        for _ in range(50):
            assert (await one.find(key)).name == "ann"
        assert slow.num_asked == before + 1
        with pytest.raises(StoreUnavailable):
            await one.find(b"lg-unknown")
        assert not await one.is_answered()

    run(test)


def test_what_was_said_long_ago_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_BELIEVED_AWAY_S", 1.5)

    async def test(one: Access, slow: Slow, key: bytes) -> None:
        await one.find(key)
        slow.is_away = True
        await asyncio.sleep(1.2)
        assert (await one.find(key)).name == "ann"
        await asyncio.sleep(0.5)
        with pytest.raises(StoreUnavailable):
            await one.find(key)
        slow.is_away = False
        assert (await one.find(key)).name == "ann"

    run(test)
