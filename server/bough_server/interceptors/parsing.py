"""Answer requests whose bytes are no message, of every service, with INVALID_ARGUMENT instead of a stack in the log."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Never

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.interceptors.errors import abort
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    parser,
    rebuild_handler,
    streaming_behavior,
    unary_behavior,
)


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A request whose bytes cannot be parsed as the message of its method."""

    method: str

    def error(self) -> InvalidRequest:
        """Return the error of the call."""
        return InvalidRequest(
            [FieldViolation(field="", description=f"The bytes are no request of {self.method} in protobuf.")]
        )


class Parsing(aio.ServerInterceptor):
    """Turns requests that cannot be parsed into Unparsed, and rejects those that no interceptor outside has rejected.

    gRPC logs the stack of a parser that raises, and answers INTERNAL.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = _catch_parse_errors(handler_call_details.method, parser(handler))
        behavior = _behavior(handler)
        # Validation, outside of this, rejects those of our own services.
        return rebuild_handler(
            handler, behavior if is_ours(handler_call_details) else _guard_behavior(behavior), deserializer=parse
        )


def _catch_parse_errors(method: str, parse: Callable[[bytes], Message]) -> Callable[[bytes], Message | Unparsed]:
    def parse_or_note(data: bytes) -> Message | Unparsed:
        try:
            return parse(data)
        except DecodeError:
            return Unparsed(method.lstrip("/"))

    return parse_or_note


def _behavior(handler: Handler) -> Callable[[Any, Context], Any]:
    return streaming_behavior(handler) if handler.response_streaming else unary_behavior(handler)


def _guard_behavior(inner: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    """Return a behavior that aborts the call at an Unparsed; it is of the kind of function that gRPC looks at."""
    if inspect.isasyncgenfunction(inner):

        async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            async for response in inner(await _check_requests(request, context), context):
                yield response

        return stream

    async def answer(request: Any, context: Context) -> Any:
        return await inner(await _check_requests(request, context), context)

    return answer


async def _check_requests(request: Any, context: Context) -> Any:
    """Return a request, or an iterator of requests, that holds no Unparsed."""
    if isinstance(request, Unparsed):
        await _reject(request, context)
    return _each(request, context) if isinstance(request, AsyncIterator) else request


async def _each(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, Unparsed):
            await _reject(request, context)
        yield request


async def _reject(request: Unparsed, context: Context) -> Never:
    await abort(request.error(), context)
