"""Journals of resumable generations: what was asked, and every frame of the answer with the tokens behind it.

It receives and returns values, and keeps them in the store. A generation that runs belongs to one process, its owner,
which makes itself heard by its beat; whoever has not heard it for a while may adopt the generation, if nobody has been
quicker. No time is compared with that of another machine. Every method blocks. It runs nothing.

An acknowledgement may be lost behind a commit: so each method may be called again with what it was called with, and
twice is as once. What was taken of a model is counted with the entries that show it, in one transaction.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from legato.config import StoreSettings
from legato.errors import JournalFull
from legato.storage.store import COUNTS, Store, UsageRow, add_usage, metadata
from legato.system.clock import Clock
from legato.types import ScoredToken, Token

__all__ = ["End", "Entry", "Journal", "Lease", "News", "Record", "Verdict", "Written", "new_id"]

_generations = sa.Table(
    "generations",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False),
    sa.Column("num_visits", sa.BigInteger, nullable=False),
    sa.Column("num_entries", sa.BigInteger, nullable=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("cached_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Index("ix_generations_state", "state", "created_at"),
)
"""What changes while a generation runs. It is written anew with every entry, so what is long stands in `texts`."""
_texts = sa.Table(
    "texts",
    metadata,
    sa.Column("generation", sa.Text, primary_key=True),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("before", sa.Text, nullable=False),
    sa.Column("job", sa.Text, nullable=False),
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
_room = sa.Table(
    "room",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
)
"""One row: the bytes of all journals together."""
_FOR_END = 1024
"""Bytes that what runs has taken for the words of a failure, so that there is room for them when there is none."""
_PROGRESS = (
    sa.update(_generations)
    .where(_generations.c.id == sa.bindparam("of"))
    .values({name: sa.bindparam(f"new_{name}") for name in ("state", "num_entries", "num_bytes", *COUNTS)})
)
_BATCH = 50
"""How many journals that are over are looked at together when room is made."""
_SWEPT_AT_ONCE = 32


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
    num_entries: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A frame of the answer, and the tokens that were written since the one before."""

    frame: bytes
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """How a generation ended."""

    state: str
    """`done`, `failed` or `cancelled`; `refused` leaves no journal behind."""
    answer: bytes | None = None
    written: Written | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What is new of a generation: entries from the number `first` on, and its end, if it has come."""

    first: int
    entries: Sequence[Entry]
    end: End | None = None
    taken: UsageRow | None = None
    """What it has taken in all, on which day and of which model that is to be counted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of which generations the news were not written."""

    lost: set[str] = field(default_factory=set)
    """They are not ours any more: they were deleted, or others have adopted them."""
    full: set[str] = field(default_factory=set)
    """There is no room for them to go on."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Whose a generation is that runs."""

    id: str
    key: str
    owner: str
    beat: int
    """Another number each time that its owner was heard; 0: it was left to whoever wants it."""


