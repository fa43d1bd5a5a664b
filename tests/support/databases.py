"""The databases that tests run on: a SQLite file, or a database of PostgreSQL in its place."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings

from tests.support import postgres
from tests.support.examples import examples

_FILE: Final = "bough.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A kind of database."""

    name: str
    empty: Callable[[], AbstractContextManager[str]]
    """Open a block that has the URL of a database without rows."""
    share: int = 1
    """One in so many examples of a property is tried on it: what an example costs differs."""

    def __str__(self) -> str:
        return self.name

    def examples(self, count: int) -> settings:
        """Settings with this database's share of about so many random examples; see examples.examples."""
        return examples(max(3, count // self.share))


@contextmanager
def _new_file() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:///{Path(folder) / _FILE}"


SQLITE: Final = Database(name="sqlite", empty=_new_file)
POSTGRES: Final = Database(name="postgres", empty=postgres.emptied, share=4)

on_each_database: Final = pytest.mark.parametrize("database", [SQLITE, POSTGRES], ids=str)
"""Tries a test on every kind of database."""

in_each_database: Final = [
    pytest.mark.usefixtures("database_of_folders"),
    pytest.mark.parametrize("database_of_folders", [str(SQLITE), str(POSTGRES)], indirect=True),
]
"""The `pytestmark` of a file whose servers and harnesses have each kind of database in turn."""

_on_postgres: Final[dict[Path, dict[Path, str]]] = {}
"""The URLs of the databases by their folders, for each folder that `on_postgres` was called for."""


@contextmanager
def on_postgres(root: Path) -> Iterator[None]:
    """Open a block in which every folder at or below one has a database of PostgreSQL instead of a file."""
    made = _on_postgres[root] = {}
    try:
        yield
    finally:
        del _on_postgres[root]
        for url in made.values():
            postgres.drop(url)


def database_in(folder: Path) -> str:
    """Return the storage URL of the database in a folder; one of PostgreSQL is made if it is not there yet."""
    for root, made in _on_postgres.items():
        if folder.is_relative_to(root):
            if folder not in made:
                made[folder] = postgres.database()
            return made[folder]
    return f"sqlite:///{folder / _FILE}"


def copy_database(source: Path, target: Path) -> str:
    """Copy the database of a folder to another one, and return its URL there; nothing may be connected to it."""
    for root, made in _on_postgres.items():
        if target.is_relative_to(root):
            made[target] = postgres.copy(database_in(source))
            return made[target]
    shutil.copyfile(source / _FILE, target / _FILE)
    return database_in(target)
