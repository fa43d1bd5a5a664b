"""Check every request by the schema's rules, and the event names it asks to follow, before a handler runs.

The stubs have no rules, so that clients do not need buf.validate. The server ships the whole schema as a file and
parses each request a second time by that schema to check it.
"""

from collections.abc import AsyncIterator, Container, Iterator
from functools import cache
from importlib import resources
from typing import Any, Final, TypeAlias

import grpc
import protovalidate
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough.v1 import agent_pb2, event_pb2
from bough.v1 import agent_service_pb2 as pb
from bough_server.blobs import blobs_in, data_size, parts_of_request
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    parser,
    rebuilt,
    streaming_behavior,
    unary_behavior,
)
from bough_server.interceptors.parsing import Unparsed
from bough_server.interceptors.request_limits import TooLarge, bounded, excess
from bough_server.messages import copy_of
from bough_server.views import unknown_name

_NOT_JUDGED: Final = frozenset({event_pb2.AgentEvent.DESCRIPTOR, agent_pb2.AgentDefinition.DESCRIPTOR})
"""Messages that are not checked here: recorded events are read as they are, and definitions are validated by the
catalog."""

_WITH_FILES: Final = (pb.RunRequest, pb.ResumeRunRequest, pb.ForkRunRequest)
_Requested: TypeAlias = pb.RunRequest | pb.ResumeRunRequest | pb.ForkRunRequest

_FOLLOWING: Final = (pb.RunRequest, pb.WatchRunRequest, pb.ResumeRunRequest, pb.ForkRunRequest)


class Validation(aio.ServerInterceptor):
    """Rejects requests that break rules, with every violation; checks each request of a stream."""

    def __init__(self, max_files_bytes: int) -> None:
        self._max_files_bytes = max_files_bytes

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

        parse = bounded(handler_call_details.method, parser(handler), max_files_bytes=self._max_files_bytes)
        return rebuilt(handler, validated, deserializer=parse)


def violations(request: Message) -> list[FieldViolation]:
    """Return every violation of a request.

    A request with too many items, or with times out of range, gets only those violations.
    """
    if (too_much := excess(request)) is not None:
        return [too_much]
    return _violations(_light(request) if isinstance(request, _WITH_FILES) else request)


def _light(request: _Requested) -> _Requested:
    """Return a copy without the bytes of files, if there are any: no rule looks further than whether there are."""
    if not any(data_size(parts) for _, parts in parts_of_request(request)):
        return request
    light = copy_of(request)
    for blob in (blob for _, parts in parts_of_request(light) for blob in blobs_in(parts)):
        if blob.data:
            blob.data = b"-"
    return light


def _violations(request: Message) -> list[FieldViolation]:
    # The schema's rules accept times out of range, but a log that holds one could not be written as JSON.
    if unwritable := list(_unwritable_times(request, "")):
        return unwritable
    broken = [
        FieldViolation(field=_path(violation.proto.field), description=violation.proto.message)
        for violation in protovalidate.collect_violations(_with_rules(request))
    ]
    return [*broken, *_unknown_event_names(request, {violation.field for violation in broken})]


def _unknown_event_names(request: Message, reported: Container[str]) -> Iterator[FieldViolation]:
    """Yield a violation for each event name that matches no event. Fields in `reported` are skipped."""
    names = request.follow.event_names if isinstance(request, _FOLLOWING) else ()
    for index, name in enumerate(names):
        field = f"follow.event_names[{index}]"
        if field not in reported and (description := unknown_name(name)):
            yield FieldViolation(field=field, description=description)


def _with_rules(request: Message) -> Message:
    """Parse a request again by the schema that has the rules; takes 1.5 us for a minimal one."""
    return GetMessageClass(schema().FindMessageTypeByName(request.DESCRIPTOR.full_name)).FromString(
        request.SerializeToString()
    )


@cache
def schema() -> DescriptorPool:
    """Return the whole schema, read from this package in a few milliseconds, in a pool separate from the stubs'."""
    # Its own pool: the stubs' default pool has the same files without the rules.
    pool = DescriptorPool()
    data = resources.files("bough_server").joinpath("bough.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


def _checked(request: Message | TooLarge | Unparsed) -> Message:
    if isinstance(request, TooLarge):
        raise InvalidRequest([request.violation()])
    if isinstance(request, Unparsed):
        raise request.error()
    found = violations(request)
    if found:
        raise InvalidRequest(found)
    return request


async def _checked_each(requests: AsyncIterator[Message | TooLarge | Unparsed]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _checked(request)


def _unwritable_times(message: Message, place: str) -> Iterator[FieldViolation]:
    """Yield a violation for each duration and timestamp that has no JSON form: out of range, or of mixed signs."""
    for path, value in _set_messages(message, place):
        if not isinstance(value, Duration | Timestamp):
            yield from _unwritable_times(value, path)
            continue
        try:
            value.ToJsonString()
        except ValueError:
            kind = value.DESCRIPTOR.name.lower()
            yield FieldViolation(field=path, description=f"is out of the range of a {kind}")


def _set_messages(message: Message, place: str) -> Iterator[tuple[str, Message]]:
    """Yield the set message fields of a message with their paths. Maps are skipped: none in a request holds times."""
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or kind in _NOT_JUDGED or kind.GetOptions().map_entry:
            continue
        path = f"{place}.{field.name}" if place else field.name
        if field.is_repeated:
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


def _path(field: protovalidate.FieldPathPb | None) -> str:
    """Return a path in readable form: `labels["a"]`, `follow.event_names[0]`."""
    if field is None:
        return ""
    return ".".join(_step(element) for element in field.elements)


def _step(element: protovalidate.FieldPathElementPb) -> str:
    subscript = element.subscript
    if subscript is None:
        return element.field_name
    quoted = f'"{subscript.value}"' if subscript.field == "string_key" else str(subscript.value)
    return f"{element.field_name}[{quoted}]"
