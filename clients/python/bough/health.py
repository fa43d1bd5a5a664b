"""The standard health check of gRPC servers, without its generated stubs, which are in a separate package."""

from typing import Final

import grpc
from google.protobuf import wrappers_pb2
from grpc import aio

from bough.arguments import wrong_type

METHOD: Final = "/grpc.health.v1.Health/Check"

SERVING: Final = 1
"""Status of a service that accepts calls."""

# HealthCheckRequest has one string, HealthCheckResponse one enum, both with number 1: on the wire these are the same.
_write: Final = wrappers_pb2.StringValue.SerializeToString
_read: Final = wrappers_pb2.Int32Value.FromString


def check_request(service: str) -> wrappers_pb2.StringValue:
    """Return the request for the status of a service by its name, of the whole server if that is empty."""
    if not isinstance(service, str):
        raise wrong_type("service", "a str", service)
    return wrappers_pb2.StringValue(value=service)


def async_check(
    channel: aio.Channel,
) -> "aio.UnaryUnaryMultiCallable[wrappers_pb2.StringValue, wrappers_pb2.Int32Value]":
    """Return the call that asks for the status of a service by its name."""
    return channel.unary_unary(METHOD, request_serializer=_write, response_deserializer=_read)


def sync_check(
    channel: grpc.Channel,
) -> "grpc.UnaryUnaryMultiCallable[wrappers_pb2.StringValue, wrappers_pb2.Int32Value]":
    """Return the same call for threads."""
    return channel.unary_unary(METHOD, request_serializer=_write, response_deserializer=_read)
