"""A server for the tests of this folder that need a whole one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rpc.agents import GATES
from tests.rpc.run_server import Served, served, settings
from tests.rpc.state_agents import DOORS


@pytest.fixture(autouse=True)
def _closed_gates() -> None:
    """Close the gates of the test before: the same test may run again, on another database."""
    GATES.clear()
    DOORS.clear()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the team in code and its own database."""
    async with served(settings(tmp_path)) as serving:
        yield serving
