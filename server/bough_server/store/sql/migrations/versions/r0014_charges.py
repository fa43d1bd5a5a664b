"""Charges and starts of runs in the usage ledger, and indexes that hold all that its sums need."""

import sqlalchemy as sa
from alembic import op

from bough_server.store.sql.tables import NUMBER

revision = "0014"
down_revision = "0013"

_SUMMED = (
    *("kind", "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
    *("total_tokens", "cost_nanos", "charge_nanos", "currency_code"),
)


def upgrade() -> None:
    """Add the columns and the indexes. Servers of the version before write no charge, and lines of attempts only."""
    op.add_column("usage_entries", sa.Column("kind", NUMBER, server_default=sa.text("0"), nullable=False))
    op.add_column("usage_entries", sa.Column("charge_nanos", NUMBER, nullable=True))
    op.drop_index("usage_of_tenant", "usage_entries")
    op.create_index("usage_of_tenant", "usage_entries", ["tenant_id", "time_ns", *_SUMMED])
    op.create_index("usage_of_user", "usage_entries", ["tenant_id", "user_id", "time_ns", *_SUMMED])
