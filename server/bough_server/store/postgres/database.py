"""The PostgreSQL database: its engines, its schema and the revision of it."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool

from bough_server.clock import SystemClock
from bough_server.errors import ConfigurationError, DatabaseUnreachable
from bough_server.ids import new_uuid4
from bough_server.store.ports.log import StoredEvent
from bough_server.store.postgres.driver import WRITER
from bough_server.store.sql.failure_log import cause_of
from bough_server.store.sql.followed_logs import Growth
from bough_server.store.sql.migrations import FIRST_ON_POSTGRES, HEAD
from bough_server.store.sql.options import Durability
from bough_server.store.sql.schema_version import DatabaseStatus, build_upgrade_error, read_use, upgrade_schema
from bough_server.store.sql.tables import metadata
from bough_server.store.window import PAGE_BYTES, PAGE_EVENTS

_MIGRATION_LOCK: Final = 0x626F7567_00000001
"""The key of the advisory lock under which a server reads and changes the schema."""

_USE_LOCK: Final = 0x626F7567_00000002
"""The key of the advisory lock that every server shares as long as it uses the database.

A command that needs the database for itself takes the whole of it.
"""

_OTHERS: Final = text(
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = :high AND objid = :low AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid != pg_backend_pid()"
)
"""The connections of other servers."""

_LOCK_SECONDS: Final = 60
"""How long a server waits for another one's migration."""

_HANDOVER_SECONDS: Final = 2.0
"""How long a server or a command that has just ended may still have the database: PostgreSQL ends connections later."""

_CONNECT_SECONDS: Final = 10

_END_SECONDS: Final = 5.0
"""How long a new connection waits until the one that it replaces has ended."""

_LISTEN_TIMEOUT: Final = 5.0
"""Seconds that a notification may wait for a lock."""

_KEEPALIVES: Final = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

_FULL: Final = re.compile("too many (clients|connections)|connection slots are reserved")
"""What PostgreSQL says if it has no connection left, in English; psycopg has no code of errors while it connects."""

_GROWTH: Final = text("""
WITH found AS (
  SELECT w.run_id, r.last_sequence, r.epoch, e.sequence, e.kind, e.data, coalesce(e.sequence - w.after, 0) AS place,
    sum(octet_length(e.data)) OVER (ORDER BY coalesce(e.sequence - w.after, 0), w.run_id ROWS UNBOUNDED PRECEDING)
      - octet_length(e.data) AS before
  FROM unnest(CAST(:runs AS text[]), CAST(:ends AS bigint[])) AS w(run_id, after)
  JOIN runs r ON r.run_id = w.run_id
  LEFT JOIN LATERAL (
    SELECT * FROM events WHERE run_id = w.run_id AND sequence > w.after AND r.last_sequence > w.after
    ORDER BY sequence LIMIT :count
  ) e ON true
)
SELECT run_id, last_sequence, epoch, sequence, kind, data FROM found
WHERE sequence IS NULL OR before <= :bytes ORDER BY run_id, sequence
""")
"""The events of each log after the last that is known of it, the first ones of every log before the second ones.

A row of a log without such an event has no data. Lengths of values are known without reading them.
"""

_REFUSED: Final = re.compile(r"FATAL:(?!\s+the database system is )")
"""How PostgreSQL begins to say why it refuses a connection, but for "... is starting up" and the like."""

_SYNCHRONOUS: Final = {"disk": "on", "process": "off"}


def _set_index_conditions() -> None:
    """Give indexes the conditions that they have in SQLite; here, because it loads PostgreSQL's dialect."""
    for table in metadata.tables.values():
        for index in table.indexes:
            index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"]


_set_index_conditions()


def parse_url(url: str) -> URL:
    """Return a storage URL for SQLAlchemy. Raises ConfigurationError, which never shows the password."""
    try:
        found = make_url(url.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "The storage URL is not one of PostgreSQL: use postgresql://USER@HOST:PORT/DATABASE."
        ) from None
    return found.set(drivername="postgresql+psycopg")


def display_url(url: str) -> str:
    """Return a storage URL without its password."""
    found = parse_url(url)
    query = {name: value for name, value in found.query.items() if name not in {"password", "sslpassword"}}
    return URL.create(
        "postgresql", username=found.username, host=found.host, port=found.port, database=found.database, query=query
    ).render_as_string()


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Raise a driver's error as a ConfigurationError that says what to do."""
    try:
        yield
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = cause_of(error).rstrip("?")
        is_lost = isinstance(cause, psycopg.OperationalError) and cause.sqlstate is None
        advice = (
            "Raise max_connections of PostgreSQL, or end what else is connected to it: a server needs six."
            if _FULL.search(said)
            else "Check the address, the user and the password (PGPASSWORD, or a password file), and that the database "
            "exists."
        )
        # Not from the error: the driver's may quote its parameters.
        kind = DatabaseUnreachable if is_lost and not _REFUSED.search(said) else ConfigurationError
        raise kind(f"The database {display_url(url)} cannot be used: {said}. {advice}") from None


