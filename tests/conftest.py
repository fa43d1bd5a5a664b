"""What every test shares: one event loop, and the poller of gRPC that wakes it."""

from collections.abc import AsyncIterator

import pytest
from grpc._cython import cygrpc


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The tests run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def _one_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Hold one event loop and one poller for all tests: grpc.aio polls for the process, and would wake closed loops."""
    # The poller counts its users: channels and servers. When the last one dies, it closes the socket by which it wakes
    # the loop; a wake-up that is queued at that moment then reads a closed socket, in whatever test comes next.
    # This user stays until the process ends.
    cygrpc.init_grpc_aio()
    yield  # noqa: PT022 # while a fixture of the session has not ended, its loop stays
