"""Databases as an older version left them."""

from bough_server.store.sqlite.database_path import is_postgres
from tests.store.sql import execute

BEFORE_LABELS = "0011"
BEFORE_CHARGES = "0013"

CHARGES_UNDONE = (
    "DROP INDEX runs_by_state",
    "CREATE INDEX runs_by_state ON runs (tenant_id, state, create_time_ns, run_id)",
    "DROP TABLE adjustments",
    "DROP TABLE account_snapshots",
    "DROP INDEX runs_reserving",
    "ALTER TABLE runs DROP COLUMN reserved_nanos",
    "DELETE FROM usage_entries WHERE kind != 0",
    "DROP INDEX usage_of_user",
    "DROP INDEX usage_of_tenant",
    "ALTER TABLE usage_entries DROP COLUMN kind",
    "ALTER TABLE usage_entries DROP COLUMN charge_nanos",
    "CREATE INDEX usage_of_tenant ON usage_entries (tenant_id, time_ns)",
)


def undo_labels(url: str) -> None:
    """Undo the newest migrations: charges, the indexes of users, and that of labels."""
    undo_charges(url)
    for trigger in (f"{table}_labels_{change}" for table in ("runs", "sessions") for change in _CHANGES):
        execute(url, f"DROP FUNCTION {trigger} CASCADE" if is_postgres(url) else f"DROP TRIGGER {trigger}")
    execute(url, "DROP TABLE labels")
    for index in _INDEXES:
        execute(url, f"DROP INDEX {index}")
    execute(url, f"UPDATE alembic_version SET version_num = '{BEFORE_LABELS}'")


def undo_charges(url: str) -> None:
    """Undo the newest migrations: the index of states, accounts, columns of charges and starts, the indexes of sums."""
    for statement in CHARGES_UNDONE:
        execute(url, statement)
    execute(url, f"UPDATE alembic_version SET version_num = '{BEFORE_CHARGES}'")


_CHANGES = ("insert", "update", "delete")
_INDEXES = ("runs_of_user", "evaluation_runs_of_user", "evaluations_of_user", "sessions_of_user", "runs_asking")