def migrate(engine: Engine, url: str, *, may_upgrade: bool = True) -> None:
    """Create or upgrade the schema in one transaction, one server at a time.

    Raises ConfigurationError if the database is unusable, or needs an upgrade that is not allowed.
    """
    with translate_errors(url), engine.begin() as connection:
        connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        found = _revision(connection, url)
        if found == HEAD:
            return
        if not may_upgrade and (found is None or found < HEAD):  # revisions are numbers of four digits
            raise build_upgrade_error(display_url(url), found)
        if found is None:
            _create_schema(connection)
        else:
            upgrade_schema(connection, display_url(url), found)


@contextmanager
def hold_startup_lock(engine: Engine, url: str) -> Iterator[tuple[Connection, bool]]:
    """Open a transaction that servers which start now wait for; yield it, and whether no other server runs."""
    with translate_errors(url), engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        yield connection, not _other_servers(connection)


def _other_servers(connection: Connection) -> Sequence[int]:
    """Return the processes of PostgreSQL that serve the other servers' writing connections."""
    return connection.execute(_OTHERS, {"high": _USE_LOCK >> 32, "low": _USE_LOCK & 0xFFFFFFFF}).scalars().all()


def _create_schema(connection: Connection) -> None:
    metadata.create_all(connection, checkfirst=False)
    # Half of each page stays free: an append changes the row of its run, which is cheap as long as the new version fits
    # into the same page. Else it is inserted into every index.
    connection.execute(text("ALTER TABLE runs SET (fillfactor = 50)"))
    connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def _revision(connection: Connection, url: str) -> str | None:
    tables = text("SELECT tablename FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1")
    names = connection.execute(tables).scalars().all()
    if not names:
        return None
    if "alembic_version" not in names or "run_commands" not in names:
        other = next(name for name in names if name != "alembic_version" or len(names) == 1)
        raise ConfigurationError(
            f"The database {display_url(url)} belongs to another program (it has the table {other!r}): name "
            "another one."
        )
    revision = str(connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one())
    if revision < FIRST_ON_POSTGRES:
        raise ConfigurationError(
            f"The database {display_url(url)} has revision {revision}, which this version of bough cannot read: "
            "name an empty database, and new tables are created."
        )
    return revision


def database_status(url: str) -> DatabaseStatus:
    """Return the status of a database without changing it. Raises ConfigurationError."""
    engine = reader_engine(url, connections=1, busy_timeout=5.0)
    try:
        with translate_errors(url), engine.connect() as connection:
            revision = _revision(connection, url)
            size = connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one()
            use = read_use(connection, servers=len(_other_servers(connection))) if revision == HEAD else None
    finally:
        engine.dispose()
    return DatabaseStatus(name=display_url(url), revision=revision, head=HEAD, size_bytes=size, use=use)


def upgrade_database(url: str, *, keeps_backup: bool = True) -> DatabaseStatus:
    """Create the schema, or upgrade it to this version; servers may run. Raises ConfigurationError.

    Copies of PostgreSQL are its operator's: `keeps_backup` is for files.
    """
    engine = writer_engine(url, durability="disk", busy_timeout=5.0)
    try:
        migrate(engine, url)
    finally:
        engine.dispose()
    return database_status(url)


@contextmanager
def exclusive_connection(url: str) -> Iterator[Connection]:
    """Open a transaction on a current database that no server uses meanwhile. Raises ConfigurationError."""
    arguments = _arguments(url, _new_connection_name(), _HANDOVER_SECONDS)
    engine = create_engine(parse_url(url), poolclass=StaticPool, hide_parameters=True, connect_args=arguments)
    try:
        with translate_errors(url), engine.connect() as holder:
            try:
                holder.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _USE_LOCK})
            except OperationalError as error:
                if not isinstance(error.orig, psycopg.errors.LockNotAvailable):
                    raise
                raise ConfigurationError(
                    f"The database {display_url(url)} is in use by a server: stop all servers that use it, "
                    "and try again."
                ) from None
            holder.commit()
            migrate(engine, url)
            with engine.begin() as connection:
                yield connection
    finally:
        engine.dispose()


