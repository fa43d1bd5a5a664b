"""Every RPC of the schema, by its descriptor: each call is recorded, and answered by a script or by a response."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import grpc
from google.protobuf import wrappers_pb2
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bough.health import METHOD as HEALTH
from bough.health import SERVING
from bough.v1 import access_service_pb2, agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2

_METHODS: Final[Mapping[str, MethodDescriptor]] = {
    f"/{service.full_name}/{method.name}": method
    for file in (access_service_pb2, agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

Behavior: TypeAlias = Callable[..., object]
"""Takes a request and the context of its call; returns a response, or an iterator of responses."""


class Dispatch(grpc.GenericRpcHandler):
    """Answers every RPC: with a response that was given for it, else by its script, else as UNIMPLEMENTED."""

    def __init__(self, scripts: Mapping[str, Behavior]) -> None:
        self._scripts = scripts
        self._responses: dict[str, Message] = {}
        self.requests: list[Message] = []
        """Every request that arrived, in order."""

    def respond(self, response: Message) -> None:
        """Answer the RPC that returns such a message with this one from now on. Raises ValueError if there is none."""
        name = response.DESCRIPTOR.full_name
        if all(method.output_type.full_name != name for method in _METHODS.values()):
            raise ValueError(f"No RPC returns {name}.")
        self._responses[name] = response

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Message, Message] | None":
        """Return what answers a call, None for an RPC that is not of the schema."""
        if handler_call_details.method == HEALTH:
            return grpc.unary_unary_rpc_method_handler(_say_serving, None, _write)
        method = _METHODS.get(handler_call_details.method)
        if method is None:
            return None
        handlers: Mapping[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Message, Message]]] = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
        }
        handler = handlers[method.client_streaming, method.server_streaming]
        return handler(self._behavior(method), GetMessageClass(method.input_type).FromString, _write)

    def _behavior(self, method: MethodDescriptor) -> Behavior:
        def behave(request: Message | Iterator[Message], context: grpc.ServicerContext) -> object:
            self.requests.extend([request] if isinstance(request, Message) else request)
            response = self._responses.get(method.output_type.full_name)
            if response is not None:
                return iter([response]) if method.server_streaming else response
            script = self._scripts.get(method.name)
            if script is None:
                how = f"FakeServer.respond({method.output_type.name}(...)) says what to answer"
                context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method.name} is not scripted: {how}.")
            return script(request, context)

        return behave


def _write(message: Message) -> bytes:
    return message.SerializeToString()


def _say_serving(request: bytes, context: grpc.ServicerContext) -> wrappers_pb2.Int32Value:
    # On the wire an answer of the health check is the same as a number.
    return wrappers_pb2.Int32Value(value=SERVING)
