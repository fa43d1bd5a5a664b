"""Turn exceptions into google.rpc.Status: one interceptor, and the statuses it sends."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final, Never

import grpc
import structlog
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc import aio
from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from bough.v1 import error_pb2
from bough_server.errors import AgentLinked, CallError, InvalidRequest, NotFound, Reason
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuilt,
    streaming_behavior,
    unary_behavior,
)

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_EARLY: Final = 0.1
"""A caller's deadline passes this much before ours at most, in seconds: by what its call took to arrive."""

_log = structlog.get_logger(__name__)

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata that carries a serialized Status (what grpc-status reads)."""

DOMAIN: Final = "bough.dev"
"""The domain of ErrorInfo: the reasons are unique in it."""

_MESSAGE_BYTES: Final = 1_000
_VIOLATIONS_BYTES: Final = 2_000
_METADATA_BYTES: Final = 500
"""Peers drop calls whose metadata is over 8 KiB in all, at random or always, and tell their callers RESOURCE_EXHAUSTED.

A message goes twice, once percent-encoded. Details are binary, and grow by a third for peers that take text alone.
"""

_FIELD_BYTES: Final = 200
_DESCRIPTION_BYTES: Final = 500
_NAME_BYTES: Final = 100
_ELLIPSIS: Final = "…"


class Errors(aio.ServerInterceptor):
    """Ends a call whose handler raised: a CallError as it says, anything else as INTERNAL with its stack in the log."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details):
            return handler
        return _streaming(handler) if handler.response_streaming else _unary(handler)


def _unary(handler: Handler) -> Handler:
    inner = unary_behavior(handler)

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, aio.InternalError) as gone:
            _mark_cancelled(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            await _abort(error, context)

    return rebuilt(handler, answer)


def _streaming(handler: Handler) -> Handler:
    inner = streaming_behavior(handler)

    async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message
        except GeneratorExit:
            _mark_cancelled(context)
            raise
        except (asyncio.CancelledError, aio.InternalError) as gone:
            # What is sent to a caller who went away fails where it is not cancelled.
            _mark_cancelled(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            await _abort(error, context)

    return rebuilt(handler, stream)


async def _abort(error: Exception, context: Context) -> Never:
    if isinstance(error, aio.AbortError):
        raise error
    if not isinstance(error, CallError):
        _log.error("a call failed", exc_info=error)
        error = CallError("The server has a defect; its log has the details.")
    status = status_of(error)
    # What the handler set stays: an abort that names its own trailing metadata would replace it.
    trailing = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(_STATUS[error.code], status.message, trailing)


def _mark_cancelled(context: Context) -> None:
    """OpenTelemetry's interceptor would let a cancelled call end with the code 0."""
    remaining = context.time_remaining()
    overdue = remaining is not None and remaining <= _EARLY
    span = trace.get_current_span()
    span.set_attribute("rpc.grpc.status_code", code_pb2.DEADLINE_EXCEEDED if overdue else code_pb2.CANCELLED)
    if overdue:
        span.set_status(Status(StatusCode.ERROR, "The deadline passed."))


_PLAIN: Final = bytes(code for code in range(0x20, 0x7F) if code != ord("%"))
"""What is not percent-encoded."""


def status_of(error: CallError) -> status_pb2.Status:
    """The status: ErrorInfo always; BadRequest, PreconditionFailure, ResourceInfo and RetryInfo if they apply."""
    info = error_details_pb2.ErrorInfo(reason=_name(error.reason), domain=DOMAIN, metadata=_bounded(error.details))
    details: list[Message] = [info]
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error, info))
    if isinstance(error, AgentLinked):
        details.append(_precondition_failure(error, info))
    if isinstance(error, NotFound):
        details.append(error_details_pb2.ResourceInfo(resource_type=_cut(error.kind), resource_name=_cut(error.name)))
    if error.retry_delay is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code, message=_message(error), details=[_packed(detail) for detail in details])


def _name(reason: Reason) -> str:
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def _message(error: CallError) -> str:
    """The sentence; of many violations as many as fit, and how many more there are."""
    if _encoded_size(error.message) <= _MESSAGE_BYTES:
        return error.message
    if not isinstance(error, InvalidRequest):
        return _cut_encoded(error.message, _MESSAGE_BYTES)
    first, *others = map(str, error.violations)
    rest = f"; and {len(others)} more" if others else ""
    told = _cut_encoded(first, _MESSAGE_BYTES - len(rest))
    for number, said in enumerate(others, start=2):
        longer, left = f"{told}; {said}", f"; and {len(error.violations) - number} more"
        if _encoded_size(longer) + len(left) > _MESSAGE_BYTES:
            break
        told, rest = longer, left
    return told + rest


def _bounded(details: Mapping[str, str]) -> dict[str, str]:
    """The details that fit, each cut where it is long."""
    bounded: dict[str, str] = {}
    room = _METADATA_BYTES
    for key, value in details.items():
        key, value = _cut(key), _cut(value)
        room -= len(key.encode()) + len(value.encode())
        if room < 0:
            break
        bounded[key] = value
    return bounded


def _bad_request(error: InvalidRequest, info: error_details_pb2.ErrorInfo) -> error_details_pb2.BadRequest:
    """Every field that fits; where some do not, ErrorInfo says how many there are."""
    request = error_details_pb2.BadRequest()
    for violation in error.violations:
        request.field_violations.add(
            field=_cut(violation.field, _FIELD_BYTES),
            description=_cut(violation.description, _DESCRIPTION_BYTES),
            reason=_name(violation.reason),
        )
        if request.ByteSize() > _VIOLATIONS_BYTES:
            del request.field_violations[-1]
            info.metadata["violations"] = str(len(error.violations))
            break
    return request


def _precondition_failure(
    error: AgentLinked, info: error_details_pb2.ErrorInfo
) -> error_details_pb2.PreconditionFailure:
    """Every linking agent that fits; if some do not, ErrorInfo says how many there are."""
    failure = error_details_pb2.PreconditionFailure()
    for name in error.linked_by:
        failure.violations.add(type=info.reason, subject=_cut(name), description="links to the agent")
        if failure.ByteSize() > _VIOLATIONS_BYTES:
            del failure.violations[-1]
            info.metadata["violations"] = str(len(error.linked_by))
            break
    return failure


def _cut(text: str, most: int = _NAME_BYTES) -> str:
    """A text of at most that many bytes."""
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: most - len(_ELLIPSIS.encode())].decode(errors="ignore") + _ELLIPSIS


def _cut_encoded(text: str, most: int) -> str:
    """A text of at most that many bytes once it is percent-encoded."""
    if _encoded_size(text) <= most:
        return text
    room = most - _encoded_size(_ELLIPSIS)
    kept = ""
    for character in text:
        room -= _encoded_size(character)
        if room < 0:
            break
        kept += character
    return kept + _ELLIPSIS


def _encoded_size(text: str) -> int:
    data = text.encode()
    return len(data) + 2 * len(data.translate(None, _PLAIN))


def _packed(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
