"""The store (`legato.storage.store`), on both databases that it may be."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from legato.config import Settings, StoreSettings
from legato.errors import (
    BudgetSpent,
    ConfigError,
    InvalidField,
    KeyExists,
    KeyNotFound,
    LegatoError,
    RateLimited,
    StoreUnavailable,
)
from legato.storage import journal, tables
from legato.storage.database import store_url
from legato.storage.keys import Key, hash_key
from legato.storage.store import Store
from legato.storage.usage import Batch, UsageRow
from tests.conftest import children
from tests.postgresql import serve_postgresql

NOW = 1_796_006_179.5
"""2026-11-30 02:36:19.5, a day before the end of its month."""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A PostgreSQL server's URL."""
    with serve_postgresql() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/legato.db"
    found: str = request.getfixturevalue("postgresql")
    engine = sa.create_engine(found.replace("postgresql", "postgresql+psycopg"))
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE; CREATE SCHEMA public"))
    engine.dispose()
    return found


@pytest.fixture
def opened(url: str) -> Iterator[Store]:
    """A new store."""
    with closing(Store.open(url)) as store:
        yield store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""

    def set_time(now: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now)

    set_time(NOW)
    return set_time


# ---------------------------------------------------------------------------------------------------------------------
# The database


def test_the_migrations_make_the_tables_that_the_code_has(opened: Store) -> None:
    with opened._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
    assert {*journal.__all__}, "its tables are among them"


def test_several_processes_may_open_a_new_database_at_once(url: str) -> None:
    ready = threading.Barrier(4)

    def start(_: int) -> bool:
        ready.wait()
        with closing(Store.open(url)) as store:
            return store.has_keys()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(start, range(4))] == [False] * 4


def test_the_database_of_a_newer_version_is_left_alone(url: str) -> None:
    with closing(Store.open(url)) as opened, opened._engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="belongs to a newer version of Legato"):
            Store.open(url)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("mysql://x/y", "`store.url` must be as `postgresql://"),
        ("nothing", "`store.url` must be as `postgresql://"),
        ("sqlite:////proc/nowhere/legato.db", "the database `sqlite:////proc/nowhere/legato.db` cannot be used: "),
        ("postgresql://u:secret@127.0.0.1:1/x", r"the database `postgresql\+psycopg://u:\*\*\*@127.0.0.1:1/x` cannot"),
    ],
)
def test_a_database_that_is_not_there(wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Store.open(wrong)
    assert "secret" not in caught.value.message


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "legato.db"
    file.write_bytes(b"not a database at all, but something else of some length" * 20)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="file is not a database"):
        Store.open(f"sqlite:///{file}")
    assert file.read_bytes() == before


def test_where_the_database_is(tmp_path: Path) -> None:
    assert store_url(Settings(data_dir=tmp_path)) == f"sqlite:///{tmp_path}/legato.db"
    assert store_url(Settings(store=StoreSettings(url="postgresql://x/y"))) == "postgresql://x/y"


