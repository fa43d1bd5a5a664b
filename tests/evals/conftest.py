"""A server that evaluates, for the tests of this folder that need a whole one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.evals.job_server import evaluating
from tests.rpc.run_server import Served


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with the agents of job_server."""
    async with evaluating(tmp_path) as opened:
        yield opened
