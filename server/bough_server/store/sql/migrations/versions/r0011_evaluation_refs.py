"""What a run is in its evaluation, tokens written to caches; evaluations in the format of before are dropped."""

import sqlalchemy as sa
import structlog
from alembic import op

revision = "0011"
down_revision = "0010"

_OF_EVALUATIONS = "SELECT run_id FROM runs WHERE kind = 1"

_NUMBER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")

_log = structlog.get_logger(__name__)


def upgrade() -> None:
    """Drop the evaluations, add the columns, and make the indexes of lists tell runs of evaluations from others.

    The runs of a dropped evaluation are kept, as any runs: their logs do not say what they were in it in a form that
    this version reads.
    """
    dropped = op.get_bind().execute(sa.text("SELECT count(*) FROM runs WHERE kind = 1")).scalar_one()
    for table in ("events", "run_commands"):
        op.execute(f"DELETE FROM {table} WHERE run_id IN ({_OF_EVALUATIONS})")
    op.execute("DELETE FROM runs WHERE kind = 1")
    if dropped:
        _log.warning("dropped evaluations in the format of an older version", evaluations=dropped)
    op.execute("UPDATE runs SET evaluation_id = '', case_id = '' WHERE evaluation_id != ''")
    op.add_column("runs", sa.Column("evaluation_role", _NUMBER, server_default=sa.text("0"), nullable=False))
    op.add_column("runs", sa.Column("evaluation", sa.LargeBinary(), nullable=True))
    op.add_column("usage_entries", sa.Column("cache_write_tokens", _NUMBER, nullable=True))
    op.drop_index("evaluations_of_set", "runs")
    op.drop_index("runs_newest_first", "runs")
    op.execute("ALTER TABLE runs RENAME COLUMN set_name TO eval_set_name")
    newest = ["create_time_ns", "run_id"]
    for name, columns, condition in (
        ("evaluations_of_set", ["tenant_id", "eval_set_name", *newest], "kind = 1"),
        ("runs_newest_first", ["tenant_id", *newest], "kind = 0 AND evaluation_role = 0"),
        ("runs_of_evaluations", ["tenant_id", *newest], "kind = 0 AND evaluation_role != 0"),
    ):
        where = sa.text(condition)
        op.create_index(name, "runs", columns, sqlite_where=where, postgresql_where=where)
