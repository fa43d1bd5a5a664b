"""Health of each service and of the whole server, as operators' tools expect of a gRPC server."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bough_server.api.ports import bind_port
from bough_server.auth import access

SERVICES: Final[Sequence[str]] = tuple(service.full_name for service in access.SERVICES)
"""The names of the schema's services."""

MAX_PROBES: Final = 1_000
"""The most calls in progress on a port for probes; further ones fail with RESOURCE_EXHAUSTED."""

_MAX_PROBE_BYTES: Final = 4_096


class _Servicer(health.aio.HealthServicer):  # type: ignore[misc]  # untyped package
    """The servicer of grpcio-health-checking, which has no List."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}

    async def List(
        self, request: health_pb2.HealthListRequest, context: aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        listed = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self.statuses.items()}
        return health_pb2.HealthListResponse(statuses=listed)


class Health:
    """The health status of every service and of "", the whole server."""

    def __init__(self) -> None:
        self._servicer = _Servicer()
        self._is_stopping = False
        self._report: Callable[[bool], None] | None = None

    async def start(self, server: aio.Server) -> None:
        """Add the health service; every status is NOT_SERVING at first."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set_serving(False)

    async def set_serving(self, is_serving: bool = True) -> None:
        """Set every status to SERVING or NOT_SERVING."""
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for service in ("", *SERVICES):
            if not self._is_stopping:
                self._servicer.statuses[service] = status
            await self._servicer.set(service, status)
        if self._report is not None and not self._is_stopping:
            self._report(is_serving)

    async def follow(self, turns: AsyncIterator[bool]) -> None:
        """Set SERVING whenever the iterator yields true and NOT_SERVING whenever it yields false, until cancelled."""
        async for is_serving in turns:
            await self.set_serving(is_serving)

    def report_to(self, report: Callable[[bool], None]) -> None:
        """Call a function with whether the server serves: now, and whenever it is set."""
        self._report = report
        report(self._servicer.statuses.get("") == health_pb2.HealthCheckResponse.SERVING)

    async def set_not_serving(self) -> None:
        """Set NOT_SERVING; later calls do not change it."""
        # Later calls of set() have no effect, so follow() cannot undo it.
        if self._report is not None and not self._is_stopping:
            self._report(False)
        self._is_stopping = True
        self._servicer.statuses.update(dict.fromkeys(("", *SERVICES), health_pb2.HealthCheckResponse.NOT_SERVING))
        await self._servicer.enter_graceful_shutdown()


@asynccontextmanager
async def serve_health(health: Health, host: str, port: int) -> AsyncIterator[str]:
    """Serve health alone, in plaintext and to anyone, while the context is open; yield HOST:PORT.

    Raises ConfigurationError if the port cannot be bound.
    """
    options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_PROBE_BYTES))
    server = aio.server(options=options, maximum_concurrent_rpcs=MAX_PROBES)
    await health.start(server)
    address = bind_port(server, host, port, grpc.insecure_server_credentials(), setting="server.health_port")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)
