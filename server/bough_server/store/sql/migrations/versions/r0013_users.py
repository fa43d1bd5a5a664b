"""Indexes of the runs, evaluations and sessions of one user, and of the runs that ask something."""

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
    is_asking = sa.text("open_requests IS NOT NULL")
    op.create_index(
        "runs_asking",
        "runs",
        ["tenant_id", "create_time_ns", "run_id"],
        sqlite_where=is_asking,
        postgresql_where=is_asking,
    )
    op.create_index("sessions_of_user", "sessions", ["tenant_id", "user_id", "create_time_ns", "session_id"])
