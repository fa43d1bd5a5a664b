"""Authentication: the principal of each call.

The server does not check tokens yet, so there is one user of one tenant; every row already names both.
"""

from contextvars import ContextVar
from typing import Final

import grpc
from grpc import aio

from bough_server.identity import Principal
from bough_server.interceptors.handlers import Continuation, Handler

LOCAL: Final = Principal(tenant_id="local", user_id="local")
"""The principal of every call while the server checks no tokens."""

_principal: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """Return the principal of the call that this task serves."""
    return _principal.get()


class Authentication(aio.ServerInterceptor):
    """Sets the principal of each call."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        # grpc.aio runs interceptors and handler of a call in one task, so the handler sees this value.
        _principal.set(LOCAL)
        return await continuation(handler_call_details)
