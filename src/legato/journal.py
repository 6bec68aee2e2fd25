"""Journals of resumable generations: what was asked, and every frame of the answer with the tokens behind it.

It receives and returns values, and keeps them in the store. A generation that runs belongs to one process, its owner,
for as long as that renews its lease; then any other may adopt it. Every method blocks. It runs nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from legato.config import StoreSettings
from legato.errors import JournalFull
from legato.store import Store, metadata
from legato.types import ScoredToken, Token

__all__ = ["LEASE_S", "Entry", "Journal", "Record", "Written", "new_id"]

LEASE_S = 5.0
"""So long a generation stays with a process that is not heard of."""

_generations = sa.Table(
    "generations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("before", sa.Text, nullable=False),
    sa.Column("job", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("leased_until", sa.Double, nullable=False),
    sa.Column("seen_at", sa.Double, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("answer", sa.LargeBinary),
    sa.Column("written", sa.Text),
)
_entries = sa.Table(
    "entries",
    metadata,
    sa.Column("generation", sa.Text, primary_key=True),
    sa.Column("num", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("frame", sa.LargeBinary, nullable=False),
    sa.Column("tokens", sa.Text, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Written:
    """What an assistant, or a model without a chat, has written: thinking and text."""

    text: str = ""
    reasoning: str | None = None

    def __add__(self, other: Written) -> Written:
        """Return this and what follows it."""
        known = [part for part in (self.reasoning, other.reasoning) if part is not None]
        return Written(self.text + other.text, "".join(known) if known else None)


@dataclass(frozen=True, slots=True)
class Record:
    """A generation, but for its entries."""

    id: str
    key: str
    """The name of the key that it belongs to."""
    path: str
    body: Mapping[str, Any]
    """The request, as it was made."""
    before: Written
    """What generations that it continues have written, behind the request's own text."""
    job: str
    """What ran, as JSON; see `Job.to_json`."""
    created_at: int
    state: str = "running"
    """`running`, `done`, `failed` or `cancelled`."""
    answer: bytes | None = None
    """The whole body of the answer, once it is done."""
    written: Written | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A frame of the answer, and the tokens that were written since the one before."""

    frame: bytes
    tokens: tuple[Token, ...]


def new_id() -> str:
    """Return an id that nobody guesses."""
    return f"gen-{secrets.token_urlsafe(24)}"


class Journal:
    """The journals in a store, as one process sees them."""

    def __init__(self, store: Store, settings: StoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._owner = secrets.token_hex(8)

    def create(self, record: Record) -> None:
        """Begin a journal, owned by this process.

        Raises:
            JournalFull: journals take all the room that they may take, and none of them is over.
            StoreUnavailable: it cannot be written.
        """
        size = len(record.job)
        row = {
            "id": record.id,
            "key": record.key,
            "path": record.path,
            "body": json.dumps(record.body),
            "before": _written_json(record.before),
            "job": record.job,
            "created_at": record.created_at,
            "state": "running",
            "owner": self._owner,
            "leased_until": time.time() + LEASE_S,
            "seen_at": time.time(),
            "num_bytes": size,
        }
        with self._store.writing() as connection:
            self._make_room(connection, size)
            connection.execute(sa.insert(_generations).values(row))

    def append(self, news: Mapping[str, tuple[int, Sequence[Entry]]]) -> set[str]:
        """Add entries to several journals at once, to each from a number on. Return those that are not ours any more:
        they were deleted, or others adopted them.
        """
        lost = set()
        with self._store.writing() as connection:
            for id, (first, entries) in news.items():
                texts = [_tokens_json(entry.tokens) for entry in entries]
                rows = [
                    {"generation": id, "num": num, "frame": entry.frame, "tokens": text}
                    for num, (entry, text) in enumerate(zip(entries, texts, strict=True), first)
                ]
                size = sum(len(entry.frame) for entry in entries) + sum(map(len, texts))
                grown = {"num_bytes": _generations.c.num_bytes + size}
                done = connection.execute(sa.update(_generations).where(*self._mine(id)).values(grown))
                if done.rowcount:
                    connection.execute(sa.insert(_entries), rows)
                else:
                    lost.add(id)
        return lost

    def finish(self, id: str, state: str, answer: bytes | None = None, written: Written | None = None) -> None:
        """End a generation of ours."""
        values = {"state": state, "answer": answer, "written": None if written is None else _written_json(written)}
        with self._store.writing() as connection:
            connection.execute(sa.update(_generations).where(*self._mine(id)).values(values))

    def renew(self, seen: Sequence[str]) -> dict[str, float]:
        """Keep what is ours, of which some are being read here. Return when a client was last seen at each."""
        now = time.time()
        mine = (_generations.c.owner == self._owner, _generations.c.state == "running")
        with self._store.writing() as connection:
            if seen:
                here = _generations.c.id.in_(seen)
                connection.execute(sa.update(_generations).where(here).values(seen_at=now))
            connection.execute(sa.update(_generations).where(*mine).values(leased_until=now + LEASE_S))
            rows = connection.execute(sa.select(_generations.c.id, _generations.c.seen_at).where(*mine))
            return {row.id: row.seen_at for row in rows}

    def touch(self, id: str) -> None:
        """Say that a client is here, of a generation that runs elsewhere."""
        with self._store.writing() as connection:
            connection.execute(sa.update(_generations).where(_generations.c.id == id).values(seen_at=time.time()))

    def orphans(self) -> list[Record]:
        """Return the generations that run nowhere."""
        lone = (_generations.c.state == "running", _generations.c.leased_until < time.time())
        with self._store.reading() as connection:
            return [_record(row) for row in connection.execute(sa.select(_generations).where(*lone))]

    def adopt(self, id: str) -> bool:
        """Make a generation that runs nowhere ours; only one process can."""
        now = time.time()
        lone = (_generations.c.id == id, _generations.c.state == "running", _generations.c.leased_until < now)
        values = {"owner": self._owner, "leased_until": now + LEASE_S}
        with self._store.writing() as connection:
            return bool(connection.execute(sa.update(_generations).where(*lone).values(values)).rowcount)

    def release(self) -> None:
        """Leave everything that is ours to others."""
        mine = (_generations.c.owner == self._owner, _generations.c.state == "running")
        with self._store.writing() as connection:
            connection.execute(sa.update(_generations).where(*mine).values(leased_until=0))

    def find(self, id: str, key: str) -> Record | None:
        """Return a key's generation; None if there is no such, or it is another's."""
        with self._store.reading() as connection:
            row = connection.execute(sa.select(_generations).where(*_of(id, key))).first()
            return None if row is None else _record(row)

    def entries(self, id: str, after: int) -> list[Entry]:
        """Return the entries behind the first `after`."""
        chosen = sa.select(_entries).where(_entries.c.generation == id, _entries.c.num > after).order_by(_entries.c.num)
        with self._store.reading() as connection:
            return [Entry(row.frame, _tokens(row.tokens)) for row in connection.execute(chosen)]

    def num_entries(self, id: str) -> int:
        """Return how many entries there are."""
        counted = sa.select(sa.func.count()).select_from(_entries).where(_entries.c.generation == id)
        with self._store.reading() as connection:
            return int(connection.execute(counted).scalar_one())

    def delete(self, id: str, key: str) -> bool:
        """Remove a key's generation; its owner, if it runs, learns of it with its next entry. Return whether it was."""
        with self._store.writing() as connection:
            done = connection.execute(sa.delete(_generations).where(*_of(id, key)))
            if done.rowcount:
                connection.execute(sa.delete(_entries).where(_entries.c.generation == id))
            return bool(done.rowcount)

    def sweep(self) -> None:
        """Remove what is over and older than it may become."""
        old = time.time() - self._settings.retention_s
        with self._store.writing() as connection:
            over = (_generations.c.state != "running", _generations.c.created_at < old)
            _remove(connection, sa.select(_generations.c.id).where(*over))

    def _make_room(self, connection: sa.Connection, size: int) -> None:
        """Remove the oldest journals that are over, until there is room."""
        taken = connection.execute(sa.select(sa.func.coalesce(sa.func.sum(_generations.c.num_bytes), 0))).scalar_one()
        free = self._settings.journal_bytes - size - int(taken)
        if free >= 0:
            return
        over = sa.select(_generations.c.id, _generations.c.num_bytes).where(_generations.c.state != "running")
        going = []
        for row in connection.execute(over.order_by(_generations.c.created_at)):
            going.append(row.id)
            free += row.num_bytes
            if free >= 0:
                break
        if free < 0:
            raise JournalFull(
                "there is no room for another resumable answer: those that run take all of `store.journal_bytes`, "
                f"{self._settings.journal_bytes}; try again in 60 s, or without `resumable`",
                retry_after_s=60,
            )
        _remove(connection, going)

    def _mine(self, id: str) -> tuple[Any, ...]:
        return (_generations.c.id == id, _generations.c.owner == self._owner, _generations.c.state == "running")


