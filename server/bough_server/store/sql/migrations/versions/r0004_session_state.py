"""The values that a session's runs share, and the run whose log makes them."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_KEPT = "session_id, tenant_id, user_id, labels, create_time_ns, update_time_ns, current_run_id, last_position"


def upgrade() -> None:
    """Makes the table of sessions again with its new columns, empty in all that there are."""
    op.rename_table("sessions", "sessions_before")
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("create_time_ns", sa.Integer(), nullable=False),
        sa.Column("update_time_ns", sa.Integer(), nullable=False),
        sa.Column("current_run_id", sa.String(), nullable=False),
        sa.Column("last_position", sa.Integer(), nullable=False),
        sa.Column("state_json", sa.String(), nullable=False),
        sa.Column("state_run_id", sa.String(), nullable=False),
    )
    op.execute(f"INSERT INTO sessions ({_KEPT}, state_json, state_run_id) SELECT {_KEPT}, '', '' FROM sessions_before")
    op.drop_table("sessions_before")
    op.create_index("sessions_newest_first", "sessions", ["tenant_id", "create_time_ns", "session_id"])
