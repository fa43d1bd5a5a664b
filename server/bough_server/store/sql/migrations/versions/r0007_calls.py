"""The calls of linked agents, which agents of scope CALLS see in later runs."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Create the table, empty: `bough db rebuild` fills it from the logs of earlier runs."""
    op.create_table(
        "calls",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("session_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("position", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sequence", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("agent", sa.String(), nullable=False),
        sa.Column("chain", sa.String(), nullable=False),
        sa.Column("inside", sa.String(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sqlite_with_rowid=False,
    )
