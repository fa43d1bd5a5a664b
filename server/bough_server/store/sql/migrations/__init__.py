"""The schema's history: one Alembic revision per change. Only bough_server.store.sqlite.database runs them."""

from typing import Final

FIRST: Final = "0006"
"""The oldest revision that this version can upgrade. Earlier ones hold events in the previous wire format."""

HEAD: Final = "0009"
"""The revision that this version of the code reads and writes."""
