"""The tables of the database. A change here needs a new version in `migrations`."""

import sqlalchemy as sa

__all__ = ["batches", "entries", "generations", "keys", "metadata", "room", "spent", "texts", "usage"]

metadata = sa.MetaData()
keys = sa.Table(
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
spent = sa.Table(
    "spent",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("window", sa.Text, primary_key=True),
    sa.Column("requests", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)
usage = sa.Table(
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
batches = sa.Table(
    "batches",
    metadata,
    sa.Column("writer", sa.Text, primary_key=True),
    sa.Column("num", sa.BigInteger, nullable=False),
    sa.Column("day", sa.Text, nullable=False),
)
"""The last batch of usage that each process has written, and when."""
generations = sa.Table(
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
texts = sa.Table(
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
entries = sa.Table(
    "entries",
    metadata,
    sa.Column("generation", sa.Text, primary_key=True),
    sa.Column("num", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("frame", sa.LargeBinary, nullable=False),
    sa.Column("tokens", sa.Text, nullable=False),
)
room = sa.Table(
    "room",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("num_bytes", sa.BigInteger, nullable=False),
)
"""One row: the bytes of all journals together."""
