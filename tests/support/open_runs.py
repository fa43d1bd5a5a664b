"""The runs of a store that have not ended, for tests that look at all of them."""

from collections.abc import Sequence

from sqlalchemy import select

from bough_server.store.ports.runs import RunRow
from bough_server.store.sql import tables
from bough_server.store.sql.runs import to_run_row
from bough_server.store.sql.store import Store

_OPEN = (
    select(tables.runs)
    .where(~tables.runs.c.ended, tables.IS_RUN)
    .order_by(tables.runs.c.create_time_ns, tables.runs.c.run_id)
)


async def open_runs(store: Store) -> Sequence[RunRow]:
    """Return every run of every tenant that has not ended, oldest first, including those that wait for input."""
    return await store.write(lambda connection: [to_run_row(row) for row in connection.execute(_OPEN)])