def new_id() -> str:
    """Return an id that nobody guesses."""
    return f"gen-{secrets.token_urlsafe(24)}"


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
        """This process, in leases."""

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
            "before": _written_json(record.before),
            "job": record.job,
        }
        size = sum(map(len, texts.values())) + _FOR_END
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
            if connection.execute(sa.select(_generations.c.id).where(_generations.c.id == record.id)).first():
                return
            connection.execute(sa.insert(_generations).values(row))
            connection.execute(sa.insert(_texts).values(generation=record.id, **texts))
            if self._grow(connection, size):
                raise JournalFull(
                    "there is no room for another resumable answer: those that run take all of `store.journal_bytes`, "
                    f"{self._settings.journal_bytes}; try again in 60 s, or without `resumable`",
                    retry_after_s=60,
                )

    def append(self, news: Mapping[str, News]) -> Verdict:
        """Write what is new of several generations at once, and count what they took with it.

        What ends is written whatever the room: it can then be removed, as all that is over.

        Raises:
            StoreUnavailable: nobody knows whether it was written.
        """
        verdict = Verdict()
        with self._store.writing() as connection:
            ours = self._ours(connection, news)
            growths = [_Growth(ours[id], new) for id, new in news.items() if id in ours]
            verdict.lost.update(id for id in news if id not in ours)
            verdict.lost.update(growth.id for growth in growths if not growth.follows(connection))
            growths = [growth for growth in growths if growth.id not in verdict.lost]
            ending = [growth for growth in growths if growth.end is not None]
            going = [growth for growth in growths if growth.end is None]
            _write(connection, ending)
            verdict.full.update(self._take_room(connection, ending, going))
            going = [growth for growth in going if growth.id not in verdict.full]
            _write(connection, going)
            add_usage(connection, [row for growth in (*ending, *going) for row in growth.usage])
        return verdict

    def renew(self, ids: Collection[str]) -> dict[str, int]:
        """Let it be heard that these of ours are alive. Return those that are still ours, and how often clients of
        other processes have visited each.
        """
        mine = (_generations.c.id.in_(ids), *self._mine())
        chosen = sa.select(_generations.c.id, _generations.c.num_visits).where(*mine)
        with self._store.writing() as connection:
            rows = connection.execute(chosen.order_by(_generations.c.id).with_for_update()).all()
            connection.execute(sa.update(_generations).where(*mine).values(beat=_generations.c.beat + 1))
            return {row.id: row.num_visits for row in rows}

    def release(self) -> None:
        """Leave everything that is ours to others."""
        with self._store.writing() as connection:
            connection.execute(sa.update(_generations).where(*self._mine()).values(beat=0))

    # By who may become it

    def leases(self) -> list[Lease]:
        """Return whose each generation is that runs."""
        chosen = sa.select(*(_generations.c[name] for name in ("id", "key", "owner", "beat")))
        with self._store.reading() as connection:
            rows = connection.execute(chosen.where(_generations.c.state == "running"))
            return [Lease(row.id, row.key, row.owner, row.beat) for row in rows]

    def adopt(self, lease: Lease) -> list[Entry] | None:
        """Make a generation ours that stands as `lease` says, and return its entries; None: it does not any more."""
        g = _generations.c
        same = (g.id == lease.id, g.state == "running", g.owner == lease.owner, g.beat == lease.beat)
        with self._store.writing() as connection:
            done = connection.execute(
                sa.update(_generations).where(*same).values(owner=self.owner, beat=lease.beat + 1)
            )
            return _read(connection, lease.id, 0) if done.rowcount else None

    # By everybody

    def find(self, id: str, key: str) -> Record | None:
        """Return a key's generation; None if there is no such, or it is another's."""
        both = sa.select(_generations, _texts).join(_texts, _texts.c.generation == _generations.c.id)
        with self._store.reading() as connection:
            row = connection.execute(both.where(*_of(id, key))).first()
            return None if row is None else _record(row)

    def read(self, id: str, after: int) -> tuple[str | None, list[Entry]]:
        """Return a generation's state, None if there is no such, and the entries behind the first `after`: of one that
        is over, all of them.
        """
        with self._store.reading() as connection:
            # In this order: what ends in between has an end, and entries, that are read the next time.
            state = connection.execute(sa.select(_generations.c.state).where(_generations.c.id == id)).scalar()
            return state, _read(connection, id, after)

    def visit(self, id: str) -> None:
        """Say that a client is here, of a generation that runs elsewhere."""
        visited = {"num_visits": _generations.c.num_visits + 1}
        with self._store.writing() as connection:
            connection.execute(sa.update(_generations).where(_generations.c.id == id).values(visited))

    def delete(self, id: str, key: str, taken: UsageRow | None = None) -> bool:
        """Remove a key's generation, and count what it has `taken` if it runs here; another owner learns of it with its
        next entry. Return whether it was there.
        """
        with self._store.writing() as connection:
            row = connection.execute(sa.select(_generations).where(*_of(id, key)).with_for_update()).first()
            if row is None:
                return False
            _remove(connection, id)
            self._grow(connection, -row.num_bytes)
            add_usage(connection, _untold(row, taken))
            return True

    def sweep(self) -> bool:
        """Remove some of what is over and older than it may become, and return whether that was all.

        So many at a time that others who write wait for a moment at most.
        """
        old = self._clock.wall() - self._settings.retention_s
        over = (_generations.c.state != "running", _generations.c.created_at < old)
        with self._store.writing() as connection:
            some = sa.select(_generations.c.id).where(*over).order_by(_generations.c.id).limit(_SWEPT_AT_ONCE)
            ids = connection.execute(some).scalars().all()
            for id in ids:
                _remove(connection, id)
            # Counted anew now and then, so that no mistake lasts. Who has changed a size and holds the row is waited
            # for; who will change one has not been seen, and adds what it is.
            connection.execute(sa.update(_room).values(num_bytes=_room.c.num_bytes))
            taken = sa.select(sa.func.coalesce(sa.func.sum(_generations.c.num_bytes), 0)).scalar_subquery()
            connection.execute(sa.update(_room).values(num_bytes=taken))
        return len(ids) < _SWEPT_AT_ONCE

    # Helpers

    def _mine(self) -> tuple[Any, ...]:
        return (_generations.c.owner == self.owner, _generations.c.state == "running")

    def _ours(self, connection: sa.Connection, news: Mapping[str, News]) -> dict[str, sa.Row[Any]]:
        """Return the rows of those that are ours, and lock them. One that has ended just so is among them: that is a
        second time.
        """
        mine = sa.select(_generations).where(_generations.c.id.in_([*news]), _generations.c.owner == self.owner)
        # In one order: transactions that lock rows in another wait for each other for ever.
        rows = connection.execute(mine.order_by(_generations.c.id).with_for_update())
        ends = {id: new.end.state if new.end else None for id, new in news.items()}
        return {row.id: row for row in rows if row.state in ("running", ends[row.id])}

    def _take_room(
        self, connection: sa.Connection, ending: Sequence[_Growth], going: Sequence[_Growth]
    ) -> Iterator[str]:
        """Take room for what is new, which what ends does not ask for. Return who has none, the largest first."""
        missing = self._grow(connection, sum(growth.num_bytes for growth in (*ending, *going)))
        for growth in sorted(going, key=lambda growth: -growth.num_bytes):
            if missing > 0 and growth.num_bytes:
                missing = self._grow(connection, -growth.num_bytes)
                yield growth.id

    def _grow(self, connection: sa.Connection, num_bytes: int) -> int:
        """Take so much more room, and remove the oldest journals that are over until it is there. Return how much is
        missing.
        """
        connection.execute(sa.update(_room).values(num_bytes=_room.c.num_bytes + num_bytes))
        missing = connection.execute(sa.select(_room.c.num_bytes)).scalar_one() - self._settings.journal_bytes
        over = sa.select(_generations.c.id, _generations.c.num_bytes).where(_generations.c.state != "running")
        oldest = over.order_by(_generations.c.created_at).limit(_BATCH).with_for_update(skip_locked=True)
        freed = 0
        while missing > freed and (rows := connection.execute(oldest).all()):
            for row in rows:
                if missing > freed:
                    _remove(connection, row.id)
                    freed += row.num_bytes
        if freed:
            connection.execute(sa.update(_room).values(num_bytes=_room.c.num_bytes - freed))
        return max(0, int(missing) - freed)


