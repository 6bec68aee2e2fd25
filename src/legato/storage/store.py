"""The store: keys, what they have spent of their limits, and usage, in one database for one server or many.

It receives and returns values. Every method blocks, for some seconds at most, and may be called from any thread: a
server calls it in the store's own. It does not know HTTP, models or text. Times are seconds since 1970; days, months
and minutes are those of UTC, written so that they sort.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from legato.errors import ConfigError, InvalidField, KeyExists, KeyNotFound, StoreUnavailable
from legato.storage import tables
from legato.storage.database import BUSY_S, connect, migrate, protect, reason_of
from legato.storage.keys import KEY_NAME, Key, hash_key, new_key
from legato.storage.usage import Batch, Charge, UsageRow, add_usage, adding, check_limits, day_of, minute_of
from legato.system.threads import Threads

__all__ = ["Store"]

_log = logging.getLogger("legato.storage.store")
_log.addHandler(logging.NullHandler())  # A command that sets up no log tells its user the reason itself.

_SPENT_BY = sa.select(tables.spent.c.window, tables.spent.c.requests, tables.spent.c.tokens).where(
    tables.spent.c.key == sa.bindparam("by")
)
_FORGOTTEN_S = 7 * 86400
"""After this time without a batch, a process is taken for ended, and its last batch number is deleted."""


class Store:
    """An open database, at its newest version.

    `reads` and `writes` are the threads in which a server calls its methods. Readers do not wait for
    writers.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._troubles: dict[str, str] = {}
        """Why reads or writes fail now; empty if they do not."""
        num_writers = 1 if self.file else 4  # SQLite lets one write at a time: more threads would only wait.
        self.reads = Threads("read", 4, max_waiting=256, max_wait_s=BUSY_S, busy=_busy)
        self.writes = Threads("write", num_writers, max_waiting=256, max_wait_s=BUSY_S, busy=_busy)

    @classmethod
    def open(cls, url: str) -> Store:
        """Connect, and bring the database to its newest version, alone if several do so at once.

        Raises:
            ConfigError: there is no such database, or it cannot be used.
        """
        try:
            starting, engine = (connect(sa.make_url(url), is_starting=is_starting) for is_starting in (True, False))
        except (ArgumentError, NoSuchModuleError):
            raise ConfigError(
                "`store.url` must be as `postgresql://user:password@host/name` or `sqlite:///file`"
            ) from None
        except ModuleNotFoundError:
            raise ConfigError("PostgreSQL needs a driver: `pip install 'legato[postgresql]'`") from None
        try:
            if engine.name == "sqlite":
                protect(engine.url.database or "")
            with starting.begin() as connection:
                migrate(connection)
        except (SQLAlchemyError, OSError) as error:
            raise ConfigError(f"the database `{engine.url!r}` cannot be used: {reason_of(error)}") from None
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
        if not KEY_NAME.fullmatch(key.name):
            raise InvalidField(
                f"`name` must be 1 to 64 of letters, digits, `.`, `_` and `-`, got {key.name!r}", param="name"
            )
        now = int(time.time())
        if key.expires_at is not None and key.expires_at <= now:
            raise InvalidField(
                f"`expires_at` must be in the future, got {key.expires_at}, now {now}", param="expires_at"
            )
        secret, prefix = new_key()
        created = replace(key, prefix=prefix, created_at=now, revoked_at=None)
        row = {**asdict(created), "digest": hash_key(secret.encode())}
        try:
            with self.writing() as connection:
                connection.execute(sa.insert(tables.keys).values(row))
        except IntegrityError:
            raise KeyExists(f"there is a key `{key.name}` already, or there was one", param="name") from None
        return secret

    def keys(self) -> list[Key]:
        """Return all keys, by name."""
        with self.reading() as connection:
            return [_key(row) for row in connection.execute(sa.select(tables.keys).order_by(tables.keys.c.name))]

    def has_keys(self) -> bool:
        """Whether there ever was a key: a server whose last one is revoked must not be open to all."""
        with self.reading() as connection:
            return connection.execute(sa.select(tables.keys.c.name).limit(1)).first() is not None

    def find_key(self, digest: bytes) -> Key | None:
        """Return the key with this hash, also a revoked one."""
        with self.reading() as connection:
            row = connection.execute(sa.select(tables.keys).where(tables.keys.c.digest == digest)).first()
            return None if row is None else _key(row)

    def revoke_key(self, name: str) -> None:
        """Revoke a key for good. Revoking it again changes nothing.

        Raises:
            KeyNotFound: there is none of this name.
        """
        revoked_at = sa.func.coalesce(tables.keys.c.revoked_at, int(time.time()))
        self._update_key(name, {"revoked_at": revoked_at})

    def rotate_key(self, name: str) -> str:
        """Return a new key in place of the old one, which is wrong from now on.

        Raises:
            KeyNotFound: there is none of this name.
            InvalidField: it was revoked.
        """
        secret, prefix = new_key()
        self._update_key(name, {"digest": hash_key(secret.encode()), "prefix": prefix})
        return secret

    def _update_key(self, name: str, values: Mapping[str, Any]) -> None:
        with self.writing() as connection:
            row = connection.execute(sa.select(tables.keys).where(tables.keys.c.name == name).with_for_update()).first()
            if row is None:
                raise KeyNotFound(f"there is no key `{name}`", param="name")
            if row.revoked_at is not None and "digest" in values:
                raise InvalidField(f"the key `{name}` is revoked; create another", param="name")
            connection.execute(sa.update(tables.keys).where(tables.keys.c.name == name).values(values))

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
        minute, month = minute_of(now), day_of(now)[:7]
        if key.tokens_per_minute is not None and tokens > key.tokens_per_minute:
            raise InvalidField(
                f"the request can take {tokens} tokens, prompt and `max_tokens` together, and its key may take "
                f"{key.tokens_per_minute} per minute",
                param="max_tokens",
            )
        with self.writing() as connection:
            if self.file is None:  # SQLite lets one write at a time; elsewhere others wait for the key's row.
                connection.execute(
                    sa.select(tables.keys.c.name).where(tables.keys.c.name == key.name).with_for_update()
                )
            mine = connection.execute(_SPENT_BY, {"by": key.name})
            spent = {window: (requests, taken) for window, requests, taken in mine}
            check_limits(key, tokens, spent.get(minute, (0, 0)), spent.get(month, (0, 0))[1], now)
            if over := spent.keys() - {minute, month}:
                connection.execute(
                    sa.delete(tables.spent).where(tables.spent.c.key == key.name, tables.spent.c.window.in_(over))
                )
            rows = [{"key": key.name, "window": window, "requests": 1, "tokens": tokens} for window in (month, minute)]
            connection.execute(adding(connection.dialect.name, tables.spent), rows)
        return Charge(key.name, (month, minute), tokens)

    # Usage

    def record(self, rows: Iterable[UsageRow] | Batch, refunds: Iterable[Charge] = ()) -> None:
        """Add to usage, and give back what was charged and not taken, in windows that are not over. A `Batch` may be
        written again if its outcome is unknown: nothing is added twice.
        """
        with self.writing() as connection:
            if isinstance(rows, Batch) and not _is_new(connection, rows):
                return
            add_usage(connection, rows)
            untaken: Counter[tuple[str, str]] = Counter()
            for charge in refunds:
                untaken.update({(charge.key, window): charge.tokens for window in charge.windows})
            for (key, window), tokens in sorted(untaken.items()):
                mine = (tables.spent.c.key == key, tables.spent.c.window == window)
                connection.execute(sa.update(tables.spent).where(*mine).values(tokens=tables.spent.c.tokens - tokens))

    def usage(self, since: str = "", until: str = "9") -> list[UsageRow]:
        """Return usage by day, key and model, of the days from `since` to `until`."""
        chosen = sa.select(tables.usage).where(tables.usage.c.day >= since, tables.usage.c.day <= until)
        ordered = chosen.order_by(tables.usage.c.day, tables.usage.c.key, tables.usage.c.model)
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
        """Raise errors of the database as `StoreUnavailable`. Their own text may name hosts and files: it goes to the
        log, once for each outage, and not to callers.
        """
        try:
            yield
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            reason = reason_of(error)
            if self._troubles.get(what) != reason:
                self._troubles[what] = reason
                _log.error("the database cannot be %s: %s", what, reason)
            raise StoreUnavailable(reason=reason) from error
        if self._troubles.pop(what, None) is not None:
            _log.warning("the database can be %s again", what)


def _is_new(connection: sa.Connection, batch: Batch) -> bool:
    """Whether a batch was not written before; note that it is now."""
    last = connection.execute(sa.select(tables.batches.c.num).where(tables.batches.c.writer == batch.writer)).scalar()
    if last is not None and last >= batch.num:
        return False
    now = time.time()
    values = {"num": batch.num, "day": day_of(now)}
    if last is None:
        connection.execute(sa.insert(tables.batches).values(writer=batch.writer, **values))
        connection.execute(sa.delete(tables.batches).where(tables.batches.c.day < day_of(now - _FORGOTTEN_S)))
    else:
        connection.execute(sa.update(tables.batches).where(tables.batches.c.writer == batch.writer).values(values))
    return True


def _key(row: Any) -> Key:
    values = {option.name: getattr(row, option.name) for option in fields(Key)}
    return Key(**{**values, "models": tuple(row.models)})


def _busy() -> StoreUnavailable:
    return StoreUnavailable(reason="too many wait for it")
