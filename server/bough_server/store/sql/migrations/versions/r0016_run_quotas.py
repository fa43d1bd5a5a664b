"""The index of runs by state holds what quotas on concurrent runs count."""

from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Make the index again with the kind and the user of a row."""
    op.drop_index("runs_by_state", "runs")
    columns = ["tenant_id", "state", "create_time_ns", "run_id", "kind", "user_id"]
    op.create_index("runs_by_state", "runs", columns)
