"""The schema's history: one Alembic revision a change, run by bough_server.store.sql.database and by nothing else."""

from typing import Final

HEAD: Final = "0005"
"""The revision that this version of the code reads and writes."""
