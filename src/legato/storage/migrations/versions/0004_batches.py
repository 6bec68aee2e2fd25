"""Which usage each process has written, so that none is written twice."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "batches",
        sa.Column("writer", sa.Text, primary_key=True),
        sa.Column("num", sa.BigInteger, nullable=False),
        sa.Column("day", sa.Text, nullable=False),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("batches")
