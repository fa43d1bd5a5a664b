"""AccessService: who calls."""

from collections.abc import Callable

from grpc import aio

from bough.v1 import access_service_pb2 as pb
from bough.v1 import access_service_pb2_grpc
from bough_server.identity import Caller


class AccessService(access_service_pb2_grpc.AccessServiceServicer):
    """Says who calls."""

    def __init__(self, *, caller: Callable[[], Caller]) -> None:
        self._caller = caller

    async def GetCaller(
        self, request: pb.GetCallerRequest, context: aio.ServicerContext[pb.GetCallerRequest, pb.GetCallerResponse]
    ) -> pb.GetCallerResponse:
        """Return the caller."""
        caller = self._caller()
        response = pb.GetCallerResponse(
            tenant_id=caller.principal.tenant_id,
            user_id=caller.principal.user_id,
            roles=sorted(caller.roles),
            groups=sorted(caller.groups),
            via=caller.via,
        )
        if caller.expire_time_ns is not None:
            response.expire_time.FromNanoseconds(caller.expire_time_ns)
        return response
