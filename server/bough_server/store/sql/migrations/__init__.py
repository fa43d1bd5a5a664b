"""The schema's history: one Alembic revision a change, run by bough_server.store.sql.database and by nothing else."""

from typing import Final

FIRST: Final = "0006"
"""The oldest revision that is read. Those before it are of the wire format before it was renewed."""

HEAD: Final = "0006"
"""The revision that this version of the code reads and writes."""
