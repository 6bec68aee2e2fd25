"""The values that a journal stores and returns, and their JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from legato.storage.usage import UsageRow
from legato.types import ScoredToken, Token

__all__ = [
    "End",
    "Entry",
    "Lease",
    "News",
    "Record",
    "Verdict",
    "Written",
    "new_id",
    "read_record",
    "read_tokens",
    "tokens_json",
    "written_json",
]


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
    """The request's body."""
    before: Written
    """The text of earlier generations that this one continues, after the request's own text."""
    job: str
    """The Job, as JSON; see `Job.to_json`."""
    created_at: int
    state: str = "running"
    """`running`, `done`, `failed` or `cancelled`."""
    answer: bytes | None = None
    """The whole body of the answer, once it is done."""
    written: Written | None = None
    num_entries: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A frame of the answer, and the tokens that were generated since the frame before."""

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
    """News of a generation: entries from the number `first` on, and its end, if it has ended."""

    first: int
    entries: Sequence[Entry]
    end: End | None = None
    taken: UsageRow | None = None
    """Its whole usage so far, with the day and the model to count it under."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The generations whose news were not written."""

    lost: set[str] = field(default_factory=set)
    """This process no longer owns them: they were deleted, or another process has adopted them."""
    full: set[str] = field(default_factory=set)
    """The journals have no room for more of them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The owner of a running generation."""

    id: str
    key: str
    owner: str
    beat: int
    """Grows with each renewal; 0: its owner has released it."""


def new_id() -> str:
    """Return an id that cannot be guessed."""
    return f"gen-{secrets.token_urlsafe(24)}"


def read_record(row: Any) -> Record:
    return Record(
        id=row.id,
        key=row.key,
        path=row.path,
        body=json.loads(row.body),
        before=_read_written(row.before),
        job=row.job,
        created_at=row.created_at,
        state=row.state,
        answer=row.answer,
        written=None if row.written is None else _read_written(row.written),
        num_entries=row.num_entries,
    )


def written_json(written: Written) -> str:
    return json.dumps([written.text, written.reasoning])


def _read_written(text: str) -> Written:
    return Written(*json.loads(text))


def tokens_json(tokens: Sequence[Token]) -> str:
    rows = [
        [token.id, token.data.hex(), token.logprob, [[one.id, one.data.hex(), one.logprob] for one in token.top]]
        for token in tokens
    ]
    return json.dumps(rows, separators=(",", ":"))


def read_tokens(text: str) -> tuple[Token, ...]:
    return tuple(
        Token(id, bytes.fromhex(data), logprob, tuple(ScoredToken(i, bytes.fromhex(d), p) for i, d, p in top))
        for id, data, logprob, top in json.loads(text)
    )
