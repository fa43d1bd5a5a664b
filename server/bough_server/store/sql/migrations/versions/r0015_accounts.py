"""Adjustments of accounts, snapshots of what accounts were charged, and what runs have reserved."""

import sqlalchemy as sa
from alembic import op

from bough_server.store.sql.tables import NUMBER, TEXT

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Add the tables, the column and its index."""
    op.create_table(
        "adjustments",
        *(sa.Column(name, TEXT, primary_key=True) for name in ("tenant_id", "user_id", "request_id")),
        sa.Column("currency_code", TEXT, nullable=False),
        sa.Column("amount_nanos", NUMBER, nullable=False),
        sa.Column("note", TEXT, nullable=False),
        sa.Column("time_ns", NUMBER, nullable=False),
        sa.Column("made_by", TEXT, nullable=False),
        sqlite_with_rowid=False,
    )
    op.add_column("runs", sa.Column("reserved_nanos", NUMBER, server_default=sa.text("0"), nullable=False))
    is_reserving = sa.text("reserved_nanos != 0")
    op.create_index(
        "runs_reserving", "runs", ["tenant_id", "user_id"], sqlite_where=is_reserving, postgresql_where=is_reserving
    )
    op.create_index("adjustments_newest_first", "adjustments", ["tenant_id", "user_id", "time_ns", "request_id"])
    op.create_table(
        "account_snapshots",
        *(sa.Column(name, TEXT, primary_key=True) for name in ("tenant_id", "user_id", "currency_code")),
        sa.Column("before_ns", NUMBER, primary_key=True, autoincrement=False),
        sa.Column("charge_nanos", NUMBER, nullable=False),
        sqlite_with_rowid=False,
    )
