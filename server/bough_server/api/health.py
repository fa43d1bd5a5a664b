"""Health of each service and of the whole server, and reflection, as operators' tools expect of a gRPC server."""

from collections.abc import AsyncIterator, Sequence
from typing import Final

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from bough.v1 import agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2

SERVICES: Final[Sequence[str]] = tuple(
    service.full_name
    for module in (agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The services of the schema."""


class Health:
    """The health status of every service and of "", the whole server."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    async def start(self, server: aio.Server) -> None:
        """Add the health service; every status is NOT_SERVING at first."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._set_all(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def serving(self) -> None:
        """Set every status to SERVING."""
        await self._set_all(health_pb2.HealthCheckResponse.SERVING)

    async def follow(self, turns: AsyncIterator[bool]) -> None:
        """Set SERVING whenever the iterator yields true and NOT_SERVING whenever it yields false, until cancelled."""
        response = health_pb2.HealthCheckResponse
        async for is_serving in turns:
            await self._set_all(response.SERVING if is_serving else response.NOT_SERVING)

    async def stopping(self) -> None:
        """Set NOT_SERVING permanently."""
        # Later calls of set() have no effect, so follow() cannot undo it.
        await self._servicer.enter_graceful_shutdown()

    async def _set_all(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", *SERVICES):
            await self._servicer.set(service, status)


def add_reflection(server: aio.Server) -> None:
    """Add reflection, so that tools can list the services and read their schema."""
    reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