def _of(id: str, key: str) -> tuple[Any, ...]:
    return (_generations.c.id == id, _generations.c.key == key)


def _remove(connection: sa.Connection, ids: Any) -> None:
    connection.execute(sa.delete(_entries).where(_entries.c.generation.in_(ids)))
    connection.execute(sa.delete(_generations).where(_generations.c.id.in_(ids)))


def _record(row: Any) -> Record:
    return Record(
        id=row.id,
        key=row.key,
        path=row.path,
        body=json.loads(row.body),
        before=_written(row.before),
        job=row.job,
        created_at=row.created_at,
        state=row.state,
        answer=row.answer,
        written=None if row.written is None else _written(row.written),
    )


def _written_json(written: Written) -> str:
    return json.dumps([written.text, written.reasoning])


def _written(text: str) -> Written:
    return Written(*json.loads(text))


def _tokens_json(tokens: Sequence[Token]) -> str:
    rows = [
        [token.id, token.data.hex(), token.logprob, [[one.id, one.data.hex(), one.logprob] for one in token.top]]
        for token in tokens
    ]
    return json.dumps(rows, separators=(",", ":"))


def _tokens(text: str) -> tuple[Token, ...]:
    return tuple(
        Token(id, bytes.fromhex(data), logprob, tuple(ScoredToken(i, bytes.fromhex(d), p) for i, d, p in top))
        for id, data, logprob, top in json.loads(text)
    )
