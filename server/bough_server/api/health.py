"""Health of each service and of the whole server, as operators' tools expect of a gRPC server."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bough_server.auth import access

SERVICES: Final[Sequence[str]] = tuple(service.full_name for service in access.SERVICES)
"""The names of the schema's services."""


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

    async def start(self, server: aio.Server) -> None:
        """Add the health service; every status is NOT_SERVING at first."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._set_all(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def set_serving(self) -> None:
        """Set every status to SERVING."""
        await self._set_all(health_pb2.HealthCheckResponse.SERVING)

    async def follow(self, turns: AsyncIterator[bool]) -> None:
        """Set SERVING whenever the iterator yields true and NOT_SERVING whenever it yields false, until cancelled."""
        response = health_pb2.HealthCheckResponse
        async for is_serving in turns:
            await self._set_all(response.SERVING if is_serving else response.NOT_SERVING)

    async def set_not_serving(self) -> None:
        """Set NOT_SERVING; later calls do not change it."""
        # Later calls of set() have no effect, so follow() cannot undo it.
        self._is_stopping = True
        self._servicer.statuses.update(dict.fromkeys(("", *SERVICES), health_pb2.HealthCheckResponse.NOT_SERVING))
        await self._servicer.enter_graceful_shutdown()

    async def _set_all(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *SERVICES):
            if not self._is_stopping:
                self._servicer.statuses[service] = status
            await self._servicer.set(service, status)
