"""Validate requests by the rules of the schema (protovalidate); violations become a BadRequest."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final

import grpc
import protovalidate
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import eval_service_pb2, fork_pb2, input_pb2, message_pb2
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
from bough_server.interceptors.request_limits import TooLarge, bounded, excess

_NOT_WALKED: Final = frozenset(
    {
        "bough.v1.AggregateEventsRequest.events",
        "bough.v1.CreateAgentRequest.agent",
        "bough.v1.RunRequest.definitions",
        "bough.v1.UpdateAgentRequest.agent",
        "bough.v1.ValidateAgentRequest.definitions",
    }
)
"""Recorded events are read as they are, and what is wrong with a definition is the catalog's answer."""


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

        parse = bounded(handler_call_details.method, parser(handler))
        return rebuilt(handler, validated, deserializer=parse)


def violations(request: Message) -> list[FieldViolation]:
    """Everything in a request that breaks a rule; of one that holds too much, or times out of range, this alone."""
    if (too_much := excess(request)) is not None:
        return [too_much]
    # Before the rules, because the schema's expressions cannot be evaluated on a time out of range.
    if unwritable := list(_unwritable_times(request, "")):
        return unwritable
    try:
        broken = protovalidate.collect_violations(_ruled(request))
    except protovalidate.EvaluationError:
        description = "has a value on which the rules of the schema cannot be evaluated"
        return [FieldViolation(field="", description=description, rule="schema.evaluation")]
    return [
        FieldViolation(field=path, description=violation.proto.message, rule=violation.proto.rule_id)
        for violation in broken
        for path in places(request, violation.proto.rule_id) or [_path(violation.proto.field)]
    ]


def _ruled(request: Message) -> Message:
    """The part of a request that has rules: events have none, and looking for them holds up everybody for seconds."""
    if isinstance(request, eval_service_pb2.AggregateEventsRequest):
        return eval_service_pb2.AggregateEventsRequest(options=request.options)
    return request


def _checked(request: Message | TooLarge) -> Message:
    if isinstance(request, TooLarge):
        raise InvalidRequest([request.violation()])
    found = violations(request)
    if found:
        raise InvalidRequest(found)
    return request


async def _checked_each(requests: AsyncIterator[Message | TooLarge]) -> AsyncIterator[Message]:
    async for request in requests:
        yield _checked(request)


def _unwritable_times(message: Message, place: str) -> Iterator[FieldViolation]:
    """Durations and timestamps that JSON has no form for: out of range, or of mixed signs."""
    for path, value in _set_messages(message, place):
        if not isinstance(value, Duration | Timestamp):
            yield from _unwritable_times(value, path)
            continue
        try:
            value.ToJsonString()
        except ValueError:
            kind = value.DESCRIPTOR.name.lower()
            yield FieldViolation(field=path, description=f"is out of the range of a {kind}", rule=f"{kind}.range")


def _set_messages(message: Message, place: str) -> Iterator[tuple[str, Message]]:
    """The messages that are set in a message, each with its path; maps of requests hold none."""
    for field, value in message.ListFields():
        if field.message_type is None or field.full_name in _NOT_WALKED or field.message_type.GetOptions().map_entry:
            continue
        path = f"{place}.{field.name}" if place else field.name
        if field.is_repeated:
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


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


def places(request: Message, rule: str) -> Sequence[str]:
    """The paths of the items that break a rule which a request breaks; none where the rule is of no list."""
    match request:
        case pb.RunRequest() if rule == "input.parts":
            return [*_unsaid(request.input.parts, "input.parts")]
        case pb.ForkRunRequest() if rule == "changes.input.parts":
            return [*_unsaid(request.changes.input.parts, "changes.input.parts")]
        case pb.ForkRunRequest() if rule == "changes.tool_results":
            return [*_unedited(request.changes.tool_results)]
        case pb.ResumeRunRequest() if rule == "answers.request_id":
            return [*_unnamed(request.answers)]
        case pb.ResumeRunRequest() if rule == "answers.answer":
            return [f"answers[{index}]" for index, one in enumerate(request.answers) if not one.WhichOneof("answer")]
    return ()


def _unsaid(parts: Iterable[message_pb2.Part], place: str) -> Iterator[str]:
    """Parts that nobody can say."""
    for index, part in enumerate(parts):
        content = part.WhichOneof("content")
        if content in ("tool_call", "tool_result", "reasoning"):
            yield f"{place}[{index}].{content}"


def _unedited(results: Iterable[fork_pb2.EditedResult]) -> Iterator[str]:
    """Edited results of no call, or without a result."""
    for index, edited in enumerate(results):
        if not edited.call_id:
            yield f"changes.tool_results[{index}].call_id"
        if not edited.HasField("result"):
            yield f"changes.tool_results[{index}].result"


def _unnamed(answers: Iterable[input_pb2.InputAnswer]) -> Iterator[str]:
    """Answers to no request, or to one that an answer before them is to."""
    seen = {""}
    for index, answer in enumerate(answers):
        if answer.request_id in seen:
            yield f"answers[{index}].request_id"
        seen.add(answer.request_id)