class _Growth:
    """What is new of one generation, beside what its journal has already."""

    def __init__(self, row: sa.Row[Any], news: News) -> None:
        self.id: str = row.id
        self.end = news.end
        self._row = row
        self._news = news
        self._is_told = row.state != "running"
        """Whether all of this was written before."""
        self._fresh = [] if self._is_told else news.entries[max(0, row.num_entries + 1 - news.first) :]
        self.rows = [
            {"generation": row.id, "num": num, "frame": entry.frame, "tokens": _tokens_json(entry.tokens)}
            for num, entry in enumerate(self._fresh, row.num_entries + 1)
        ]
        self.usage = [] if self._is_told else _untold(row, news.taken)
        self._texts: dict[str, Any] = {}
        if self.end is not None and not self._is_told:
            written = None if self.end.written is None else _written_json(self.end.written)
            self._texts = {"answer": self.end.answer, "written": written}
        self.num_bytes = -_FOR_END if self._texts else 0
        self.num_bytes += sum(len(row["frame"]) + len(row["tokens"]) for row in self.rows)
        self.num_bytes += sum(len(text) for text in self._texts.values() if text is not None)
        if self.is_refused:
            self.num_bytes = -row.num_bytes

    @property
    def is_refused(self) -> bool:
        """Whether no journal stays."""
        return self.end is not None and self.end.state == "refused"

    def follows(self, connection: sa.Connection) -> bool:
        """Whether the entries go on from those that are there, which have to be the same."""
        if self._is_told:
            return True
        first, entries = self._news.first, self._news.entries
        there = _read(connection, self.id, first - 1) if self._row.num_entries >= first else []
        return first <= self._row.num_entries + 1 and there == [*entries[: len(there)]]

    def progress(self) -> dict[str, Any]:
        """Return the row as it becomes, for `_PROGRESS`."""
        row, taken = self._row, self._news.taken or self._row
        return {
            "of": self.id,
            "new_state": row.state if self.end is None else self.end.state,
            "new_num_entries": row.num_entries + len(self.rows),
            "new_num_bytes": row.num_bytes + self.num_bytes,
            **{f"new_{name}": max(getattr(row, name), getattr(taken, name)) for name in COUNTS},
        }

    def write_end(self, connection: sa.Connection) -> None:
        """Write what is long, or remove what was refused."""
        if self.is_refused:
            _remove(connection, self.id)
        elif self._texts:
            connection.execute(sa.update(_texts).where(_texts.c.generation == self.id).values(self._texts))


def _write(connection: sa.Connection, growths: Sequence[_Growth]) -> None:
    """Write what is new, but not what was taken."""
    rows = [row for growth in growths for row in growth.rows if not growth.is_refused]
    if rows:
        connection.execute(sa.insert(_entries), rows)
    if growths:
        connection.execute(_PROGRESS, [growth.progress() for growth in growths])
    for growth in growths:
        growth.write_end(connection)


def _untold(row: sa.Row[Any], taken: UsageRow | None) -> list[UsageRow]:
    """Return what a generation has taken and was not counted yet."""
    if taken is None:
        return []
    counts = {name: max(0, getattr(taken, name) - getattr(row, name)) for name in COUNTS}
    return [replace(taken, **counts)] if any(counts.values()) else []


def _of(id: str, key: str) -> tuple[Any, ...]:
    return (_generations.c.id == id, _generations.c.key == key)


def _remove(connection: sa.Connection, id: str) -> None:
    for column in (_entries.c.generation, _texts.c.generation, _generations.c.id):
        connection.execute(sa.delete(column.table).where(column == id))


def _read(connection: sa.Connection, id: str, after: int) -> list[Entry]:
    chosen = sa.select(_entries).where(_entries.c.generation == id, _entries.c.num > after).order_by(_entries.c.num)
    return [Entry(row.frame, _tokens(row.tokens)) for row in connection.execute(chosen)]


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
        num_entries=row.num_entries,
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
