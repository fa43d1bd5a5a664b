"""The order of the interceptors of every call, with tracing and the context of its log lines."""

from collections.abc import Sequence
from typing import Final

import grpc
from grpc import aio
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from structlog import contextvars

from bough_server.interceptors.auth import Authentication
from bough_server.interceptors.errors import Errors
from bough_server.interceptors.handlers import Continuation, Handler, is_ours
from bough_server.interceptors.streams import StreamOwner, StreamWriter
from bough_server.interceptors.validation import Validation

_LONGEST: Final = 128


def interceptors(provider: TracerProvider) -> Sequence[aio.ServerInterceptor]:
    """The chain of the server. Errors stands inside tracing, or spans would say that failed calls went well."""
    return (
        StreamWriter(),
        call_tracing(provider),
        StreamOwner(),
        CallContext(),
        Errors(),
        Authentication(),
        Validation(),
    )


def call_tracing(provider: TracerProvider) -> aio.ServerInterceptor:
    """An interceptor that continues the caller's trace and makes one span a call; none for health and reflection."""
    interceptor: aio.ServerInterceptor = aio_server_interceptor(  # type: ignore[no-untyped-call] # it has no types
        tracer_provider=provider, filter_=is_ours
    )
    return interceptor


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
