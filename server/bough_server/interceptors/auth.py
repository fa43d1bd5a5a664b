"""Authentication: the principal of each call.

The server does not check tokens yet, so there is one user of one tenant; every row already names both.
"""

from contextvars import ContextVar

import grpc
from grpc import aio

from bough_server.identity import LOCAL, Principal
from bough_server.interceptors.handlers import Continuation, Handler

_principal: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """Return the principal of the call that this task serves."""
    return _principal.get()


class Authentication(aio.ServerInterceptor):
    """Sets the principal of each call."""

    def __init__(self, principal: Principal = LOCAL) -> None:
        self._principal = principal

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        # grpc.aio runs interceptors and handler of a call in one task, so the handler sees this value.
        _principal.set(self._principal)
        return await continuation(handler_call_details)
