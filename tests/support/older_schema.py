"""Databases as an older version left them."""

from bough_server.store.sqlite.database_path import is_postgres
from tests.store.sql import execute

BEFORE_LABELS = "0011"


def undo_labels(url: str) -> None:
    """Undo the newest migrations: the indexes of users, and that of labels."""
    for trigger in (f"{table}_labels_{change}" for table in ("runs", "sessions") for change in _CHANGES):
        execute(url, f"DROP FUNCTION {trigger} CASCADE" if is_postgres(url) else f"DROP TRIGGER {trigger}")
    execute(url, "DROP TABLE labels")
    for index in _INDEXES:
        execute(url, f"DROP INDEX {index}")
    execute(url, f"UPDATE alembic_version SET version_num = '{BEFORE_LABELS}'")


_CHANGES = ("insert", "update", "delete")
_INDEXES = ("runs_of_user", "evaluation_runs_of_user", "evaluations_of_user", "sessions_of_user", "runs_asking")
