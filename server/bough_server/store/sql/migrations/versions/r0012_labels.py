"""An index of the labels of runs, evaluations and sessions, which triggers keep."""

import sqlalchemy as sa
from alembic import op

from bough_server.store.sql.label_index import fill_index, list_triggers
from bough_server.store.sql.tables import NUMBER, TEXT

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the table with the labels of all rows that there are, and the triggers."""
    op.create_table(
        "labels",
        sa.Column("tenant_id", TEXT, primary_key=True),
        sa.Column("kind", NUMBER, primary_key=True),
        sa.Column("key", TEXT, primary_key=True),
        sa.Column("value", TEXT, primary_key=True),
        sa.Column("create_time_ns", NUMBER, primary_key=True),
        sa.Column("name", TEXT, primary_key=True),
        sqlite_with_rowid=False,
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":  # in the order in which servers, which may run, lock them
        op.execute("LOCK TABLE sessions, runs IN SHARE ROW EXCLUSIVE MODE")
    # The triggers first: what a server writes in between would be missing in the index.
    for statement in list_triggers(connection.dialect.name):
        connection.exec_driver_sql(statement)
    fill_index(connection)
