"""The implementations of the store's ports, each behind the URL of a database that does not exist yet."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough_server.store.sql.store import Store, open_store


@pytest.fixture(params=["sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that is made when it is first opened."""
    return {"sqlite": f"sqlite:///{tmp_path}/var/bough.db"}[request.param]


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    """An empty store."""
    async with open_store(url, durability="process") as opened:
        yield opened
