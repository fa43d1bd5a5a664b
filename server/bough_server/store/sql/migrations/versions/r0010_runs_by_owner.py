"""An index of the runs that are executed, by their owner, and no owner for the runs of one that released its lease."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the index, and let any server take the runs whose owner has no lease."""
    is_executed = sa.text("NOT ended AND state != 6")
    op.create_index(
        "runs_by_owner", "runs", ["owner", "create_time_ns"], sqlite_where=is_executed, postgresql_where=is_executed
    )
    op.execute("UPDATE runs SET owner = '' WHERE NOT ended AND owner NOT IN (SELECT worker FROM workers)")
