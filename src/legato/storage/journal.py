"""Journals of resumable generations: the request, and every frame of the answer with its tokens.

It receives and returns values, and keeps them in the store. A running generation belongs to one process, its owner,
which increments the lease's beat. A process that sees no new beat for a while may adopt the generation; the first one
gets it. No clock is compared with that of another machine. Every method blocks. It runs nothing.

An acknowledgement may be lost after a commit, so every method may be called again with the same arguments: a
repeated call does no harm. Usage is counted in the transaction that writes the entries.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from legato.config import StoreSettings
from legato.errors import JournalFull
from legato.storage import tables
from legato.storage.growth import FOR_END, Growth, new_usage, read_entries, remove, write_growths
from legato.storage.records import Entry, Lease, News, Record, Verdict, read_record, written_json
from legato.storage.store import Store
from legato.storage.usage import COUNTS, UsageRow, add_usage
from legato.system.clock import Clock

__all__ = ["Journal"]

_NUM_CANDIDATES = 50
"""How many ended journals are read at once when room is made."""
_MAX_SWEPT = 32


class Journal:
    """The journals in a store, as one process sees them."""

    def __init__(self, store: Store, settings: StoreSettings, clock: Clock = Clock()) -> None:  # noqa: B008 - frozen
        self._store = store
        self.reads = store.reads
        self.writes = store.writes
        """The threads in which a server calls what reads and what writes."""
        self._settings = settings
        self._clock = clock
        self.owner = secrets.token_hex(8)
        """The name of this process in leases."""

    # By the owner

    def create(self, record: Record) -> None:
        """Begin a journal, owned by this process.

        Raises:
            JournalFull: journals take all the room that they may take, and none of them is over.
            StoreUnavailable: it cannot be written.
        """
        texts = {
            "path": record.path,
            "body": json.dumps(record.body),
            "before": written_json(record.before),
            "job": record.job,
        }
        size = sum(map(len, texts.values())) + FOR_END
        row = {
            "id": record.id,
            "key": record.key,
            "created_at": record.created_at,
            "state": "running",
            "owner": self.owner,
            "beat": 1,
            "num_visits": 0,
            "num_entries": 0,
            "num_bytes": size,
            **dict.fromkeys(COUNTS, 0),
        }
        with self._store.writing() as connection:
            if connection.execute(
                sa.select(tables.generations.c.id).where(tables.generations.c.id == record.id)
            ).first():
                return
            connection.execute(sa.insert(tables.generations).values(row))
            connection.execute(sa.insert(tables.texts).values(generation=record.id, **texts))
            if self._grow(connection, size):
                raise JournalFull(
                    "there is no room for another resumable answer: those that run take all of `store.journal_bytes`, "
                    f"{self._settings.journal_bytes}; try again in 60 s, or without `resumable`",
                    retry_after_s=60,
                )

    def append(self, news: Mapping[str, News]) -> Verdict:
        """Write the news of several generations at once, with their usage.

        Ends are written even into a full journal: ended journals can be removed for room.

        Raises:
            StoreUnavailable: the news may or may not have been written.
        """
        verdict = Verdict()
        with self._store.writing() as connection:
            ours = self._ours(connection, news)
            growths = [Growth(ours[id], new) for id, new in news.items() if id in ours]
            verdict.lost.update(id for id in news if id not in ours)
            verdict.lost.update(growth.id for growth in growths if not growth.follows(connection))
            growths = [growth for growth in growths if growth.id not in verdict.lost]
            ending = [growth for growth in growths if growth.end is not None]
            going = [growth for growth in growths if growth.end is None]
            write_growths(connection, ending)
            verdict.full.update(self._take_room(connection, ending, going))
            going = [growth for growth in going if growth.id not in verdict.full]
            write_growths(connection, going)
            add_usage(connection, [row for growth in (*ending, *going) for row in growth.usage])
        return verdict

    def renew(self, ids: Collection[str]) -> dict[str, int]:
        """Renew the leases of these generations. Return those that this process still owns, each with the number of
        visits by clients of other processes.
        """
        mine = (tables.generations.c.id.in_(ids), *self._mine())
        chosen = sa.select(tables.generations.c.id, tables.generations.c.num_visits).where(*mine)
        with self._store.writing() as connection:
            rows = connection.execute(chosen.order_by(tables.generations.c.id).with_for_update()).all()
            connection.execute(sa.update(tables.generations).where(*mine).values(beat=tables.generations.c.beat + 1))
            return {row.id: row.num_visits for row in rows}

    def release(self) -> None:
        """Release all leases of this process."""
        with self._store.writing() as connection:
            connection.execute(sa.update(tables.generations).where(*self._mine()).values(beat=0))

    # By other processes

    def leases(self) -> list[Lease]:
        """Return the leases of all running generations."""
        chosen = sa.select(*(tables.generations.c[name] for name in ("id", "key", "owner", "beat")))
        with self._store.reading() as connection:
            rows = connection.execute(chosen.where(tables.generations.c.state == "running"))
            return [Lease(row.id, row.key, row.owner, row.beat) for row in rows]

    def adopt(self, lease: Lease) -> list[Entry] | None:
        """Adopt a generation whose lease is still `lease`, and return its entries; None if the lease has changed."""
        g = tables.generations.c
        same = (g.id == lease.id, g.state == "running", g.owner == lease.owner, g.beat == lease.beat)
        with self._store.writing() as connection:
            done = connection.execute(
                sa.update(tables.generations).where(*same).values(owner=self.owner, beat=lease.beat + 1)
            )
            return read_entries(connection, lease.id, 0) if done.rowcount else None

    # By all processes

    def find(self, id: str, key: str) -> Record | None:
        """Return a generation of a key; None if there is none of this id, or it is another key's."""
        both = sa.select(tables.generations, tables.texts).join(
            tables.texts, tables.texts.c.generation == tables.generations.c.id
        )
        with self._store.reading() as connection:
            row = connection.execute(both.where(*_of(id, key))).first()
            return None if row is None else read_record(row)

    def read(self, id: str, after: int) -> tuple[str | None, list[Entry]]:
        """Return a generation's state, None if there is none, and its entries after number `after`. If it has ended, no
        more entries follow.
        """
        with self._store.reading() as connection:
            # State first: if the generation ends in between, the next call reads its last entries.
            state = connection.execute(
                sa.select(tables.generations.c.state).where(tables.generations.c.id == id)
            ).scalar()
            return state, read_entries(connection, id, after)

    def visit(self, id: str) -> None:
        """Note that a client follows a generation that another process runs."""
        visited = {"num_visits": tables.generations.c.num_visits + 1}
        with self._store.writing() as connection:
            connection.execute(sa.update(tables.generations).where(tables.generations.c.id == id).values(visited))

    def delete(self, id: str, key: str, taken: UsageRow | None = None) -> bool:
        """Remove a generation of a key, and count its usage `taken` if it runs here; another owner notices at its next
        write. Return whether it existed.
        """
        with self._store.writing() as connection:
            row = connection.execute(sa.select(tables.generations).where(*_of(id, key)).with_for_update()).first()
            if row is None:
                return False
            remove(connection, id)
            self._grow(connection, -row.num_bytes)
            add_usage(connection, new_usage(row, taken))
            return True

    def sweep(self) -> bool:
        """Remove some ended journals that are older than `store.retention_s`, and return whether those were all.

        Only a few at a time, so that other writers do not wait long.
        """
        old = self._clock.wall() - self._settings.retention_s
        over = (tables.generations.c.state != "running", tables.generations.c.created_at < old)
        with self._store.writing() as connection:
            some = sa.select(tables.generations.c.id).where(*over).order_by(tables.generations.c.id).limit(_MAX_SWEPT)
            ids = connection.execute(some).scalars().all()
            for id in ids:
                remove(connection, id)
            # The total is recomputed, so that no error in it lasts. The first update locks the row: it waits for
            # transactions that have changed a size, and later ones add their change to the new total.
            connection.execute(sa.update(tables.room).values(num_bytes=tables.room.c.num_bytes))
            taken = sa.select(sa.func.coalesce(sa.func.sum(tables.generations.c.num_bytes), 0)).scalar_subquery()
            connection.execute(sa.update(tables.room).values(num_bytes=taken))
        return len(ids) < _MAX_SWEPT

    # Helpers

    def _mine(self) -> tuple[Any, ...]:
        return (tables.generations.c.owner == self.owner, tables.generations.c.state == "running")

    def _ours(self, connection: sa.Connection, news: Mapping[str, News]) -> dict[str, sa.Row[Any]]:
        """Lock and return the rows that this process owns. A generation that has already ended as `news` says is among
        them: this call repeats an earlier one.
        """
        mine = sa.select(tables.generations).where(
            tables.generations.c.id.in_([*news]), tables.generations.c.owner == self.owner
        )
        # Sorted: transactions that lock rows in different orders would deadlock.
        rows = connection.execute(mine.order_by(tables.generations.c.id).with_for_update())
        ends = {id: new.end.state if new.end else None for id, new in news.items()}
        return {row.id: row for row in rows if row.state in ("running", ends[row.id])}

    def _take_room(self, connection: sa.Connection, ending: Sequence[Growth], going: Sequence[Growth]) -> Iterator[str]:
        """Take room for all news. Yield the running generations for which there is none, the largest first."""
        missing = self._grow(connection, sum(growth.num_bytes for growth in (*ending, *going)))
        for growth in sorted(going, key=lambda growth: -growth.num_bytes):
            if missing > 0 and growth.num_bytes:
                missing = self._grow(connection, -growth.num_bytes)
                yield growth.id

    def _grow(self, connection: sa.Connection, num_bytes: int) -> int:
        """Take this many bytes of room, and remove the oldest ended journals until they fit. Return how many bytes are
        missing.
        """
        connection.execute(sa.update(tables.room).values(num_bytes=tables.room.c.num_bytes + num_bytes))
        missing = connection.execute(sa.select(tables.room.c.num_bytes)).scalar_one() - self._settings.journal_bytes
        over = sa.select(tables.generations.c.id, tables.generations.c.num_bytes).where(
            tables.generations.c.state != "running"
        )
        oldest = over.order_by(tables.generations.c.created_at).limit(_NUM_CANDIDATES).with_for_update(skip_locked=True)
        freed = 0
        while missing > freed and (rows := connection.execute(oldest).all()):
            for row in rows:
                if missing > freed:
                    remove(connection, row.id)
                    freed += row.num_bytes
        if freed:
            connection.execute(sa.update(tables.room).values(num_bytes=tables.room.c.num_bytes - freed))
        return max(0, int(missing) - freed)


def _of(id: str, key: str) -> tuple[Any, ...]:
    return (tables.generations.c.id == id, tables.generations.c.key == key)
