"""Journals (`legato.storage.journal`), on both databases that they may be in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from legato.config import StoreSettings
from legato.errors import JournalFull
from legato.storage.journal import Journal
from legato.storage.records import End, Entry, Lease, News, Record, Verdict, Written, new_id
from legato.storage.store import Store
from legato.storage.usage import UsageRow
from legato.system.clock import Clock
from legato.types import ScoredToken, Token
from tests.unit.test_store import opened, postgresql, url

__all__ = ["opened", "postgresql", "url"]

TOKENS = (Token(1, b"\xff", -0.5, (ScoredToken(2, b"x", -1.25),)), Token(3, b""))
ENTRIES = [Entry(b"data: 1\n\n", TOKENS), Entry(b"data: 2\n\n"), Entry("data: ü\n\n".encode(), TOKENS[:1])]
TAKEN = UsageRow("2026-12-01", "ann", "m", requests=1, prompt_tokens=4, cached_tokens=2, completion_tokens=2)
DONE = End("done", b"{}", Written("text"))


@pytest.fixture
def here(opened: Store) -> Journal:
    """The journals as one process sees them."""
    return Journal(opened, StoreSettings())


@pytest.fixture
def there(opened: Store) -> Journal:
    """And as another one does."""
    return Journal(opened, StoreSettings())


def record(**fields: object) -> Record:
    """A generation of Ann's."""
    made = Record(new_id(), "ann", "/v1/completions", {"model": "m"}, Written("a", "b"), "{}", int(time.time()))
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture
def begun(here: Journal) -> Record:
    """A generation that runs here, with two entries."""
    made = record()
    here.create(made)
    assert here.append({made.id: News(1, ENTRIES[:2], taken=TAKEN)}) == Verdict()
    return replace(made, num_entries=2)


def size(store: Store, id: str) -> int:
    """The bytes of everything that a journal has, as they are in the tables, and what is kept for its end."""
    asked = (
        "SELECT (SELECT length(path) + length(body) + length(before) + length(job) + coalesce(length(answer), 0) "
        "+ coalesce(length(written), 0) FROM texts WHERE generation = :id) "
        "+ (SELECT CASE state WHEN 'running' THEN 1024 ELSE 0 END FROM generations WHERE id = :id) "
        "+ (SELECT coalesce(sum(length(frame) + length(tokens)), 0) FROM entries WHERE generation = :id)"
    )
    with store.reading() as connection:
        return int(connection.execute(sa.text(asked), {"id": id}).scalar_one())


def counted(store: Store) -> tuple[int, int]:
    """The bytes of all journals, as they are counted together and one by one."""
    asked = "SELECT num_bytes, (SELECT coalesce(sum(num_bytes), 0) FROM generations) FROM room"
    with store.reading() as connection:
        together, apart = connection.execute(sa.text(asked)).one()
        return int(together), int(apart)


def usage(store: Store) -> UsageRow | None:
    """All that was taken."""
    rows = store.usage()
    return rows[0] if rows else None


def lease(journal: Journal, id: str) -> Lease:
    """Whose a generation is."""
    (found,) = (one for one in journal.leases() if one.id == id)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing and reading


def test_what_is_written_is_read(here: Journal, there: Journal, begun: Record) -> None:
    assert there.find(begun.id, "ann") == begun
    assert there.find(begun.id, "bob") is None
    assert there.read(begun.id, 0) == ("running", ENTRIES[:2])
    assert there.read(begun.id, 1) == ("running", ENTRIES[1:2])
    assert here.append({begun.id: News(3, ENTRIES[2:], DONE)}) == Verdict()
    assert there.read(begun.id, 2) == ("done", ENTRIES[2:])
    ended = replace(begun, state="done", answer=b"{}", written=Written("text"), num_entries=3)
    assert there.find(begun.id, "ann") == ended
    assert there.read("gen-none", 0) == (None, [])


