"""Usage and limits: their values, the days, minutes and months that they count in, and statements that add counts."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from legato.errors import BudgetSpent, RateLimited
from legato.storage import tables
from legato.storage.keys import Key

__all__ = ["COUNTS", "Batch", "Charge", "UsageRow", "add_usage", "adding", "check_limits", "day_of", "minute_of"]


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
    """Rows that a process adds to usage at once. A batch that is written twice is added once."""

    writer: str
    num: int
    """Counts the batches of this writer, from 1."""
    rows: tuple[UsageRow, ...]

    def __iter__(self) -> Iterator[UsageRow]:
        """Return its rows."""
        return iter(self.rows)


COUNTS = tuple(option.name for option in fields(UsageRow) if option.name not in ("day", "key", "model"))
"""What is counted, by its names in `UsageRow`."""


def add_usage(connection: sa.Connection, rows: Iterable[UsageRow]) -> None:
    """Add to usage, within a transaction that writes."""
    sums: dict[tuple[str, str, str], UsageRow] = {}
    for row in rows:
        place = (row.day, row.key, row.model)
        sums[place] = sums[place] + row if place in sums else row
    if sums:
        # Sorted, here and in `charge`: transactions that lock rows in different orders would deadlock.
        values = [asdict(sums[place]) for place in sorted(sums)]
        connection.execute(adding(connection.dialect.name, tables.usage), values)


@cache
def adding(dialect: str, table: sa.Table) -> Any:
    """Return a statement that inserts rows, or adds their counts to existing rows."""
    insert = (sqlite.insert if dialect == "sqlite" else postgresql.insert)(table)
    counts = {column.name: column + insert.excluded[column.name] for column in table.c if not column.primary_key}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=counts)


def check_limits(key: Key, tokens: int, in_minute: tuple[int, int], in_month: int, now: float) -> None:
    """Refuse a request beyond a limit. `in_minute`: requests and tokens so far; `in_month`: tokens so far."""
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


def day_of(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def minute_of(now: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M", time.gmtime(now))


def _month_ends_in(now: float) -> int:
    today = time.gmtime(now)
    days = calendar.monthrange(today.tm_year, today.tm_mon)[1]
    return calendar.timegm((today.tm_year, today.tm_mon, days, 24, 0, 0)) - int(now)
