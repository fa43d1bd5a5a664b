"""What every test shares: one event loop."""

from collections.abc import AsyncIterator

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The tests run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def _one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Holds one event loop for all tests: grpc.aio polls for the process, and would wake loops that are closed."""
    yield  # noqa: PT022 # while a fixture of the session has not ended, its loop stays