def test_twice_is_as_once(opened: Store, here: Journal) -> None:
    made = record()
    news = [
        {made.id: News(1, ENTRIES[:1], taken=replace(TAKEN, completion_tokens=1))},
        {made.id: News(2, ENTRIES[1:2], taken=TAKEN)},
        {made.id: News(3, ENTRIES[2:], DONE, replace(TAKEN, completion_tokens=3))},
    ]
    for _ in range(2):
        here.create(made)
    for each in news:
        for _ in range(2):
            assert here.append(each) == Verdict()
            assert counted(opened) == (size(opened, made.id),) * 2
    assert here.read(made.id, 0) == ("done", ENTRIES)
    assert usage(opened) == replace(TAKEN, completion_tokens=3)
    here.delete(made.id, "ann")
    assert not here.delete(made.id, "ann")
    assert (counted(opened), usage(opened)) == ((0, 0), replace(TAKEN, completion_tokens=3))


def test_a_part_that_is_there_already_is_passed_over(opened: Store, here: Journal, begun: Record) -> None:
    assert here.append({begun.id: News(1, ENTRIES, taken=replace(TAKEN, completion_tokens=3))}) == Verdict()
    assert here.read(begun.id, 0) == ("running", ENTRIES)
    assert counted(opened) == (size(opened, begun.id),) * 2
    assert usage(opened) == replace(TAKEN, completion_tokens=3)


@pytest.mark.parametrize(
    "news", [News(2, [Entry(b"another"), ENTRIES[2]]), News(2, [Entry(b"data: 2\n\n", TOKENS)]), News(4, ENTRIES[2:])]
)
def test_what_does_not_follow_is_not_written(here: Journal, begun: Record, news: News) -> None:
    other = record()
    here.create(other)
    assert here.append({begun.id: news, other.id: News(1, ENTRIES)}) == Verdict(lost={begun.id})
    assert here.read(begun.id, 0) == ("running", ENTRIES[:2])
    assert here.read(other.id, 0) == ("running", ENTRIES)


def test_what_has_ended_does_not_end_otherwise(here: Journal, begun: Record) -> None:
    here.append({begun.id: News(3, [], DONE)})
    for other in (News(3, ENTRIES[2:]), News(3, [], End("failed")), News(3, [], End("refused"))):
        assert here.append({begun.id: other}) == Verdict(lost={begun.id})
    assert here.read(begun.id, 0) == ("done", ENTRIES[:2])


def test_what_is_refused_leaves_only_its_usage(opened: Store, here: Journal) -> None:
    made = record()
    here.create(made)
    assert here.append({made.id: News(1, [], End("refused"), replace(TAKEN, completion_tokens=0))}) == Verdict()
    assert here.find(made.id, "ann") is None
    assert (counted(opened), usage(opened)) == ((0, 0), replace(TAKEN, completion_tokens=0))
    assert here.append({made.id: News(1, [], End("refused"))}) == Verdict(lost={made.id}), "and is not there"


def test_what_is_deleted_is_gone(opened: Store, here: Journal, there: Journal, begun: Record) -> None:
    assert not there.delete(begun.id, "bob")
    assert there.delete(begun.id, "ann", replace(TAKEN, completion_tokens=7))
    assert not there.delete(begun.id, "ann", replace(TAKEN, completion_tokens=7))
    assert here.append({begun.id: News(3, ENTRIES[2:], taken=TAKEN)}) == Verdict(lost={begun.id})
    assert here.read(begun.id, 0) == (None, [])
    assert (counted(opened), usage(opened)) == ((0, 0), replace(TAKEN, completion_tokens=7))


# ---------------------------------------------------------------------------------------------------------------------
# Who has it


def test_one_process_has_a_generation(opened: Store, here: Journal, there: Journal, begun: Record) -> None:
    assert there.append({begun.id: News(3, ENTRIES[2:])}) == Verdict(lost={begun.id})
    heard = lease(there, begun.id)
    assert heard.owner == here.owner
    assert here.renew([begun.id]) == {begun.id: 0}
    assert there.adopt(heard) is None, "it has been heard since"
    heard = lease(there, begun.id)
    assert there.adopt(heard) == ENTRIES[:2]
    assert there.adopt(heard) is None
    assert here.adopt(heard) is None
    assert here.append({begun.id: News(3, ENTRIES[2:], DONE, TAKEN)}) == Verdict(lost={begun.id})
    assert here.renew([begun.id]) == {}
    assert there.renew([begun.id]) == {begun.id: 0}
    assert there.read(begun.id, 0) == ("running", ENTRIES[:2]), "who has lost it cannot end it"
    assert there.append({begun.id: News(3, ENTRIES[2:], DONE, replace(TAKEN, completion_tokens=3))}) == Verdict()
    assert usage(opened) == replace(TAKEN, completion_tokens=3)


