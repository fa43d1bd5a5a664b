"""The version of a database's schema: what an operator's command is told of it, and its upgrade by migrations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
from sqlalchemy import Connection, func, select

from bough_server.errors import ConfigurationError
from bough_server.store.sql import migrations, tables
from bough_server.store.sql.migrations import HEAD

_log = structlog.get_logger(__name__)

_runs, _workers = tables.runs.c, tables.workers.c

_OPEN_RUNS: Final = select(_runs.owner, func.count()).where(~_runs.ended, tables.IS_RUN).group_by(_runs.owner)
_LEASES: Final = select(_workers.worker, _workers.counter).order_by(_workers.worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStatus:
    """The lease of a worker, which is one start of a server."""

    worker: str
    open_runs: int
    """Runs that it owns and that have not ended."""
    is_dead: bool
    """True if the worker died without releasing it; its runs are continued by others, or by the next server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseUse:
    """Who uses a database, and how many runs in it have not ended."""

    servers: int
    """Processes that have it open."""
    open_runs: int
    leases: Sequence[LeaseStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """A database and the revision of its schema; None for one that is missing or empty."""

    name: str
    """The path of a file; a URL without its password."""
    revision: str | None
    head: str
    size_bytes: int
    use: DatabaseUse | None = None
    """None unless the schema is current."""

    @property
    def is_current(self) -> bool:
        """True if this version reads and writes it without an upgrade."""
        return self.revision == self.head


def read_use(connection: Connection, *, servers: int) -> DatabaseUse:
    """Read who uses a database with a current schema, by `servers` processes as its locks say."""
    open_runs = dict(connection.execute(_OPEN_RUNS).tuples().all())
    leases = [
        # A worker that others found lost has a counter below zero.
        LeaseStatus(worker=worker, open_runs=open_runs.get(worker, 0), is_dead=counter < 0 or not servers)
        for worker, counter in connection.execute(_LEASES).tuples()
    ]
    return DatabaseUse(servers=servers, open_runs=sum(open_runs.values()), leases=leases)


def upgrade_schema(
    connection: Connection, name: str, found: str, *, back_up: Callable[[], Path | None] = lambda: None
) -> None:
    """Run the migrations from a revision on, in the connection's transaction, and log it with the copy from before.

    `back_up` makes that copy, if there is to be one. Raises ConfigurationError if this version does not know the
    revision; `name` is what it calls the database.
    """
    from alembic import command  # slow to import, and not needed if the schema is current
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    # The configuration interpolates "%", so one in the path must be doubled.
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found not in known:
        raise ConfigurationError(
            f"The database {name} has revision {found}, which is newer than {HEAD}, the newest that this "
            "version of bough knows: use the newer version, or name another database."
        )
    backup = back_up()
    command.upgrade(config, "head")
    kept = {} if backup is None else {"backup": str(backup)}
    # A warning, so that commands with a server inside say it too: an older version cannot use the database any more.
    _log.warning("upgraded the database", database=name.strip("'"), **{"from": found, "to": HEAD}, **kept)


def build_upgrade_error(name: str, found: str | None) -> ConfigurationError:
    """Return the error of a server that must not change the schema, which this version needs changed."""
    state = "has no tables yet" if found is None else f"has revision {found}, and this version needs {HEAD}"
    return ConfigurationError(f"The database {name} {state}: run `bough db upgrade`.")
