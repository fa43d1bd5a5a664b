"""The first schema: the log, and the tables derived from it."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    _make_events()
    _make_runs()
    _make_commands()
    _make_workers()
    _make_sessions()
    _make_usage()
    _make_agents()


def _make_events() -> None:
    op.create_table(
        "events",
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sequence", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("kind", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sqlite_with_rowid=False,
    )


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
        sa.Column("input_excerpt", sa.String(), nullable=False),
        sa.Column("start_time_ns", sa.Integer(), nullable=True),
        sa.Column("end_time_ns", sa.Integer(), nullable=True),
        sa.Column("deadline_time_ns", sa.Integer(), nullable=True),
        sa.Column("error", sa.LargeBinary(), nullable=True),
        sa.Column("tree_usage", sa.LargeBinary(), nullable=False),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("request_digest", sa.String(), nullable=False),
        sa.Column("open_requests", sa.LargeBinary(), nullable=True),
        sa.Column("next_expire_time_ns", sa.Integer(), nullable=True),
        sa.Column("origin_run_id", sa.String(), nullable=False),
        sa.Column("origin_sequence", sa.Integer(), nullable=False),
    )
    _index_runs()


def _index_runs() -> None:
    op.create_index(
        "runs_by_expiry", "runs", ["next_expire_time_ns"], sqlite_where=sa.text("next_expire_time_ns IS NOT NULL")
    )
    op.create_index(
        "runs_by_request",
        "runs",
        ["tenant_id", "user_id", "request_id"],
        unique=True,
        sqlite_where=sa.text("request_id != ''"),
    )
    op.create_index("runs_newest_first", "runs", ["tenant_id", "create_time_ns", "run_id"])
    op.create_index("runs_of_session", "runs", ["tenant_id", "session_id", "create_time_ns", "run_id"])
    op.create_index("runs_of_agent", "runs", ["tenant_id", "agent", "create_time_ns", "run_id"])
    op.create_index("runs_by_state", "runs", ["tenant_id", "state", "create_time_ns", "run_id"])
    op.create_index("runs_open", "runs", ["create_time_ns"], sqlite_where=sa.text("NOT ended"))
    op.create_index(
        "runs_waiting",
        "runs",
        ["tenant_id", "session_id", "state", "create_time_ns", "run_id"],
        sqlite_where=sa.text("state = 1"),
    )


def _make_commands() -> None:
    op.create_table(
        "run_commands",
        sa.Column("command_id", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("cancel", sa.LargeBinary(), nullable=True),
        sa.Column("answers", sa.LargeBinary(), nullable=True),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("deadline_time_ns", sa.Integer(), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_index("commands_of_run", "run_commands", ["run_id", "command_id"])


def _make_workers() -> None:
    op.create_table(
        "workers",
        sa.Column("worker", sa.String(), primary_key=True, nullable=False),
        sa.Column("counter", sa.Integer(), nullable=False),
        sqlite_with_rowid=False,
    )


def _make_sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("session_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("labels", sa.String(), nullable=False),
        sa.Column("create_time_ns", sa.Integer(), nullable=False),
        sa.Column("last_run_time_ns", sa.Integer(), nullable=True),
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("request_digest", sa.String(), nullable=False),
        sa.Column("current_run_id", sa.String(), nullable=False),
        sa.Column("last_position", sa.Integer(), nullable=False),
        sa.Column("state_json", sa.String(), nullable=False),
        sa.Column("state_run_id", sa.String(), nullable=False),
    )
    op.create_index(
        "sessions_by_request",
        "sessions",
        ["tenant_id", "user_id", "request_id"],
        unique=True,
        sqlite_where=sa.text("request_id != ''"),
    )
    op.create_index("sessions_newest_first", "sessions", ["tenant_id", "create_time_ns", "session_id"])
    op.create_table(
        "messages",
        sa.Column("tenant_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("session_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("position", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("agent", sa.String(), nullable=False),
        sa.Column("chain", sa.String(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sqlite_with_rowid=False,
    )


def _make_usage() -> None:
    op.create_table(
        "usage_entries",
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("sequence", sa.Integer(), primary_key=True, nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("user_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("agent", sa.String(), nullable=False),
        sa.Column("invocation_id", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("time_ns", sa.Integer(), nullable=False),
        sa.Column("input_tokens", sa.Integer(), nullable=True),
        sa.Column("cached_input_tokens", sa.Integer(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("reasoning_tokens", sa.Integer(), nullable=True),
        sa.Column("total_tokens", sa.Integer(), nullable=True),
        sa.Column("model_calls", sa.Integer(), nullable=False),
        sa.Column("model_calls_without_usage", sa.Integer(), nullable=False),
        sa.Column("cost_nanos", sa.Integer(), nullable=True),
        sa.Column("currency_code", sa.String(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("usage_of_tenant", "usage_entries", ["tenant_id", "time_ns"])


def _make_agents() -> None:
    op.create_table(
        "definitions",
        sa.Column("revision", sa.String(), primary_key=True, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    op.create_table(
        "run_definitions",
        sa.Column("run_id", sa.String(), primary_key=True, nullable=False),
        sa.Column("revision", sa.String(), primary_key=True, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("runs_of_definition", "run_definitions", ["revision"])
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
