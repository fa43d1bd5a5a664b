"""Indexes of the runs, evaluations and sessions of one user, newest first."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Add the indexes."""
    for name, condition in (
        ("runs_of_user", "kind = 0 AND evaluation_role = 0"),
        ("evaluation_runs_of_user", "kind = 0 AND evaluation_role != 0"),
        ("evaluations_of_user", "kind = 1"),
    ):
        where = sa.text(condition)
        op.create_index(
            name,
            "runs",
            ["tenant_id", "user_id", "create_time_ns", "run_id"],
            sqlite_where=where,
            postgresql_where=where,
        )
    op.create_index("sessions_of_user", "sessions", ["tenant_id", "user_id", "create_time_ns", "session_id"])
