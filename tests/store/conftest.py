"""The implementations of the store's ports, each behind the URL of a database that does not exist yet."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bough_server.store.opening import Store, open_store
from tests.support import postgres


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/var/bough.db"
        return
    made = postgres.database()
    yield made
    postgres.drop(made)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A SQLite file that is not there yet, for what only SQLite does."""
    return f"sqlite:///{tmp_path}/var/bough.db"


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """An empty database of PostgreSQL with its tables, for what only PostgreSQL does."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An empty store."""
    async with open_store(url, durability="process") as opened:
        yield opened
