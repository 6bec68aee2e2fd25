"""Journals: leases by a beat instead of a time, what is long apart from what changes, all bytes and tokens counted."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make the tables anew, since not every SQLite drops columns, and move what is there."""
    op.drop_index("ix_generations_state", "generations")
    op.rename_table("generations", "old_generations")
    counts = ("beat", "num_visits", "num_entries", "num_bytes")
    taken = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    op.create_table(
        "generations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in (*counts, *taken)),
    )
    op.create_index("ix_generations_state", "generations", ["state", "created_at"])
    op.create_table(
        "texts",
        sa.Column("generation", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("path", "body", "before", "job")),
        sa.Column("answer", sa.LargeBinary),
        sa.Column("written", sa.Text),
    )
    op.create_table(
        "room",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
    )
    op.execute(
        "INSERT INTO texts (generation, path, body, before, job, answer, written) "
        "SELECT id, path, body, before, job, answer, written FROM old_generations"
    )
    op.execute(
        "INSERT INTO generations (id, key, created_at, state, owner, beat, num_visits, num_entries, num_bytes, "
        "requests, prompt_tokens, cached_tokens, completion_tokens) "
        "SELECT g.id, g.key, g.created_at, g.state, g.owner, 0, 0, "
        "(SELECT count(*) FROM entries e WHERE e.generation = g.id), "
        "length(g.path) + length(g.body) + length(g.before) + length(g.job) + coalesce(length(g.answer), 0) "
        "+ coalesce(length(g.written), 0) + CASE WHEN g.state = 'running' THEN 1024 ELSE 0 END "
        "+ (SELECT coalesce(sum(length(e.frame) + length(e.tokens)), 0) FROM entries e WHERE e.generation = g.id), "
        "0, 0, 0, 0 FROM old_generations g"
    )
    op.execute("INSERT INTO room (id, num_bytes) SELECT 1, coalesce(sum(num_bytes), 0) FROM generations")
    op.drop_table("old_generations")
    _count_running(op.get_bind())


def _count_running(connection: sa.Connection) -> None:
    """Note what was counted of those that go on: that is no more counted apart from them."""
    jobs = "SELECT g.id, t.job FROM generations g JOIN texts t ON t.generation = g.id WHERE g.state = 'running'"
    for id, job in connection.execute(sa.text(jobs)).all():
        tokens = connection.execute(sa.text("SELECT tokens FROM entries WHERE generation = :id"), {"id": id}).scalars()
        values = {
            "id": id,
            "prompt": json.loads(job).get("prompt", {}).get("num_tokens", 0),
            "completion": sum(len(json.loads(text)) for text in tokens),
        }
        connection.execute(
            sa.text(
                "UPDATE generations SET requests = 1, prompt_tokens = :prompt, completion_tokens = :completion "
                "WHERE id = :id"
            ),
            values,
        )
