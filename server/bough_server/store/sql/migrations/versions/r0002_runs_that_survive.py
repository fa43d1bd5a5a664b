"""Owners, questions, forks and queued runs: what a run's row says of them; leases and letters."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_KEPT = (
    "run_id, tenant_id, user_id, session_id, create_time_ns, epoch, last_sequence, ended, agent, state, labels, "
    "start_time_ns, end_time_ns, error, tree_usage, request_id, request_digest"
)


def upgrade() -> None:
    """Makes the table of runs again with its new columns, and the two new tables."""
    op.rename_table("runs", "runs_before")
    _make_runs()
    op.execute(
        f"INSERT INTO runs ({_KEPT}, owner, origin_run_id, origin_sequence) SELECT {_KEPT}, '', '', 0 FROM runs_before"
    )
    op.drop_table("runs_before")
    _index_runs()
    op.create_table(
        "workers",
        sa.Column("worker", sa.String(), primary_key=True, nullable=False),
        sa.Column("counter", sa.Integer(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "letters",
        sa.Column("letter_id", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("cancel", sa.Integer(), nullable=False),
        sa.Column("answers", sa.LargeBinary(), nullable=True),
        sa.Column("user_id", sa.String(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("letters_of_run", "letters", ["run_id", "letter_id"])


def _make_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("create_time_ns", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("last_sequence", sa.Integer(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("agent", sa.String(), nullable=False),
        sa.Column("state", sa.Integer(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("start_time_ns", sa.Integer(), nullable=True),
        sa.Column("end_time_ns", sa.Integer(), nullable=True),
        sa.Column("error", sa.LargeBinary(), nullable=True),
        sa.Column("tree_usage", sa.LargeBinary(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("request_digest", sa.String(), nullable=False),
        sa.Column("open_requests", sa.LargeBinary(), nullable=True),
        sa.Column("next_expire_time_ns", sa.Integer(), nullable=True),
        sa.Column("origin_run_id", sa.String(), nullable=False),
        sa.Column("origin_sequence", sa.Integer(), nullable=False),
    )


def _index_runs() -> None:
    op.create_index("runs_newest_first", "runs", ["tenant_id", "create_time_ns", "run_id"])
    op.create_index("runs_of_session", "runs", ["session_id", "create_time_ns"])
    op.create_index("runs_open", "runs", ["create_time_ns"], sqlite_where=sa.text("NOT ended"))
    op.create_index(
        "runs_by_request", "runs", ["tenant_id", "request_id"], unique=True, sqlite_where=sa.text("request_id != ''")
    )
    op.create_index(
        "runs_waiting", "runs", ["session_id", "create_time_ns", "run_id"], sqlite_where=sa.text("state = 1")
    )
    op.create_index(
        "runs_by_expiry", "runs", ["next_expire_time_ns"], sqlite_where=sa.text("next_expire_time_ns IS NOT NULL")
    )