def test_only_what_is_named_is_renewed(here: Journal, there: Journal, begun: Record) -> None:
    heard = lease(there, begun.id)
    assert here.renew([]) == {}
    assert lease(there, begun.id) == heard


def test_visits_elsewhere_are_told_to_the_owner(here: Journal, there: Journal, begun: Record) -> None:
    for num in (1, 2):
        there.visit(begun.id)
        assert here.renew([begun.id]) == {begun.id: num}


def test_what_is_released_has_no_beat(here: Journal, there: Journal, begun: Record) -> None:
    here.release()
    heard = lease(there, begun.id)
    assert heard.beat == 0
    assert there.adopt(heard) == ENTRIES[:2]
    assert lease(here, begun.id).beat > 0


def test_many_processes_write_at_once(opened: Store) -> None:
    """Each its own, while one reads, another sweeps and room is made: nothing waits for ever, and all is counted."""
    journals = [Journal(opened, StoreSettings(journal_bytes=20_000)) for _ in range(4)]
    ready = threading.Barrier(4)

    def work(journal: Journal) -> None:
        ready.wait()
        for _ in range(10):
            made = record()
            journal.create(made)
            for num, entry in enumerate(ENTRIES, 1):
                journal.append({made.id: News(num, [entry], taken=replace(TAKEN, completion_tokens=num))})
                journal.renew([made.id])
            journal.append({made.id: News(4, [], DONE, replace(TAKEN, completion_tokens=3))})
            journal.sweep()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, journal) for journal in journals]:
            done.result()
    together, apart = counted(opened)
    assert 0 < together == apart <= 20_000
    taken = usage(opened)
    assert taken is not None
    assert (taken.requests, taken.completion_tokens) == (40, 120)


# ---------------------------------------------------------------------------------------------------------------------
# Room


def test_what_is_over_goes_when_it_is_old(opened: Store, begun: Record) -> None:
    now = [time.time()]
    journal = Journal(opened, StoreSettings(retention_s=100), Clock(wall=lambda: now[0]))
    now[0] += 101
    journal.sweep()
    assert journal.find(begun.id, "ann") is not None, "it runs"
    assert journal.adopt(lease(journal, begun.id)) is not None
    journal.append({begun.id: News(3, [], DONE)})
    journal.sweep()
    assert journal.read(begun.id, 0) == (None, [])
    assert counted(opened) == (0, 0)


def test_what_is_old_goes_a_few_at_a_time(opened: Store) -> None:
    """Others who write get their turn meanwhile."""
    now = [time.time()]
    journal = Journal(opened, StoreSettings(retention_s=100), Clock(wall=lambda: now[0]))
    ids = [record().id for _ in range(70)]
    for id in ids:
        journal.create(record(id=id))
        journal.append({id: News(1, ENTRIES, DONE)})
    now[0] += 101
    assert [journal.sweep() for _ in range(3)] == [False, False, True]
    assert not any(journal.find(id, "ann") for id in ids)
    assert counted(opened) == (0, 0)


def test_all_bytes_are_counted(opened: Store, here: Journal) -> None:
    made = record(body={"model": "m", "prompt": "ü" * 100}, before=Written("ö", "ß"), job="{}" * 50)
    here.create(made)
    assert counted(opened) == (size(opened, made.id),) * 2
    here.append({made.id: News(1, ENTRIES)})
    assert counted(opened) == (size(opened, made.id),) * 2
    here.append({made.id: News(4, [], End("done", b"x" * 1000, Written("ä" * 100, "ö" * 100)))})
    assert counted(opened) == (size(opened, made.id),) * 2
    assert counted(opened)[0] > 100 + 100 + 1000 + 200


def test_the_oldest_that_are_over_make_room(opened: Store) -> None:
    journal = Journal(opened, StoreSettings(journal_bytes=5000))
    running, first, second, third = (record(job="x" * 500, created_at=1000 + age) for age in range(4))
    for made in (running, first, second):
        journal.create(made)
    with pytest.raises(JournalFull):
        journal.create(third)
    assert counted(opened)[0] < 5000
    for made in (first, second):
        journal.append({made.id: News(1, [Entry(b"x" * 1000)], End("done"))})
    journal.create(third)
    assert [journal.find(made.id, "ann") is not None for made in (running, first, second, third)] == [
        True,
        False,
        True,
        True,
    ]


