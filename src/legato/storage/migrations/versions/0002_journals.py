"""Journals of resumable generations."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "generations",
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
    op.create_table(
        "entries",
        sa.Column("generation", sa.Text, primary_key=True),
        sa.Column("num", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("frame", sa.LargeBinary, nullable=False),
        sa.Column("tokens", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the tables."""
    for name in ("entries", "generations"):
        op.drop_table(name)
