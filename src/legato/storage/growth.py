"""Growth of a journal: the rows that one call adds to one generation, and the statements that add them.

It works within a transaction that the journal has opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from legato.storage import tables
from legato.storage.records import Entry, News, read_tokens, tokens_json, written_json
from legato.storage.usage import COUNTS, UsageRow

__all__ = ["FOR_END", "Growth", "new_usage", "read_entries", "remove", "write_growths"]

FOR_END = 1024
"""Bytes that a running generation reserves for the frames of a failure, so that they fit into a full journal."""
_PROGRESS = (
    sa.update(tables.generations)
    .where(tables.generations.c.id == sa.bindparam("of"))
    .values({name: sa.bindparam(f"new_{name}") for name in ("state", "num_entries", "num_bytes", *COUNTS)})
)


class Growth:
    """The news of one generation, less what its journal has already."""

    def __init__(self, row: sa.Row[Any], news: News) -> None:
        self.id: str = row.id
        self.end = news.end
        self._row = row
        self._news = news
        self._is_repeat = row.state != "running"
        """Whether these news were written before."""
        self._new_entries = [] if self._is_repeat else news.entries[max(0, row.num_entries + 1 - news.first) :]
        self.rows = [
            {"generation": row.id, "num": num, "frame": entry.frame, "tokens": tokens_json(entry.tokens)}
            for num, entry in enumerate(self._new_entries, row.num_entries + 1)
        ]
        self.usage = [] if self._is_repeat else new_usage(row, news.taken)
        self._texts: dict[str, Any] = {}
        if self.end is not None and not self._is_repeat:
            written = None if self.end.written is None else written_json(self.end.written)
            self._texts = {"answer": self.end.answer, "written": written}
        self.num_bytes = -FOR_END if self._texts else 0
        self.num_bytes += sum(len(row["frame"]) + len(row["tokens"]) for row in self.rows)
        self.num_bytes += sum(len(text) for text in self._texts.values() if text is not None)
        if self.is_refused:
            self.num_bytes = -row.num_bytes

    @property
    def is_refused(self) -> bool:
        """Whether the journal is removed."""
        return self.end is not None and self.end.state == "refused"

    def follows(self, connection: sa.Connection) -> bool:
        """Whether the entries continue those of the journal; overlapping ones must be equal."""
        if self._is_repeat:
            return True
        first, entries = self._news.first, self._news.entries
        there = read_entries(connection, self.id, first - 1) if self._row.num_entries >= first else []
        return first <= self._row.num_entries + 1 and there == [*entries[: len(there)]]

    def progress(self) -> dict[str, Any]:
        """Return the parameters of `_PROGRESS`."""
        row, taken = self._row, self._news.taken or self._row
        return {
            "of": self.id,
            "new_state": row.state if self.end is None else self.end.state,
            "new_num_entries": row.num_entries + len(self.rows),
            "new_num_bytes": row.num_bytes + self.num_bytes,
            **{f"new_{name}": max(getattr(row, name), getattr(taken, name)) for name in COUNTS},
        }

    def write_end(self, connection: sa.Connection) -> None:
        """Write the answer, or remove the journal of a refused generation."""
        if self.is_refused:
            remove(connection, self.id)
        elif self._texts:
            connection.execute(sa.update(tables.texts).where(tables.texts.c.generation == self.id).values(self._texts))


def write_growths(connection: sa.Connection, growths: Sequence[Growth]) -> None:
    """Write the news, without their usage."""
    rows = [row for growth in growths for row in growth.rows if not growth.is_refused]
    if rows:
        connection.execute(sa.insert(tables.entries), rows)
    if growths:
        connection.execute(_PROGRESS, [growth.progress() for growth in growths])
    for growth in growths:
        growth.write_end(connection)


def new_usage(row: sa.Row[Any], taken: UsageRow | None) -> list[UsageRow]:
    """Return the usage of a generation that was not counted yet."""
    if taken is None:
        return []
    counts = {name: max(0, getattr(taken, name) - getattr(row, name)) for name in COUNTS}
    return [replace(taken, **counts)] if any(counts.values()) else []


def remove(connection: sa.Connection, id: str) -> None:
    for column in (tables.entries.c.generation, tables.texts.c.generation, tables.generations.c.id):
        connection.execute(sa.delete(column.table).where(column == id))


def read_entries(connection: sa.Connection, id: str, after: int) -> list[Entry]:
    chosen = (
        sa.select(tables.entries)
        .where(tables.entries.c.generation == id, tables.entries.c.num > after)
        .order_by(tables.entries.c.num)
    )
    return [Entry(row.frame, read_tokens(row.tokens)) for row in connection.execute(chosen)]
