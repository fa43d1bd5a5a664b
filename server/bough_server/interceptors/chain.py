"""The interceptors of every call, in order, with tracing and the context of log lines."""

import re
from collections.abc import Sequence
from typing import Final

import grpc
from grpc import aio
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider
from structlog import contextvars

from bough_server.auth.api_keys import is_key
from bough_server.auth.authentication import Authenticator
from bough_server.clock import Clock, SystemClock
from bough_server.identity import LOCAL, Caller
from bough_server.interceptors.auth import Authentication, LocalCaller, StreamExpiry
from bough_server.interceptors.errors import Errors
from bough_server.interceptors.handlers import Continuation, Handler, is_ours
from bough_server.interceptors.parsing import Parsing
from bough_server.interceptors.request_budget import RequestBudget
from bough_server.interceptors.stream_limit import StreamLimit
from bough_server.interceptors.streams import StreamOwner, StreamWriter
from bough_server.interceptors.validation import Validation
from bough_server.log.blobs import MAX_FILES_BYTES
from bough_server.observability.tracing import Parent

_LOGGED: Final = ("x-request-id", "bough-client")
"""The metadata that lines of the log name; any other may be secret, and there may be any number of them."""

_LOGGED_VALUE: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,64}")
"""Values that are names. What is longer may be a secret, and would be one still if it were cut."""

_LONGEST_METHOD: Final = 128
"""Callers choose it, if there is no such method."""


MAX_REQUEST_BYTES: Final = 256 * 1024 * 1024
"""The default for the most bytes of requests that a server holds at once."""

MAX_STREAMS: Final = 4_000
"""The default for the most response streams of a server."""

MAX_STREAMS_OF_CALLER: Final = 2_000
"""The default for the most response streams of one caller."""


def interceptors(
    provider: TracerProvider | None,
    *,
    max_files_bytes: int = MAX_FILES_BYTES,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    max_streams: int = MAX_STREAMS,
    max_streams_of_caller: int = MAX_STREAMS_OF_CALLER,
    authenticator: Authenticator | None = None,
    local: Caller = LOCAL,
    clock: Clock | None = None,
) -> Sequence[aio.ServerInterceptor]:
    """Return the server's interceptors, outermost first; calls have spans if there is a provider.

    Without an authenticator every call is that of the `local` caller. Default `clock`: the machine's.

    Errors is inside tracing, because spans would otherwise record failed calls as successful. StreamOwner is directly
    inside tracing, whose interceptor does not close the generators that it wraps.
    """
    clock = clock or SystemClock()
    return (
        *(() if authenticator is None else (StreamExpiry(authenticator, clock),)),
        StreamWriter(),
        CallerTrace() if provider is None else call_tracing(provider),
        StreamOwner(),
        LogContext(),
        Errors(clock),
        LocalCaller(local) if authenticator is None else Authentication(authenticator, clock),
        StreamLimit(max_streams=max_streams, max_streams_of_caller=max_streams_of_caller),
        Validation(RequestBudget(max_request_bytes), max_files_bytes),
        Parsing(),
    )


def call_tracing(provider: TracerProvider) -> aio.ServerInterceptor:
    """Return an interceptor that continues the caller's trace with one span per call.

    Health and reflection have none.
    """
    interceptor: aio.ServerInterceptor = aio_server_interceptor(  # type: ignore[no-untyped-call] # untyped package
        tracer_provider=provider, filter_=is_ours
    )
    return interceptor


class CallerTrace(aio.ServerInterceptor):
    """Continues the caller's trace without a span of the call."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        # Always, or a call would continue the trace that an earlier call on the same task left behind.
        Parent.of_call(handler_call_details.invocation_metadata).make_current()
        return await continuation(handler_call_details)


class LogContext(aio.ServerInterceptor):
    """Binds `method`, `x-request-id` and `bough-client` of a call to the context of log lines.

    Tasks that the call starts inherit the context.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        named = {
            key.replace("-", "_"): value
            for key, value in handler_call_details.invocation_metadata
            if key in _LOGGED and isinstance(value, str) and _LOGGED_VALUE.fullmatch(value) and not is_key(value)
        }
        # Without this a call would log the values that an earlier call on the same task left behind.
        contextvars.clear_contextvars()
        contextvars.bind_contextvars(**{**named, "method": handler_call_details.method[:_LONGEST_METHOD]})
        return await continuation(handler_call_details)
