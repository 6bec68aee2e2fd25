"""What outlives the process: keys, what they have spent of their limits, and usage. A database, for one server or many.

It receives and returns values. Every method blocks, for some seconds at most, and may be called from any thread: a
server calls it in the store's own. It does not know HTTP, models or text. Times are seconds since 1970; days, months
and minutes are those of UTC, written so that they sort.
"""

from __future__ import annotations

import calendar
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from legato.config import Settings
from legato.errors import (
    BudgetSpent,
    ConfigError,
    InvalidField,
    KeyExists,
    KeyNotFound,
    RateLimited,
    StoreUnavailable,
)
from legato.system.permissions import make_folder, protect_file
from legato.system.threads import Threads

__all__ = [
    "ANYONE",
    "COUNTS",
    "Batch",
    "Charge",
    "Key",
    "Store",
    "UsageRow",
    "add_usage",
    "hash_key",
    "metadata",
    "store_url",
]

_log = logging.getLogger("legato.storage.store")
_log.addHandler(logging.NullHandler())  # A command that sets up no log tells its user the reason itself.

# ---------------------------------------------------------------------------------------------------------------------
# Values


@dataclass(frozen=True, slots=True)
class Key:
    """Who asks, and what they may do. None: as much as they want."""

    name: str
    prefix: str = ""
    """How the key itself begins, by which its owner knows it."""
    models: tuple[str, ...] = ()
    """Names and aliases of models it may use; none: any."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_month: int | None = None
    control_tokens: bool = True
    """Whether the text of a raw prompt may have control tokens."""
    admin: bool = False
    """Whether it may manage keys, and see everybody's usage and the metrics."""
    created_at: int = 0
    expires_at: int | None = None
    revoked_at: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether what it spends must be counted."""
        return any(
            limit is not None for limit in (self.requests_per_minute, self.tokens_per_minute, self.tokens_per_month)
        )


ANYONE = Key("")
"""The caller of a server without keys."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What a request was charged: at most so many tokens, in these windows."""

    key: str
    windows: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one key took of one model on one day."""

    day: str
    key: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`: those that were not read anew."""
    completion_tokens: int = 0

    def __add__(self, other: UsageRow) -> UsageRow:
        """Return both together, under this one's day, key and model."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return replace(self, **counts)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a process adds to usage in one go. Given again, it is not added again, until its next one is."""

    writer: str
    num: int
    """Counts the batches of this writer, from 1."""
    rows: tuple[UsageRow, ...]

    def __iter__(self) -> Iterator[UsageRow]:
        """Return its rows."""
        return iter(self.rows)


COUNTS = tuple(option.name for option in fields(UsageRow) if option.name not in ("day", "key", "model"))
"""What is counted, by its names in `UsageRow`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def hash_key(key: bytes) -> bytes:
    """Return what is kept of a key. It is long and random, so a plain hash does not give it away."""
    return hashlib.sha256(key).digest()


def _new_key() -> tuple[str, str]:
    """Return a key and the part of it that may be shown."""
    prefix = f"lg-{secrets.token_hex(4)}"
    return f"{prefix}-{secrets.token_urlsafe(32)}", prefix


# ---------------------------------------------------------------------------------------------------------------------
# Tables. A change here needs a new version in `migrations`.

metadata = sa.MetaData()
_keys = sa.Table(
    "keys",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("prefix", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary(32), nullable=False, unique=True),
    sa.Column("models", sa.JSON, nullable=False),
    sa.Column("requests_per_minute", sa.BigInteger),
    sa.Column("tokens_per_minute", sa.BigInteger),
    sa.Column("tokens_per_month", sa.BigInteger),
    sa.Column("control_tokens", sa.Boolean, nullable=False),
    sa.Column("admin", sa.Boolean, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("revoked_at", sa.BigInteger),
)
_spent = sa.Table(
    "spent",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("window", sa.Text, primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)
_SPENT_BY = sa.select(_spent.c.window, _spent.c.requests, _spent.c.tokens).where(_spent.c.key == sa.bindparam("by"))
_usage = sa.Table(
    "usage",
    metadata,
    sa.Column("day", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
)
_batches = sa.Table(
    "batches",
    metadata,
    sa.Column("writer", sa.Text, primary_key=True),
    sa.Column("num", sa.BigInteger, nullable=False),
    sa.Column("day", sa.Text, nullable=False),
)
"""The last batch of usage that each process has written, and when."""

# ---------------------------------------------------------------------------------------------------------------------
# The store

_LOCK = 0x1E6A70
"""PostgreSQL's number for "somebody is migrating"."""
_FORGOTTEN_S = 7 * 86400
"""After so long a process that has written nothing writes nothing again that it has written before."""
_START_S = 10.0
"""So long a start waits for others to let it write."""
_BUSY_S = 2.0
"""So long a transaction waits for its turn: in line for a thread, then for others that write."""
_CONNECT_S = 2
_ANSWER_S = 3.0
"""So long PostgreSQL may take to accept a connection, and to answer a statement."""


