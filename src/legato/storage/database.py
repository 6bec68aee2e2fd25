"""Connections to SQLite and PostgreSQL: file modes, time limits, and migration to the newest version."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError

from legato.config import Settings
from legato.errors import ConfigError
from legato.system.permissions import make_folder, protect_file

__all__ = ["BUSY_S", "connect", "migrate", "protect", "reason_of", "store_url"]

_LOCK = 0x1E6A70
"""The number of PostgreSQL's advisory lock that is held while migrating."""
_START_S = 10.0
"""How long a start waits for other writers."""
BUSY_S = 2.0
"""How long a transaction waits for a thread, and then for other writers."""
_CONNECT_S = 2
"""How long PostgreSQL may take to accept a connection."""
_ANSWER_S = 3.0
"""How long PostgreSQL may take to answer a statement."""


def store_url(settings: Settings) -> str:
    """Return the URL of the configured database."""
    return settings.store.url or f"sqlite:///{settings.data_dir / 'legato.db'}"


def connect(url: sa.URL, *, is_starting: bool) -> sa.Engine:
    """Return an engine. While starting, connections have the longer time limits."""
    if url.get_backend_name() == "postgresql":
        return _connect_postgresql(url, is_starting=is_starting)
    if url.get_backend_name() != "sqlite":
        raise ArgumentError
    engine = sa.create_engine(url, connect_args={"timeout": _START_S if is_starting else BUSY_S})

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # Leaves it to `begin` when a transaction begins.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # A killed process loses nothing.

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # Two transactions that read first and write later would both fail, so a writer takes the lock at its begin.
        connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get("reads") else "BEGIN IMMEDIATE")

    return engine


def _connect_postgresql(url: sa.URL, *, is_starting: bool) -> sa.Engine:
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, pool_size=8, pool_timeout=BUSY_S
    )

    @sa.event.listens_for(engine, "do_connect")
    def connect(dialect: Any, record: Any, arguments: Any, options: dict[str, Any]) -> Any:
        options.setdefault("connect_timeout", _CONNECT_S)
        if is_starting:
            return None
        return _timely_connection().connect(*arguments, **options)

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        if not is_starting:
            connection.execute(f"SET statement_timeout = {int(1000 * _ANSWER_S)}")
            connection.commit()

    return engine


@cache
def _timely_connection() -> Any:
    """Return a subclass of psycopg's connection that stops waiting for a server that no longer answers."""
    import psycopg

    class Timely(psycopg.Connection[Any]):
        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
            return super().wait(self._within(gen), *arguments, **options)

        def _within(self, waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            """Pass on what psycopg waits for. It comes back at least ten times a second, with 0 if nothing came."""
            until = time.monotonic() + _ANSWER_S + 0.5  # The server's own limit comes first.
            try:
                wanted = next(waiting)
                while True:
                    came = yield wanted
                    if not came and time.monotonic() > until:
                        self.pgconn.finish()
                        raise psycopg.OperationalError("the server does not answer")
                    wanted = waiting.send(came)
            except StopIteration as end:
                return end.value

    return Timely


def protect(database: str) -> None:
    """Make an SQLite database readable by its owner only: it holds texts. SQLite's side files get the same mode."""
    if database in ("", ":memory:") or database.startswith("file:"):
        return
    make_folder(Path(database).parent)
    protect_file(Path(database), create=True)
    for beside in ("-wal", "-shm", "-journal"):
        protect_file(Path(database + beside))


def migrate(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    config = Config()
    config.set_main_option("script_location", "legato.storage:migrations")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError:
        url = connection.engine.url
        raise ConfigError(
            f"the database `{url!r}` belongs to a newer version of Legato: install that one, or restore a backup"
        ) from None


def reason_of(error: Exception) -> str:
    """Return the first line of what the database says, without our statement and its values."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]
