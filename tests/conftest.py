"""What every test shares: one event loop backend."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The tests run on asyncio, as the server does."""
    return "asyncio"
