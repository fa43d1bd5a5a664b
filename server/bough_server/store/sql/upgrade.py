"""Upgrade a database's schema by its migrations."""

from pathlib import Path

from sqlalchemy import Connection

from bough_server.errors import ConfigurationError
from bough_server.store.sql import migrations
from bough_server.store.sql.migrations import HEAD


def upgrade_schema(connection: Connection, name: str, found: str) -> None:
    """Run the migrations from a revision on, in the connection's transaction.

    Raises ConfigurationError if this version does not know the revision; `name` is what it calls the database.
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
    command.upgrade(config, "head")


def build_upgrade_error(name: str, found: str | None) -> ConfigurationError:
    """Return the error of a server that must not change the schema, which this version needs changed."""
    state = "has no tables yet" if found is None else f"has revision {found}, and this version needs {HEAD}"
    return ConfigurationError(
        f"The database {name} {state}: run `bough db upgrade`, or set storage.upgrade_at_start to true."
    )
