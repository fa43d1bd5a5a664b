"""The databases that a property is tried on, each example on an empty one."""

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
        yield f"sqlite:///{Path(folder) / 'bough.db'}"


SQLITE: Final = Database(name="sqlite", empty=_new_file)
POSTGRES: Final = Database(name="postgres", empty=postgres.emptied, share=4)

on_each_database: Final = pytest.mark.parametrize("database", [SQLITE, POSTGRES], ids=str)
"""Tries a test on every kind of database."""
