"""The schema's history: one Alembic revision per change. bough_server.store.sql.schema_version runs them."""

from typing import Final

FIRST: Final = "0006"
"""The oldest revision that this version can upgrade. Earlier ones hold events in the previous wire format."""

FIRST_ON_POSTGRES: Final = "0009"
"""The first revision that PostgreSQL had; its tables are made as they are now, without the migrations before."""

HEAD: Final = "0016"
"""The revision that this version of the code reads and writes."""