def writer_engine(url: str, *, durability: Durability, busy_timeout: float) -> Engine:
    """Create an engine with one connection, for one thread; its transactions see what others have committed meanwhile.

    A connection that replaces a broken one is used only after the server has ended the broken one: its last commit is
    then in the tables, or never will be.
    """
    name = f"{WRITER} {new_uuid4()}"
    engine = create_engine(
        parse_url(url),
        poolclass=StaticPool,
        hide_parameters=True,  # the log must not say what users and models do
        isolation_level="READ COMMITTED",
        connect_args=_arguments(url, name, busy_timeout, synchronous_commit=_SYNCHRONOUS[durability]),
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        assert isinstance(connection, psycopg.Connection)
        _terminate_earlier_connections(connection, name)
        try:
            connection.execute(f"SET LOCAL lock_timeout = {int(_HANDOVER_SECONDS * 1000)}")
            connection.execute("SELECT pg_advisory_lock_shared(%s)", [_USE_LOCK])
        except psycopg.errors.LockNotAvailable:
            raise psycopg.OperationalError("an operator's command has the database for itself") from None
        connection.commit()

    return engine


def _terminate_earlier_connections(connection: "psycopg.Connection[tuple[object, ...]]", name: str) -> None:
    """End the server's side of earlier connections of a name, and wait until they have ended."""
    clock = SystemClock()  # the machine's: it waits for another process, in a thread that really sleeps
    ends = clock.monotonic() + _END_SECONDS
    others = "FROM pg_stat_activity WHERE application_name = %s AND pid != pg_backend_pid()"
    while connection.execute(f"SELECT pid, pg_terminate_backend(pid) {others}", [name]).fetchall():
        connection.rollback()  # the view is a snapshot of the transaction
        if clock.monotonic() > ends:
            raise psycopg.OperationalError("the server has not ended the connection that this one replaces")
        time.sleep(0.02)


def reader_engine(url: str, *, connections: int, busy_timeout: float) -> Engine:
    """Create an engine whose connections read only, each read in one snapshot."""
    engine = create_engine(
        parse_url(url),
        poolclass=QueuePool,
        hide_parameters=True,
        pool_size=connections,
        max_overflow=0,
        pool_pre_ping=False,
        isolation_level="REPEATABLE READ",
        connect_args=_arguments(url, _new_connection_name(), busy_timeout),
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        # Not by default_transaction_read_only: target_session_attrs=read-write would then find no server to connect to.
        assert isinstance(connection, psycopg.Connection)
        connection.read_only = True

    return engine


def read_growth(connection: Connection, ends: Mapping[str, int]) -> tuple[Mapping[str, Growth], bool]:
    """Read what is new in logs, up to PAGE_EVENTS of each and about PAGE_BYTES of all; see ReadGrowth."""
    parameters = {"runs": list(ends), "ends": list(ends.values()), "count": PAGE_EVENTS, "bytes": PAGE_BYTES}
    events: dict[str, list[StoredEvent]] = {}
    heads: dict[str, tuple[int, int]] = {}
    size = 0
    for run_id, last_sequence, epoch, sequence, kind, data in connection.execute(_GROWTH, parameters):
        heads[run_id] = last_sequence, epoch
        if sequence is not None:
            events.setdefault(run_id, []).append(StoredEvent(sequence, kind, data))
            size += len(data)
    found = {
        run_id: Growth(stored, epoch, has_more=bool(stored) and stored[-1].sequence < last_sequence)
        for run_id, (last_sequence, epoch) in heads.items()
        for stored in [events.get(run_id, [])]
    }
    return found, size <= PAGE_BYTES


def listen_arguments(url: str) -> dict[str, Any]:
    """Return psycopg's arguments for the connection of notifications, which notices within seconds if it is cut."""
    _, named = parse_url(url).get_dialect()().create_connect_args(parse_url(url))
    return {**_KEEPALIVES, **named, **_arguments(url, _new_connection_name(), _LISTEN_TIMEOUT)}


def _new_connection_name() -> str:
    """Return a name for connections that no others have."""
    return f"bough {new_uuid4()}"


def _arguments(url: str, name: str, busy_timeout: float, **more: str) -> dict[str, object]:
    settings = {"lock_timeout": f"{int(busy_timeout * 1000)}ms", "timezone": "UTC", **more}
    given = parse_url(url).query.get("options", ())
    options = [*([given] if isinstance(given, str) else given), *(f"-c {one}={settings[one]}" for one in settings)]
    return {
        "options": " ".join(options),
        "connect_timeout": _CONNECT_SECONDS,
        "application_name": name,
        "prepare_threshold": 1,
    }
