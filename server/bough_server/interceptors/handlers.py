"""Method handlers: get the behavior of one, and build a copy with another behavior."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

Context: TypeAlias = aio.ServicerContext[Any, Any]
"""A call's context; interceptors do not know its message types."""

if TYPE_CHECKING:
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler  # generic only for type checkers: subscripting it at run time fails

Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]
Unary: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
Streaming: TypeAlias = Callable[[Any, Context], AsyncGenerator[Any, None]]
Behavior: TypeAlias = Unary | Streaming

_OURS = "/bough.v1."
_FACTORIES: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def is_ours(details: grpc.HandlerCallDetails) -> bool:
    """Return whether a call is to a service of this project's schema, not to health or reflection."""
    return details.method.startswith(_OURS)


def unary_behavior(handler: Handler) -> Unary:
    """Return the coroutine function of a method that responds with one message."""
    return cast(Unary, handler.stream_unary if handler.request_streaming else handler.unary_unary)


def streaming_behavior(handler: Handler) -> Streaming:
    """Return the generator function of a method that responds with a stream."""
    return cast(Streaming, handler.stream_stream if handler.request_streaming else handler.unary_stream)


def parser(handler: Handler) -> Callable[[bytes], Message]:
    """Return the function that parses a request from bytes."""
    return cast(Callable[[bytes], Message], handler.request_deserializer)


def rebuild_handler(
    handler: Handler,
    behavior: Callable[[Any, Context], Any],
    *,
    serializer: Callable[[Any], bytes] | None = None,
    deserializer: Callable[[bytes], Any] | None = None,
    reads_requests: bool = False,
) -> Handler:
    """Return a copy of a handler with another behavior, and optionally another serializer or deserializer.

    With `reads_requests` the behavior gets an iterator of requests, also that of a method with one request.
    """
    factory = _FACTORIES[handler.request_streaming or reads_requests, handler.response_streaming]
    return factory(
        behavior,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=serializer or handler.response_serializer,
    )
