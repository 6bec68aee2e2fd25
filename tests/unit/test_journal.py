"""Journals (`legato.journal`), on both databases that they may be in."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from legato import journal as module
from legato.config import StoreSettings
from legato.errors import JournalFull
from legato.journal import Entry, Journal, Record, Written, new_id
from legato.store import Store
from legato.types import ScoredToken, Token
from tests.unit.test_store import opened, postgresql, url

__all__ = ["opened", "postgresql", "url"]

TOKENS = (Token(1, b"\xff", -0.5, (ScoredToken(2, b"x", -1.25),)), Token(3, b""))
ENTRIES = [Entry(b"data: 1\n\n", TOKENS), Entry(b"data: 2\n\n", ()), Entry("data: ü\n\n".encode(), TOKENS[:1])]


@pytest.fixture
def here(opened: Store) -> Journal:
    """The journals as one process sees them."""
    return Journal(opened, StoreSettings())


@pytest.fixture
def there(opened: Store) -> Journal:
    """And as another one does."""
    return Journal(opened, StoreSettings())


@pytest.fixture
def begun(here: Journal) -> Record:
    """A generation that runs here, with two entries."""
    record = Record(new_id(), "ann", "/v1/completions", {"model": "m"}, Written("a", "b"), "{}", int(time.time()))
    here.create(record)
    assert here.append({record.id: (1, ENTRIES[:2])}) == set()
    return record


def test_what_is_written_is_read(here: Journal, there: Journal, begun: Record) -> None:
    assert there.find(begun.id, "ann") == begun
    assert there.find(begun.id, "bob") is None
    assert there.entries(begun.id, 0) == ENTRIES[:2]
    assert there.entries(begun.id, 1) == ENTRIES[1:2]
    assert here.append({begun.id: (3, ENTRIES[2:])}) == set()
    assert (there.num_entries(begun.id), there.entries(begun.id, 2)) == (3, ENTRIES[2:])
    here.finish(begun.id, "done", b"{}", Written("text"))
    assert there.find(begun.id, "ann") == replace(begun, state="done", answer=b"{}", written=Written("text"))


def test_one_process_has_a_generation(
    here: Journal, there: Journal, begun: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert there.orphans() == []
    assert not there.adopt(begun.id)
    assert there.append({begun.id: (3, ENTRIES[2:])}) == {begun.id}
    late = time.time() + module.LEASE_S + 1
    monkeypatch.setattr(time, "time", lambda: late)
    assert [record.id for record in there.orphans()] == [begun.id]
    assert there.adopt(begun.id)
    assert not here.adopt(begun.id)
    assert here.append({begun.id: (3, ENTRIES[2:])}) == {begun.id}
    here.finish(begun.id, "failed")
    assert here.renew([]) == {}
    assert [*there.renew([])] == [begun.id]
    found = there.find(begun.id, "ann")
    assert found is not None
    assert found.state == "running", "who has lost it cannot end it"


def test_what_is_renewed_stays(here: Journal, there: Journal, begun: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.time()
    for seconds in (3, 6, 9):
        now = start + seconds
        monkeypatch.setattr(time, "time", lambda now=now: now)
        seen = here.renew([begun.id] if seconds == 6 else [])
        assert seen[begun.id] == pytest.approx(start + 6 * (seconds >= 6), abs=1)
        assert there.orphans() == []
    there.touch(begun.id)
    assert here.renew([])[begun.id] == pytest.approx(now, abs=1)


def test_what_is_released_is_adopted_at_once(here: Journal, there: Journal, begun: Record) -> None:
    here.release()
    assert there.adopt(begun.id)


def test_what_is_deleted_is_gone(here: Journal, there: Journal, begun: Record) -> None:
    assert not there.delete(begun.id, "bob")
    assert there.delete(begun.id, "ann")
    assert not there.delete(begun.id, "ann")
    assert here.entries(begun.id, 0) == []
    assert here.append({begun.id: (3, ENTRIES[2:])}) == {begun.id}
    assert here.entries(begun.id, 0) == []


def test_what_is_over_goes_when_it_is_old(opened: Store, begun: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(opened, StoreSettings(retention_s=100))
    now = time.time() + 101
    monkeypatch.setattr(time, "time", lambda: now)
    journal.sweep()
    assert journal.find(begun.id, "ann") is not None, "it runs"
    assert journal.adopt(begun.id)
    journal.finish(begun.id, "done", b"", Written(""))
    journal.sweep()
    assert journal.find(begun.id, "ann") is None
    assert journal.entries(begun.id, 0) == []


def test_the_oldest_that_are_over_make_room(opened: Store, begun: Record) -> None:
    journal = Journal(opened, StoreSettings(journal_bytes=1000))
    first, second, third = (
        replace(begun, id=new_id(), job="x" * 400, created_at=begun.created_at - 10 + age) for age in range(3)
    )
    for record in (first, second):
        journal.create(record)
    with pytest.raises(JournalFull):
        journal.create(third)
    journal.finish(first.id, "done")
    journal.create(third)
    assert [journal.find(record.id, "ann") is not None for record in (begun, first, second, third)] == [
        True,
        False,
        True,
        True,
    ]
