"""Who calls; what a caller may do is decided where it is done.

There is one user of one tenant until tokens are served; every row that is written names both already.
"""

from contextvars import ContextVar
from typing import Final

import grpc
from grpc import aio

from bough_server.interceptors.handlers import Continuation, Handler
from bough_server.store.ports import Principal

LOCAL: Final = Principal(tenant_id="local", user_id="local")
"""Who calls a server that asks for no token."""

_principal: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """The caller of the call that this task serves."""
    return _principal.get()


class Authentication(aio.ServerInterceptor):
    """Names the caller."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        _principal.set(LOCAL)
        return await continuation(handler_call_details)
