"""Check every request by the schema's rules, and the event names it asks to follow, before a handler runs."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough.v1 import agent_pb2, event_pb2
from bough.v1 import agent_service_pb2 as pb
from bough.v1 import eval_service_pb2 as eval_pb
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    Streaming,
    Unary,
    is_ours,
    parser,
    rebuild_handler,
    streaming_behavior,
    unary_behavior,
)
from bough_server.interceptors.parsing import Unparsed
from bough_server.interceptors.request_budget import RequestBudget, RequestReservation
from bough_server.interceptors.request_limits import TooLarge, excess, limit_request_size, most_bytes_of, request_of
from bough_server.log.blobs import blobs_in, data_size, parts_of_request
from bough_server.log.views import EVALUATION_EVENT_NAMES, RUN_EVENT_NAMES
from bough_server.messages import copy_of
from bough_server.schema_rules import find_violations

_CHECKED_ELSEWHERE: Final = frozenset({event_pb2.AgentEvent.DESCRIPTOR, agent_pb2.AgentDefinition.DESCRIPTOR})
"""Messages that are not checked here: recorded events are read as they are, and definitions are validated by the
catalog."""

_WITH_FILES: Final = (pb.RunRequest, pb.ResumeRunRequest, pb.AnswerInputRequest, pb.ForkRunRequest)
_Requested: TypeAlias = pb.RunRequest | pb.ResumeRunRequest | pb.AnswerInputRequest | pb.ForkRunRequest

_FOLLOWING: Final = (pb.RunRequest, pb.WatchRunRequest, pb.ResumeRunRequest, pb.ForkRunRequest)
_FOLLOWING_EVALUATIONS: Final = (eval_pb.EvaluateRequest, eval_pb.WatchEvaluationRequest)


_NOT_STORED: Final = (eval_pb.ScoreInvocationsRequest, eval_pb.DiffInvocationsRequest)
"""Requests whose times are read, and neither stored nor answered; records may have 100,000 of them."""


class Validation(aio.ServerInterceptor):
    """Reads requests as there is room for them, and rejects those that break rules, with every violation.

    No interceptor outside of it holds a request, so that a handler can free its bytes.
    """

    def __init__(self, budget: RequestBudget, max_files_bytes: int) -> None:
        self._budget, self._max_files_bytes = budget, max_files_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details):
            return handler
        method, files = handler_call_details.method, self._max_files_bytes
        reader = _Reader(
            budget=self._budget,
            most=most_bytes_of(request_of(method), files),
            parse=limit_request_size(method, parser(handler), max_files_bytes=files),
        )
        if handler.request_streaming:
            behavior: Any = _call_with_each(unary_behavior(handler), reader)
        elif handler.response_streaming:
            behavior = _stream_responses(streaming_behavior(handler), reader)
        else:
            behavior = _answer(unary_behavior(handler), reader)
        return rebuild_handler(handler, behavior, deserializer=bytes, reads_requests=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads the requests of a method's calls, parses and checks them."""

    budget: RequestBudget
    most: int
    parse: Callable[[bytes], Message | TooLarge | Unparsed]

    async def read(self, context: Context) -> tuple[Message | None, RequestReservation]:
        """Return the next request of a call, None after the last one, and its room."""
        data, room = await self.budget.receive(context, most=self.most)
        if data is None:
            return None, room
        try:
            request = self.parse(data)
            del data  # before the rules, which copy what they check
            return _check_request(request), room
        except BaseException:
            room.release()
            raise

    async def read_one(self, context: Context) -> tuple[Message, RequestReservation]:
        """Return the request of a call that has one, and its room. Raises InvalidRequest if there is none."""
        request, room = await self.read(context)
        if request is None:
            raise InvalidRequest([FieldViolation(field="", description="The call has no request.")])
        return request, room


def _answer(inner: Unary, reader: _Reader) -> Unary:
    async def answer(_: object, context: Context) -> Any:
        request, room = await reader.read_one(context)
        try:
            return await inner(request, context)
        finally:
            room.release()

    return answer


