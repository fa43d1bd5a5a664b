"""A PostgreSQL for the tests of one process: real, on a Unix socket only, with a database for each test."""

import atexit
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

import psycopg
from psycopg import sql

from bough_server.store.postgres.database import migrate, writer_engine
from bough_server.store.sql.tables import metadata
from tests.support.toolchains import skip_or_fail

_FOLDERS: Final = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")
_TEMPLATE: Final = "bough_template"
_numbers = itertools.count(1)


@cache
def programs() -> Path | None:
    """Return the folder of initdb and postgres, or None."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    here = [folder for pattern in _FOLDERS for folder in Path("/").glob(pattern.removeprefix("/"))]
    return max((folder for folder in here if (folder / "initdb").exists()), default=None)


class Cluster:
    """A running PostgreSQL in a temporary folder, owned by a user that is not root."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self.folder, self._user = folder, user

    def url(self, database: str) -> str:
        """Return the storage URL of a database."""
        return f"postgresql://bough@/{database}?host={self.folder}"

    def start(self, *, fsync: bool = True, settings: Mapping[str, str] | None = None) -> None:
        """Start the server, with further settings, and wait until it accepts connections."""
        further = "".join(f" -c {name}={value}" for name, value in (settings or {}).items())
        self._run(
            "pg_ctl",
            "-D",
            str(self.folder / "data"),
            "-w",
            "-l",
            str(self.folder / "log"),
            "-o",
            f"-c listen_addresses='' -c unix_socket_directories={self.folder} -c fsync={'on' if fsync else 'off'}"
            f" -c max_connections=300 -c shared_buffers=64MB{further}",
            "start",
        )

    def stop(self, mode: str = "immediate") -> None:
        """Stop the server; `immediate` is a crash."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "promote")

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Open a block in which none of the server's processes does anything; Linux only."""
        first = int((self.folder / "data" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(first, signal.SIGSTOP)  # the one that starts the others
        stopped = [first, *_children(first)]
        try:
            for each in stopped:
                os.kill(each, signal.SIGSTOP)
            yield
        finally:
            for each in reversed(stopped):
                os.kill(each, signal.SIGCONT)

    def make_standby(self, primary: "Cluster") -> None:
        """Create the cluster's files as those of a standby of a running primary."""
        source = ["-h", str(primary.folder), "-U", "bough"]
        self._run("pg_basebackup", *source, "-D", str(self.folder / "data"), "-R", "--checkpoint=fast", "--no-sync")

    def make(self, arguments: Sequence[str] = ()) -> None:
        """Create the cluster's files, with further arguments of initdb."""
        self._run(
            "initdb",
            "-D",
            str(self.folder / "data"),
            "-A",
            "trust",
            "-U",
            "bough",
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "--no-sync",
            *arguments,
        )

    def log(self) -> str:
        """Return what the server has logged so far."""
        return (self.folder / "log").read_text()

    def execute(self, *statements: sql.Composed | sql.SQL, database: str = "postgres") -> None:
        """Execute statements outside of transactions."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None, "the caller has looked for it"
        # Not by `user=`: that forks with all of gRPC's threads where it has been used, and the child may crash.
        done = subprocess.run(
            [*_as_user(self._user), str(folder / program), *arguments],
            cwd=self.folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, (done.returncode, done.stdout.decode())


def made_cluster() -> Cluster:
    """Create a cluster in a new temporary folder, not started; the caller removes the folder.

    Skips the test where there is no PostgreSQL, or fails it.
    """
    made = empty_cluster()
    made.make()
    return made


def empty_cluster() -> Cluster:
    """Return a cluster without files in a new temporary folder; see made_cluster."""
    if programs() is None:
        skip_or_fail("postgres", ["initdb (Debian's package postgresql)"])
    user = account() if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="bough-pg-", dir="/tmp"))
    if user is not None:
        shutil.chown(folder, user)
    return Cluster(folder, user)


@contextmanager
def own_cluster(keep_in: Path) -> Iterator[Cluster]:
    """Start a cluster that flushes its commits, for tests that crash it.

    At the end its files, the log among them, are moved into the folder `keep_in` as `postgres`.
    """
    made = made_cluster()
    try:
        made.start()
        yield made
    finally:
        with suppress(AssertionError):  # the test may have left it stopped
            made.stop()
        shutil.move(made.folder, keep_in / "postgres")


@cache
def cluster() -> Cluster:
    """Return the cluster of this process, started when the first test needs it; it ends with the process.

    It does not flush (fsync is off): no test of the store cuts the power.
    """
    made = made_cluster()
    made.start(fsync=False)

    def end() -> None:
        made.stop()
        shutil.rmtree(made.folder, ignore_errors=True)

    atexit.register(end)
    made.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_TEMPLATE)))
    engine = writer_engine(made.url(_TEMPLATE), durability="process", busy_timeout=10)
    migrate(engine, made.url(_TEMPLATE))
    engine.dispose()
    return made


def database(*, is_empty: bool = False) -> str:
    """Return the storage URL of a new database with the current schema, or without tables."""
    return copy(cluster().url("template0" if is_empty else _TEMPLATE))


_END_OTHERS: Final = sql.SQL(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid != pg_backend_pid()"
)


@cache
def _shared() -> str:
    return database()


@contextmanager
def emptied() -> Iterator[str]:
    """Open a block that has the storage URL of a database without rows, for one at a time.

    It is always the same database: to delete its rows takes a millisecond, to make a new one takes fifty.
    """
    url = _shared()
    deletions = [sql.SQL("DELETE FROM {}").format(sql.Identifier(name)) for name in metadata.tables]
    cluster().execute(_END_OTHERS, *deletions, database=name_of(url))
    yield url


def copy(url: str) -> str:
    """Return the storage URL of a new database with all rows of another, to which nothing is connected."""
    here, name = cluster(), f"test_{os.getpid()}_{next(_numbers)}"
    here.execute(
        sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY wal_log").format(
            sql.Identifier(name), sql.Identifier(name_of(url))
        )
    )
    return here.url(name)


def name_of(url: str) -> str:
    """Return the name of a database that this process has made."""
    return url.rpartition("@/")[2].partition("?")[0]


def drop(url: str) -> None:
    """Drop a database that this process has made, with all connections to it."""
    name = name_of(url)
    cluster().execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _children(parent: int) -> list[int]:
    """Return the processes that a process has started; a look through all of them, which every kernel allows."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            number, _, rest = stat.read_text().partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == parent:
                found.append(int(number))
    return found


def _as_user(user: str | None) -> list[str]:
    """Return a prefix of a command that runs it as a user; without one nothing changes."""
    if user is None:
        return []
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--clear-groups"]


def account() -> str:
    """Return a user for the cluster: PostgreSQL refuses to run as root."""
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise AssertionError("there is no user to run PostgreSQL as")
