"""The one place where an error becomes a gRPC status; what went wrong in a run is an event and never comes here."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, Never

import grpc
import structlog
from google.rpc import code_pb2
from grpc import aio
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from bough_server.errors import CallError
from bough_server.interceptors.handler import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuilt,
    streaming_behavior,
    unary_behavior,
)
from bough_server.interceptors.status import DETAILS_KEY, status_of

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_EARLY: Final = 0.1
"""A caller's deadline passes this much before ours at most, in seconds: by what its call took to arrive."""

_log = structlog.get_logger(__name__)


class Errors(aio.ServerInterceptor):
    """Ends a call whose handler raised: a CallError as it says, anything else as INTERNAL with its stack in the log."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details):
            return handler
        return _streaming(handler) if handler.response_streaming else _unary(handler)


def _unary(handler: Handler) -> Handler:
    inner = unary_behavior(handler)

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, aio.InternalError) as gone:
            _mark_cancelled(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            await _abort(error, context)

    return rebuilt(handler, answer)


def _streaming(handler: Handler) -> Handler:
    inner = streaming_behavior(handler)

    async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message
        except GeneratorExit:
            _mark_cancelled(context)
            raise
        except (asyncio.CancelledError, aio.InternalError) as gone:
            # What is sent to a caller who went away fails where it is not cancelled.
            _mark_cancelled(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            await _abort(error, context)

    return rebuilt(handler, stream)


async def _abort(error: Exception, context: Context) -> Never:
    if isinstance(error, aio.AbortError):
        raise error
    if not isinstance(error, CallError):
        _log.error("a call failed", exc_info=error)
        error = CallError("The server has a defect; its log has the details.")
    status = status_of(error)
    # What the handler set stays: an abort that names its own trailing metadata would replace it.
    trailing = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(_STATUS[error.code], status.message, trailing)


def _mark_cancelled(context: Context) -> None:
    """OpenTelemetry's interceptor would let a cancelled call end with the code 0."""
    remaining = context.time_remaining()
    overdue = remaining is not None and remaining <= _EARLY
    span = trace.get_current_span()
    span.set_attribute("rpc.grpc.status_code", code_pb2.DEADLINE_EXCEEDED if overdue else code_pb2.CANCELLED)
    if overdue:
        span.set_status(Status(StatusCode.ERROR, "The deadline passed."))