def test_what_grows_beyond_the_room_is_told_so(opened: Store) -> None:
    journal = Journal(opened, StoreSettings(journal_bytes=6000))
    over, small, large = record(), record(), record()
    for made in (over, small, large):
        journal.create(made)
    journal.append({over.id: News(1, [Entry(b"x" * 1500)], End("done"))})
    news = {small.id: News(1, [Entry(b"x" * 100)]), large.id: News(1, [Entry(b"x" * 2500)])}
    assert journal.append(news) == Verdict()
    assert journal.find(over.id, "ann") is None, "what is over made room"
    news = {small.id: News(2, [Entry(b"x" * 100)]), large.id: News(2, [Entry(b"x" * 2500)])}
    assert journal.append(news) == Verdict(full={large.id})
    assert [journal.read(made.id, 0)[0] for made in (small, large)] == ["running", "running"]
    assert (len(journal.read(small.id, 0)[1]), len(journal.read(large.id, 0)[1])) == (2, 1)
    assert journal.append({small.id: News(3, [Entry(b"x" * 900)])}) == Verdict(), "there is just room"
    assert journal.append({large.id: News(2, [Entry(b"x" * 900)], End("failed"))}) == Verdict()
    assert journal.read(large.id, 1) == ("failed", [Entry(b"x" * 900)]), "there is always room to say so"
    together, apart = counted(opened)
    assert together == apart <= 6000


def test_what_ends_is_written_and_makes_room(opened: Store) -> None:
    journal = Journal(opened, StoreSettings(journal_bytes=4000))
    ending, going = record(created_at=1), record(created_at=2)
    for made in (ending, going):
        journal.create(made)
    news = {going.id: News(1, [Entry(b"x" * 2000)]), ending.id: News(1, [Entry(b"x" * 2500)], DONE)}
    assert journal.append(news) == Verdict()
    assert journal.find(ending.id, "ann") is None
    assert journal.append({going.id: News(2, [Entry(b"x" * 2500)], DONE)}) == Verdict()
    assert journal.find(going.id, "ann") is None, "nothing is larger than all the room"
    assert counted(opened) == (0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Older databases


@pytest.fixture
def old(url: str) -> Iterator[sa.Engine]:
    """A database of the version before leases had a beat."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    engine = sa.create_engine(url.replace("postgresql", "postgresql+psycopg"))
    config = Config()
    config.set_main_option("script_location", "legato.storage:migrations")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0002")
    yield engine
    engine.dispose()


def test_journals_of_an_older_version_go_on(old: sa.Engine, url: str) -> None:
    job = '{"prompt":{"num_tokens":4}}'
    made = (
        "INSERT INTO generations (id, key, path, body, before, job, created_at, state, owner, leased_until, seen_at, "
        "num_bytes, answer, written) VALUES (:id, 'ann', '/p', '{}', '[\"\", null]', :job, 1, :state, 'x', 0, 0, 9, "
        ":answer, :written)"
    )
    entry = "INSERT INTO entries (generation, num, frame, tokens) VALUES (:id, 1, :frame, '[[1,\"61\",null,[]]]')"
    with old.begin() as connection:
        for id, state, answer, written in (("a", "running", None, None), ("b", "done", b"{}", '["t", null]')):
            values = {"id": id, "job": job, "state": state, "answer": answer, "written": written}
            connection.execute(sa.text(made), values)
            connection.execute(sa.text(entry), {"id": id, "frame": b"data: a\n\n"})
    with closing(Store.open(url)) as store:
        journal = Journal(store, StoreSettings())
        assert counted(store) == (size(store, "a") + size(store, "b"),) * 2
        found = journal.find("b", "ann")
        assert found is not None
        assert (found.answer, found.written, found.num_entries) == (b"{}", Written("t"), 1)
        heard = lease(journal, "a")
        assert heard.beat == 0
        assert journal.adopt(heard) == [Entry(b"data: a\n\n", (Token(1, b"a"),))]
        taken = replace(TAKEN, cached_tokens=0)
        journal.append({"a": News(2, [], DONE, taken)})
        assert usage(store) == replace(taken, requests=0, prompt_tokens=0, completion_tokens=1), "the rest is counted"
