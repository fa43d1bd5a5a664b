"""Agents that calls store: their definitions by tenant and name, and how often each tenant's were changed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Makes the two tables."""
    op.create_table(
        "agents",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("name", sa.String(), primary_key=True, nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "catalogs",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sqlite_with_rowid=False,
    )