def _stream_responses(inner: Streaming, reader: _Reader) -> Streaming:
    async def stream(_: object, context: Context) -> AsyncGenerator[Any, None]:
        request, room = await reader.read_one(context)
        try:
            responses = inner(request, context)
            del request
            async with aclosing(responses):
                async for response in responses:
                    # What the request asked for has begun; its handler holds no bytes of it any more.
                    room.release()
                    yield response
        finally:
            room.release()

    return stream


def _call_with_each(inner: Unary, reader: _Reader) -> Unary:
    async def answer(_: object, context: Context) -> Any:
        async def read_each() -> AsyncIterator[Message]:
            while True:
                request, room = await reader.read(context)
                if request is None:
                    return
                try:
                    yield request
                finally:
                    room.release()

        return await inner(read_each(), context)

    return answer


def violations(request: Message) -> list[FieldViolation]:
    """Return every violation of a request.

    A request with too many items, or with times out of range, gets only those violations.
    """
    if (too_much := excess(request)) is not None:
        return [too_much]
    return _violations(_drop_file_bytes(request) if isinstance(request, _WITH_FILES) else request)


def _drop_file_bytes(request: _Requested) -> _Requested:
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
    if not isinstance(request, _NOT_STORED) and (unwritable := list(_unwritable_times(request, ""))):
        return unwritable
    broken = find_violations(request)
    reported = {violation.field for violation in broken}
    return [*broken, *_unknown_event_names(request, reported), *unstorable_texts(request, reported)]


def _unknown_event_names(request: Message, reported: Container[str]) -> Iterator[FieldViolation]:
    """Yield a violation for each event name that matches no event. Fields in `reported` are skipped."""
    if not isinstance(request, (*_FOLLOWING, *_FOLLOWING_EVALUATIONS)):
        return
    known = RUN_EVENT_NAMES if isinstance(request, _FOLLOWING) else EVALUATION_EVENT_NAMES
    for index, name in enumerate(request.follow.event_names):
        field = f"follow.event_names[{index}]"
        if field not in reported and (description := known.problem(name)):
            yield FieldViolation(field=field, description=description)


def _check_request(request: Message | TooLarge | Unparsed) -> Message:
    if isinstance(request, TooLarge):
        raise InvalidRequest([request.violation()])
    if isinstance(request, Unparsed):
        raise request.error()
    found = violations(request)
    if found:
        raise InvalidRequest(found)
    return request


def _unwritable_times(message: Message, place: str) -> Iterator[FieldViolation]:
    """Yield a violation for each duration and timestamp that has no JSON form: out of range, or of mixed signs."""
    for path, value in _find_message_fields(message, place):
        if not isinstance(value, Duration | Timestamp):
            yield from _unwritable_times(value, path)
            continue
        try:
            value.ToJsonString()
        except ValueError:
            kind = value.DESCRIPTOR.name.lower()
            yield FieldViolation(field=path, description=f"is out of the range of a {kind}")


def _find_message_fields(message: Message, place: str) -> Iterator[tuple[str, Message]]:
    """Yield the set message fields of a message with their paths. Maps are skipped: none in a request holds times."""
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or kind in _CHECKED_ELSEWHERE or kind.GetOptions().map_entry:
            continue
        path = f"{place}.{field.name}" if place else field.name
        if field.is_repeated:
            yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
        else:
            yield path, value


_IDS: Final = frozenset(
    {"run_id", "session_id", "evaluation_id", "case_id", "agent", "eval_set_name", "name", "revision"}
)
_MESSAGES: Final = frozenset({"filter", "baseline", "candidate"})
"""The fields of requests that have ids in them too."""

_DESCRIPTION: Final = "must not have the character U+0000"


def unstorable_texts(request: Message, reported: Container[str], path: str = "") -> Iterator[FieldViolation]:
    """Yield a violation for each id and label with U+0000. Fields in `reported` are skipped."""
    for field, value in request.ListFields():
        where = f"{path}{field.name}"
        if field.name in _IDS and isinstance(value, str):
            if "\0" in value and where not in reported:
                yield FieldViolation(field=where, description=_DESCRIPTION)
        elif field.name == "labels":
            for key, text in value.items():
                at = f'{where}["{key}"]'
                if "\0" in key + text and at not in reported:
                    yield FieldViolation(field=at.replace("\0", ""), description=_DESCRIPTION)
        elif field.name in _MESSAGES and not path:
            yield from unstorable_texts(value, reported, f"{where}.")