def test_a_database_that_goes_away_is_said_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And once; what it says itself is for those who run the server."""
    with closing(Store.open(f"sqlite:///{tmp_path}/legato.db")) as store:
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as caught, store.reading() as connection:
                connection.execute(sa.text("SELECT 1 FROM somewhere"))
            assert "somewhere" not in caught.value.message
            assert caught.value.reason == "no such table: somewhere"
        assert store.keys() == []
    assert caplog.messages == [
        "the database cannot be read: no such table: somewhere",
        "the database can be read again",
    ]


@pytest.mark.alone
def test_who_reads_does_not_wait_for_who_writes(tmp_path: Path) -> None:
    file = tmp_path / "legato.db"
    with closing(Store.open(f"sqlite:///{file}")) as store, closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN IMMEDIATE")
        begun = time.monotonic()
        assert not store.has_keys()
        assert time.monotonic() - begun < 0.5
        with pytest.raises(StoreUnavailable):
            store.create_key(Key("ann"))
        assert 1 < time.monotonic() - begun < 4
        other.rollback()
        store.create_key(Key("ann"))


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_database_that_falls_silent_is_given_up(url: str) -> None:
    """Its processes are stopped: connections are accepted, and nobody answers."""
    with closing(Store.open(url)) as store:
        store.keys()
        folder = Path(url.partition("?host=")[2])
        main = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        pids = [main, *children(main)]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            with pytest.raises(StoreUnavailable):  # Over the connection that there is,
                store.keys()
            with pytest.raises(StoreUnavailable):  # and over a new one.
                store.keys()
            assert time.monotonic() - begun < 12
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        store.keys()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_statement_that_takes_too_long_is_given_up(url: str) -> None:
    with closing(Store.open(url)) as store:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught, store.reading() as connection:
            connection.execute(sa.text("SELECT pg_sleep(60)"))
        assert time.monotonic() - begun < 5
        assert caught.value.reason == "canceling statement due to statement timeout"
        store.keys()


def test_an_address_where_nobody_answers_is_no_place_for_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="timeout"):
            Store.open(f"postgresql://legato@127.0.0.1:{silent.getsockname()[1]}/x")
        assert time.monotonic() - begun < 5


# ---------------------------------------------------------------------------------------------------------------------
# Keys


def test_a_key_is_kept_as_a_hash(opened: Store, clock: Callable[[float], None]) -> None:
    asked = Key("ann", models=("m", "n"), tokens_per_month=5, control_tokens=False, admin=True, expires_at=int(NOW) + 9)
    secret = opened.create_key(asked)
    key = opened.find_key(hash_key(secret.encode()))
    assert key is not None
    assert (key.name, key.models, key.tokens_per_month, key.expires_at) == ("ann", ("m", "n"), 5, int(NOW) + 9)
    assert (key.control_tokens, key.admin, key.created_at, key.revoked_at) == (False, True, int(NOW), None)
    assert secret.startswith(key.prefix + "-")
    assert len(secret) >= len(key.prefix) + 40
    with opened._engine.connect() as connection:
        kept = repr(connection.execute(sa.text("SELECT * FROM keys")).all())
    assert secret not in kept
    assert secret[len(key.prefix) + 1 :] not in kept


def test_keys_differ(opened: Store) -> None:
    assert len({opened.create_key(Key(f"k{num}")) for num in range(5)}) == 5
    found = opened.keys()
    assert len({key.prefix for key in found}) == 5
    assert [key.name for key in found] == ["k0", "k1", "k2", "k3", "k4"]


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        (Key(""), InvalidField, "`name` must be 1 to 64 of letters"),
        (Key("sha256:x"), InvalidField, "`name` must be"),
        (Key("x" * 65), InvalidField, "`name` must be"),
        (Key("x", expires_at=1), InvalidField, "`expires_at` must be in the future"),
        (Key("there"), KeyExists, "there is a key `there` already"),
        (Key("gone"), KeyExists, "there is a key `gone` already, or there was one"),
    ],
)
def test_a_key_that_cannot_be_made(opened: Store, key: Key, kind: type[LegatoError], message: str) -> None:
    opened.create_key(Key("there"))
    opened.create_key(Key("gone"))
    opened.revoke_key("gone")
    with pytest.raises(kind, match=message):
        opened.create_key(key)


def test_a_revoked_key_is_gone_for_good(opened: Store, clock: Callable[[float], None]) -> None:
    assert not opened.has_keys()
    secret = opened.create_key(Key("ann"))
    opened.revoke_key("ann")
    clock(NOW + 100)
    opened.revoke_key("ann")
    key = opened.find_key(hash_key(secret.encode()))
    assert key is not None
    assert key.revoked_at == int(NOW)
    with pytest.raises(InvalidField, match="the key `ann` is revoked"):
        opened.rotate_key("ann")
    assert opened.has_keys(), "a server whose last key is revoked is not open to all"


def test_a_rotated_key_has_the_same_rights(opened: Store) -> None:
    old = opened.create_key(Key("ann", models=("m",)))
    new = opened.rotate_key("ann")
    assert opened.find_key(hash_key(old.encode())) is None
    key = opened.find_key(hash_key(new.encode()))
    assert key is not None
    assert (key.name, key.models) == ("ann", ("m",))
    assert new.startswith(key.prefix)


def test_a_key_that_is_not_there(opened: Store) -> None:
    for act in (opened.revoke_key, opened.rotate_key):
        with pytest.raises(KeyNotFound, match="there is no key `nobody`"):
            act("nobody")
    assert opened.find_key(hash_key(b"x")) is None


# ---------------------------------------------------------------------------------------------------------------------
# Limits


def test_requests_per_minute(opened: Store, clock: Callable[[float], None]) -> None:
    key, other = Key("ann", requests_per_minute=2), Key("bob", requests_per_minute=1)
    for _ in range(2):
        opened.charge(key, 1)
    opened.charge(other, 1)
    with pytest.raises(RateLimited, match="`ann` may make 2 requests per minute; try again in 41 s") as caught:
        opened.charge(key, 1)
    assert caught.value.retry_after_s == 41
    clock(NOW + 41)
    opened.charge(key, 1)


def test_tokens_per_minute(opened: Store, clock: Callable[[float], None]) -> None:
    key = Key("ann", tokens_per_minute=100)
    charge = opened.charge(key, 60)
    with pytest.raises(RateLimited, match="has taken or asked for 60, and the request can take 50"):
        opened.charge(key, 50)
    opened.record([], [replace(charge, tokens=30)])
    opened.charge(key, 50)
    with pytest.raises(InvalidField, match=r"can take 101 tokens, .* and its key may take 100 per minute") as caught:
        opened.charge(key, 101)
    assert caught.value.param == "max_tokens"


def test_tokens_per_month(opened: Store, clock: Callable[[float], None]) -> None:
    key = Key("ann", tokens_per_month=100)
    for minute in range(2):
        clock(NOW + 60 * minute)
        opened.charge(key, 50)
    with pytest.raises(BudgetSpent, match="may take 100 tokens per month, has taken or asked for 100") as caught:
        opened.charge(key, 1)
    end = NOW + 60 + caught.value.retry_after_s
    assert time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(end)) == "2026-12-01T00:00:00"
    clock(end)
    opened.charge(key, 100)


def test_limits_hold_over_all_who_share_the_database(opened: Store, url: str, clock: Callable[[float], None]) -> None:
    key = Key("ann", requests_per_minute=25, tokens_per_minute=200)
    opened.create_key(key)

    def charge(num: int) -> int:
        done = 0
        with closing(Store.open(url)) as store:
            for _ in range(num):
                try:
                    store.charge(key, 10)
                    done += 1
                except RateLimited:
                    pass
        return done

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(charge, [15] * 4)) == 20


def test_what_is_given_back_after_the_minute_changes_only_the_month(
    opened: Store, clock: Callable[[float], None]
) -> None:
    key = Key("ann", tokens_per_minute=100, tokens_per_month=200)
    charge = opened.charge(key, 100)
    clock(NOW + 60)
    opened.charge(key, 100)
    opened.record([], [replace(charge, tokens=90)])
    with pytest.raises(RateLimited):
        opened.charge(key, 1)
    clock(NOW + 120)
    opened.charge(key, 90)


# ---------------------------------------------------------------------------------------------------------------------
# Usage


def test_usage_that_is_written_again_is_added_once(opened: Store, clock: Callable[[float], None]) -> None:
    """With what is given back with it; also a week later, unless the process has been silent for so long."""
    key = Key("ann", tokens_per_month=1000)
    opened.create_key(key)
    charge = opened.charge(key, 900)
    row = UsageRow("2026-11-30", "ann", "m", 1, 20, 3, 4)
    first, second, there = Batch("here", 1, (row,)), Batch("here", 2, (row,)), Batch("there", 1, (row,))
    for batch in (first, first, there, first, second, second, first):
        opened.record(batch, [replace(charge, tokens=100)])
    assert opened.usage() == [row + row + row]
    with pytest.raises(BudgetSpent, match="has taken or asked for 600,"):
        opened.charge(key, 401)
    clock(NOW + 86400 * 8)
    opened.record(Batch("new", 1, ()))
    with opened.reading() as connection:
        assert connection.execute(sa.text("SELECT writer FROM batches")).scalars().all() == ["new"]


def test_usage_adds_up(opened: Store) -> None:
    first = UsageRow("2026-11-29", "ann", "m", 1, 10, 5, 20)
    second = UsageRow("2026-11-30", "", "m", 1, 1, 0, 2)
    opened.record([first, second])
    opened.record([first])
    assert opened.usage() == [UsageRow("2026-11-29", "ann", "m", 2, 20, 10, 40), second]
    assert opened.usage(since="2026-11-30") == [second]
    assert opened.usage(until="2026-11-29") == [first + first]
    assert opened.usage(since="2026-12-01") == []
