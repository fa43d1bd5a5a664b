"""Method handlers: taking the behavior out of one and putting another in; what the behavior does is not known here."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

Context: TypeAlias = aio.ServicerContext[Any, Any]
"""A call's context; what an interceptor passes on has messages that it does not know."""

if TYPE_CHECKING:
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = grpc.RpcMethodHandler  # generic for type checkers alone

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
    """Whether a call is of this project's schema; health and reflection are served as their packages serve them."""
    return details.method.startswith(_OURS)


def unary_behavior(handler: Handler) -> Unary:
    """The coroutine function of a method that answers with one message."""
    return cast(Unary, handler.stream_unary if handler.request_streaming else handler.unary_unary)


def streaming_behavior(handler: Handler) -> Streaming:
    """The generator function of a method that answers with a stream."""
    return cast(Streaming, handler.stream_stream if handler.request_streaming else handler.unary_stream)


def parser(handler: Handler) -> Callable[[bytes], Message]:
    """What makes a request of its bytes."""
    return cast(Callable[[bytes], Message], handler.request_deserializer)


def rebuilt(
    handler: Handler,
    behavior: Callable[[Any, Context], Any],
    *,
    serializer: Callable[[Any], bytes] | None = None,
    deserializer: Callable[[bytes], Any] | None = None,
) -> Handler:
    """The same method with another behavior, and another serializer or deserializer where one is given."""
    factory = _FACTORIES[handler.request_streaming, handler.response_streaming]
    return factory(
        behavior,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=serializer or handler.response_serializer,
    )
