"""Evaluations, beside runs in the same tables, and the evaluation that a run belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"

_NUMBER = sa.text("0")
_TEXT = sa.text("''")


def upgrade() -> None:
    """Add the columns, with which every earlier row is a run of no evaluation, and make indexes tell kinds apart."""
    op.add_column("runs", sa.Column("kind", sa.Integer(), server_default=_NUMBER, nullable=False))
    for name in ("evaluation_id", "case_id", "set_name"):
        op.add_column("runs", sa.Column(name, sa.String(), server_default=_TEXT, nullable=False))
    op.add_column("runs", sa.Column("totals", sa.LargeBinary(), nullable=True))
    op.add_column("runs", sa.Column("verdict", sa.Integer(), server_default=_NUMBER, nullable=False))
    op.drop_index("runs_by_request", "runs")
    has_request = sa.text("request_id != ''")
    by_request = ["tenant_id", "user_id", "kind", "request_id"]
    op.create_index("runs_by_request", "runs", by_request, unique=True, sqlite_where=has_request)
    newest = ["create_time_ns", "run_id"]
    op.drop_index("runs_newest_first", "runs")
    op.create_index("runs_newest_first", "runs", ["tenant_id", *newest], sqlite_where=sa.text("kind = 0"))
    of_one = sa.text("evaluation_id != ''")
    op.create_index("runs_of_evaluation", "runs", ["tenant_id", "evaluation_id", *newest], sqlite_where=of_one)
    evaluations = sa.text("kind = 1")
    op.create_index("evaluations_newest_first", "runs", ["tenant_id", *newest], sqlite_where=evaluations)
    op.create_index("evaluations_of_set", "runs", ["tenant_id", "set_name", *newest], sqlite_where=evaluations)