def store_url(settings: Settings) -> str:
    """Return the URL of the configured database."""
    return settings.store.url or f"sqlite:///{settings.data_dir / 'legato.db'}"


class Store:
    """An open database, at its newest version.

    `reads` and `writes` are the threads in which a server calls its methods. Who reads does not wait for who writes.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._troubles: dict[str, str] = {}
        """Why reading or writing fails now."""
        num_writers = 1 if self.file else 4  # SQLite lets one write at a time: more would only be in each other's way.
        self.reads = Threads("read", 4, max_waiting=256, max_wait_s=_BUSY_S, busy=_busy)
        self.writes = Threads("write", num_writers, max_waiting=256, max_wait_s=_BUSY_S, busy=_busy)

    @classmethod
    def open(cls, url: str) -> Store:
        """Connect, and bring the database to its newest version, alone if several do so at once.

        Raises:
            ConfigError: there is no such database, or it cannot be used.
        """
        try:
            starting, engine = (_connect(sa.make_url(url), is_starting=is_starting) for is_starting in (True, False))
        except (ArgumentError, NoSuchModuleError):
            raise ConfigError(
                "`store.url` must be as `postgresql://user:password@host/name` or `sqlite:///file`"
            ) from None
        except ModuleNotFoundError:
            raise ConfigError("PostgreSQL needs a driver: `pip install 'legato[postgresql]'`") from None
        try:
            if engine.name == "sqlite":
                _protect(engine.url.database or "")
            with starting.begin() as connection:
                _migrate(connection)
        except (SQLAlchemyError, OSError) as error:
            raise ConfigError(f"the database `{engine.url!r}` cannot be used: {_reason(error)}") from None
        finally:
            starting.dispose()
        return cls(engine)

    def close(self) -> None:
        """Close all connections."""
        self.reads.close()
        self.writes.close()
        self._engine.dispose()

    @property
    def file(self) -> Path | None:
        """Where an SQLite database is; None for any other."""
        name = self._engine.url.database
        return Path(name) if name and self._engine.name == "sqlite" else None

    # Keys

    def create_key(self, key: Key) -> str:
        """Add a key with the name and the rights of this one, and return the key itself, which is kept nowhere.

        Raises:
            InvalidField: a right makes no sense.
            KeyExists: the name was given before.
        """
        if not _NAME.fullmatch(key.name):
            raise InvalidField(
                f"`name` must be 1 to 64 of letters, digits, `.`, `_` and `-`, got {key.name!r}", param="name"
            )
        now = int(time.time())
        if key.expires_at is not None and key.expires_at <= now:
            raise InvalidField(
                f"`expires_at` must be in the future, got {key.expires_at}, now {now}", param="expires_at"
            )
        secret, prefix = _new_key()
        made = replace(key, prefix=prefix, created_at=now, revoked_at=None)
        row = {**asdict(made), "digest": hash_key(secret.encode())}
        try:
            with self.writing() as connection:
                connection.execute(sa.insert(_keys).values(row))
        except IntegrityError:
            raise KeyExists(f"there is a key `{key.name}` already, or there was one", param="name") from None
        return secret

    def keys(self) -> list[Key]:
        """Return all keys, by name."""
        with self.reading() as connection:
            return [_key(row) for row in connection.execute(sa.select(_keys).order_by(_keys.c.name))]

    def has_keys(self) -> bool:
        """Whether there ever was a key: a server whose last one is revoked must not be open to all."""
        with self.reading() as connection:
            return connection.execute(sa.select(_keys.c.name).limit(1)).first() is not None

    def find_key(self, digest: bytes) -> Key | None:
        """Return the key with this hash, also a revoked one."""
        with self.reading() as connection:
            row = connection.execute(sa.select(_keys).where(_keys.c.digest == digest)).first()
            return None if row is None else _key(row)

    def revoke_key(self, name: str) -> None:
        """Take a key's rights away for good; again changes nothing.

        Raises:
            KeyNotFound: there is none of this name.
        """
        revoked_at = sa.func.coalesce(_keys.c.revoked_at, int(time.time()))
        self._update_key(name, {"revoked_at": revoked_at})

    def rotate_key(self, name: str) -> str:
        """Return a new key in place of the old one, which is wrong from now on.

        Raises:
            KeyNotFound: there is none of this name.
            InvalidField: it was revoked.
        """
        secret, prefix = _new_key()
        self._update_key(name, {"digest": hash_key(secret.encode()), "prefix": prefix})
        return secret

    def _update_key(self, name: str, values: Mapping[str, Any]) -> None:
        with self.writing() as connection:
            row = connection.execute(sa.select(_keys).where(_keys.c.name == name).with_for_update()).first()
            if row is None:
                raise KeyNotFound(f"there is no key `{name}`", param="name")
            if row.revoked_at is not None and "digest" in values:
                raise InvalidField(f"the key `{name}` is revoked; create another", param="name")
            connection.execute(sa.update(_keys).where(_keys.c.name == name).values(values))

    # Limits

    def charge(self, key: Key, tokens: int) -> Charge:
        """Count a request that may take so many tokens against the limits of its key, or refuse it.

        All processes count together, one request of a key after the other.

        Raises:
            RateLimited: it is one request too many, or too many tokens, in this minute.
            BudgetSpent: not so many tokens are left in this month.
            InvalidField: it can take more tokens than any minute has.
        """
        now = time.time()
        minute, month = _minute(now), _day(now)[:7]
        if key.tokens_per_minute is not None and tokens > key.tokens_per_minute:
            raise InvalidField(
                f"the request can take {tokens} tokens, prompt and `max_tokens` together, and its key may take "
                f"{key.tokens_per_minute} per minute",
                param="max_tokens",
            )
        with self.writing() as connection:
            if self.file is None:  # SQLite lets one write at a time; elsewhere others wait for the key's row.
                connection.execute(sa.select(_keys.c.name).where(_keys.c.name == key.name).with_for_update())
            mine = connection.execute(_SPENT_BY, {"by": key.name})
            spent = {window: (requests, taken) for window, requests, taken in mine}
            _check_limits(key, tokens, spent.get(minute, (0, 0)), spent.get(month, (0, 0))[1], now)
            if over := spent.keys() - {minute, month}:
                connection.execute(sa.delete(_spent).where(_spent.c.key == key.name, _spent.c.window.in_(over)))
            rows = [{"key": key.name, "window": window, "requests": 1, "tokens": tokens} for window in (month, minute)]
            connection.execute(_adding(connection.dialect.name, _spent), rows)
        return Charge(key.name, (month, minute), tokens)

    # Usage

    def record(self, rows: Iterable[UsageRow] | Batch, refunds: Iterable[Charge] = ()) -> None:
        """Add to usage, and give back what was charged and not taken, in windows that are not over. A `Batch` may be
        written again if nobody knows whether it was: then nothing of this is done twice.
        """
        with self.writing() as connection:
            if isinstance(rows, Batch) and not _is_new(connection, rows):
                return
            add_usage(connection, rows)
            untaken: Counter[tuple[str, str]] = Counter()
            for charge in refunds:
                untaken.update({(charge.key, window): charge.tokens for window in charge.windows})
            for (key, window), tokens in sorted(untaken.items()):
                mine = (_spent.c.key == key, _spent.c.window == window)
                connection.execute(sa.update(_spent).where(*mine).values(tokens=_spent.c.tokens - tokens))

    def usage(self, since: str = "", until: str = "9") -> list[UsageRow]:
        """Return usage by day, key and model, of the days from `since` to `until`."""
        chosen = sa.select(_usage).where(_usage.c.day >= since, _usage.c.day <= until)
        ordered = chosen.order_by(_usage.c.day, _usage.c.key, _usage.c.model)
        with self.reading() as connection:
            return [UsageRow(**row) for row in connection.execute(ordered).mappings()]

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction that only reads.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._watched("read"), self._engine.connect().execution_options(reads=True) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that is committed if the context is left without an error.

        Raises:
            StoreUnavailable: the database does not answer, or has no room.
        """
        with self._watched("written"), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Say in our words that the database does not answer. What it says itself may name hosts and files, and goes
        to the log, once for each trouble.
        """
        try:
            yield
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            reason = _reason(error)
            if self._troubles.get(what) != reason:
                self._troubles[what] = reason
                _log.error("the database cannot be %s: %s", what, reason)
            raise StoreUnavailable(reason=reason) from error
        if self._troubles.pop(what, None) is not None:
            _log.warning("the database can be %s again", what)


def add_usage(connection: sa.Connection, rows: Iterable[UsageRow]) -> None:
    """Add to usage, within a transaction that writes."""
    sums: dict[tuple[str, str, str], UsageRow] = {}
    for row in rows:
        place = (row.day, row.key, row.model)
        sums[place] = sums[place] + row if place in sums else row
    if sums:
        # In one order, here and in `charge`: transactions that lock rows in another wait for each other for ever.
        values = [asdict(sums[place]) for place in sorted(sums)]
        connection.execute(_adding(connection.dialect.name, _usage), values)


def _is_new(connection: sa.Connection, batch: Batch) -> bool:
    """Whether a batch was not written before; note that it is now."""
    last = connection.execute(sa.select(_batches.c.num).where(_batches.c.writer == batch.writer)).scalar()
    if last is not None and last >= batch.num:
        return False
    now = time.time()
    values = {"num": batch.num, "day": _day(now)}
    if last is None:
        connection.execute(sa.insert(_batches).values(writer=batch.writer, **values))
        connection.execute(sa.delete(_batches).where(_batches.c.day < _day(now - _FORGOTTEN_S)))
    else:
        connection.execute(sa.update(_batches).where(_batches.c.writer == batch.writer).values(values))
    return True


def _check_limits(key: Key, tokens: int, in_minute: tuple[int, int], in_month: int, now: float) -> None:
    """Refuse what is too much. `in_minute`: requests and tokens so far; `in_month`: tokens so far."""
    requests, taken = in_minute
    wait_s = 60 - int(now) % 60
    if key.requests_per_minute is not None and requests >= key.requests_per_minute:
        raise RateLimited(
            f"the key `{key.name}` may make {key.requests_per_minute} requests per minute; try again in {wait_s} s",
            retry_after_s=wait_s,
        )
    if key.tokens_per_minute is not None and taken + tokens > key.tokens_per_minute:
        raise RateLimited(
            f"the key `{key.name}` may take {key.tokens_per_minute} tokens per minute, has taken or asked for {taken}, "
            f"and the request can take {tokens}; try again in {wait_s} s",
            retry_after_s=wait_s,
        )
    if key.tokens_per_month is not None and in_month + tokens > key.tokens_per_month:
        raise BudgetSpent(
            f"the key `{key.name}` may take {key.tokens_per_month} tokens per month, has taken or asked for "
            f"{in_month}, and the request can take {tokens}",
            retry_after_s=_month_ends_in(now),
        )


def _day(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def _minute(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M", time.gmtime(now))


def _month_ends_in(now: float) -> int:
    today = time.gmtime(now)
    days = calendar.monthrange(today.tm_year, today.tm_mon)[1]
    return calendar.timegm((today.tm_year, today.tm_mon, days, 24, 0, 0)) - int(now)


def _key(row: Any) -> Key:
    values = {option.name: getattr(row, option.name) for option in fields(Key)}
    return Key(**{**values, "models": tuple(row.models)})


@cache
def _adding(dialect: str, table: sa.Table) -> Any:
    """Return a statement that adds rows, or their counts to those of the rows that are there."""
    insert = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    counts = {column.name: column + insert.excluded[column.name] for column in table.c if not column.primary_key}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=counts)


def _connect(url: sa.URL, *, is_starting: bool) -> sa.Engine:
    """Return what opens connections. One that is starting may take its time."""
    if url.get_backend_name() == "postgresql":
        return _connect_postgresql(url, is_starting=is_starting)
    if url.get_backend_name() != "sqlite":
        raise ArgumentError
    engine = sa.create_engine(url, connect_args={"timeout": _START_S if is_starting else _BUSY_S})

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # Leaves it to `begin` when a transaction begins.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")  # A killed process loses nothing.

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        # Two that read first and write later would both be refused: who will write waits at once.
        connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get("reads") else "BEGIN IMMEDIATE")

    return engine


def _protect(database: str) -> None:
    """Let nobody else read an SQLite database: it has texts. What SQLite puts beside it gets the file's own mode."""
    if database in ("", ":memory:") or database.startswith("file:"):
        return
    make_folder(Path(database).parent)
    protect_file(Path(database), create=True)
    for beside in ("-wal", "-shm", "-journal"):
        protect_file(Path(database + beside))


def _connect_postgresql(url: sa.URL, *, is_starting: bool) -> sa.Engine:
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"), pool_pre_ping=True, pool_size=8, pool_timeout=_BUSY_S
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
    """Return psycopg's connection, with an end to waiting for a server that has fallen silent."""
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


def _migrate(connection: sa.Connection) -> None:
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


def _busy() -> StoreUnavailable:
    return StoreUnavailable(reason="too many wait for it")


def _reason(error: Exception) -> str:
    """Return the first line of what the database says, without our statement and its values."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]
