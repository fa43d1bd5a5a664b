"""The schema's rules, enforced on every request before a handler sees it; rules beyond the schema are the handlers'."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import protovalidate
from google.protobuf.message import Message
from grpc import aio

from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.interceptors.handler import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuilt,
    streaming_behavior,
    unary_behavior,
)


class Validation(aio.ServerInterceptor):
    """Refuses requests that break a rule, with all they break; of a stream of requests, each."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details):
            return handler
        inner = streaming_behavior(handler) if handler.response_streaming else unary_behavior(handler)
        check = _checked_each if handler.request_streaming else _checked

        def validated(request: Any, context: Context) -> Any:
            return inner(check(request), context)

        return rebuilt(handler, validated)


def violations(request: Message) -> list[FieldViolation]:
    """Everything in a request that breaks a rule of the schema."""
    return [
        FieldViolation(
            field=_path(violation.proto.field), description=violation.proto.message, rule=violation.proto.rule_id
        )
        for violation in protovalidate.collect_violations(request)
    ]


def _checked(request: Message) -> Message:
    found = violations(request)
    if found:
        raise InvalidRequest(found)
    return request


async def _checked_each(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _checked(request)


def _path(field: protovalidate.FieldPathPb | None) -> str:
    """A path as people write it: `labels["a"]`, `follow.event_names[0]`."""
    if field is None:
        return ""
    return ".".join(_step(element) for element in field.elements)


def _step(element: protovalidate.FieldPathElementPb) -> str:
    subscript = element.subscript
    if subscript is None:
        return element.field_name
    quoted = f'"{subscript.value}"' if subscript.field == "string_key" else str(subscript.value)
    return f"{element.field_name}[{quoted}]"
