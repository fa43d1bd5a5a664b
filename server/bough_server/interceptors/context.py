"""What the log lines of a call have in common: its method and the caller's names for it; it decides nothing."""

from typing import Final

import grpc
from grpc import aio
from structlog import contextvars

from bough_server.interceptors.handler import Continuation, Handler

_LONGEST: Final = 128


class CallContext(aio.ServerInterceptor):
    """Binds `method`, `x-request-id` and every textual `bough-*` of the call's metadata to the log's context.

    The tasks that a call starts inherit it.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        named = {
            key.replace("-", "_"): value[:_LONGEST]
            for key, value in handler_call_details.invocation_metadata
            if isinstance(value, str) and (key == "x-request-id" or key.startswith("bough-"))
        }
        contextvars.clear_contextvars()
        contextvars.bind_contextvars(**{**named, "method": handler_call_details.method})
        return await continuation(handler_call_details)
