"""Close response streams in the task that serves them, and pass serialized messages through.

grpc.aio closes a generator handler that was blocked at `yield` from another task, which breaks every span and context
variable held there (grpc/grpc#28728). The outermost interceptor therefore iterates the generator and writes its
messages itself. `StreamOwner`, directly inside OpenTelemetry's interceptor, has the inner generator closed here too,
because OpenTelemetry's does not close the one it wraps.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio

from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuild_handler,
    streaming_behavior,
)

_streams: ContextVar[AsyncExitStack] = ContextVar("streams")


class StreamWriter(aio.ServerInterceptor):
    """Outermost interceptor: writes the messages that inner generators yield. Bytes count as serialized messages."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or not is_ours(handler_call_details):
            return handler
        inner = streaming_behavior(handler)

        async def write_all(request: Any, context: Context) -> None:
            async with AsyncExitStack() as streams:
                # Closes in reverse order of registration: the innermost generator first, all in this task.
                _streams.set(streams)
                stream = inner(request, context)
                streams.push_async_callback(stream.aclose)
                async for message in stream:
                    await _write(message, context)

        return rebuild_handler(handler, write_all, serializer=_serialize)


class StreamOwner(aio.ServerInterceptor):
    """Registers the generator inside it to be closed before the ones around it, even if those abandon it."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or not is_ours(handler_call_details):
            return handler
        inner = streaming_behavior(handler)

        def open_stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            stream = inner(request, context)
            _streams.get().push_async_callback(stream.aclose)
            return stream

        return rebuild_handler(handler, open_stream)


async def _write(message: Any, context: Context) -> None:
    try:
        await context.write(message)
    except aio.InternalError as error:
        # A write that is blocked by flow control raises InternalError if the caller disconnects, not CancelledError.
        raise asyncio.CancelledError from error


def _serialize(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
