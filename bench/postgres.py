"""A PostgreSQL for one case: real, flushing to a disk; Linux only."""

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from psycopg import sql

from bench.programs import cpu_seconds_of
from tests.support.postgres import Cluster, account, programs

_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Postgres:
    """A running PostgreSQL."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count(1)

    def new_database(self) -> str:
        """Create an empty database and return its storage URL."""
        name = f"bench_{next(self._numbers)}"
        self._cluster.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self._cluster.url(name)

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far, those that ended included; see proc_pid_stat(5)."""
        first = int((self._cluster.folder / "data" / "postmaster.pid").read_text(encoding="ascii").split()[0])
        # What follows the name begins with field 3; fields 16 and 17 are of the children that ended.
        fields = Path(f"/proc/{first}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ended = (int(fields[13]) + int(fields[14])) / _TICKS
        children = Path(f"/proc/{first}/task/{first}/children").read_text(encoding="ascii").split()
        return ended + sum(map(cpu_seconds_of, [first, *map(int, children)]))


@contextmanager
def postgres() -> Iterator[Postgres | None]:
    """Run a PostgreSQL until the end of the block; None, said on standard error, if it is not installed.

    Its files are below /var/tmp, which is a disk, and which its user can reach if this process is root's.
    """
    if programs() is None:
        print("not measured: there is no initdb (Debian's package postgresql)", file=sys.stderr)
        yield None
        return
    user = account() if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="bough-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        cluster = Cluster(folder, user)
        cluster.make()
        with (folder / "data" / "postgresql.conf").open("a", encoding="utf-8") as settings:
            settings.write("track_commit_timestamp = on\n")
        cluster.start()
        try:
            yield Postgres(cluster)
        finally:
            cluster.stop()
