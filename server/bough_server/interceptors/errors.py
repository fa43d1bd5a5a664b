"""Translate exceptions to google.rpc.Status: one interceptor, and the statuses that it sends."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Never, TypeAlias

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
from bough_server.clock import Clock, SystemClock
from bough_server.errors import AgentLinked, CallError, InvalidRequest, NotFound, Reason, Unauthenticated
from bough_server.interceptors.handlers import (
    Context,
    Continuation,
    Handler,
    is_ours,
    rebuild_handler,
    streaming_behavior,
    unary_behavior,
)
from bough_server.quotas import QuotaExceeded

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_EARLY: Final = 0.1
"""Seconds by which the caller's deadline may pass before ours: the time that the call took to arrive."""

_LOGGED_FIELDS: Final = 10
"""The most fields of a refused request that the log names."""

_log = structlog.get_logger(__name__)

DETAILS_KEY: Final = "grpc-status-details-bin"
"""The trailing metadata that carries a serialized Status, as grpc-status reads it."""

DOMAIN: Final = "bough.dev"
"""The domain of ErrorInfo, in which the reasons are unique."""

_MESSAGE_BYTES: Final = 1_000
_VIOLATIONS_BYTES: Final = 2_000
_METADATA_BYTES: Final = 500
"""Bounds that keep trailing metadata below 8 KiB: larger metadata makes peers drop calls, some at random, with
RESOURCE_EXHAUSTED.

A message is sent twice, once percent-encoded. Details are binary and grow by a third for peers that accept only text.
"""

_FIELD_BYTES: Final = 200
_DESCRIPTION_BYTES: Final = 500
_NAME_BYTES: Final = 100
_ELLIPSIS: Final = "…"


LOGGED_REFUSALS: Final = 10
"""The most refused calls of one method and code that are logged in each second."""

_WINDOW_SECONDS: Final = 1.0


class RefusalLog:
    """Logs refused calls: each of the first ones of a second, and of the others their number, with the next refusal."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, int]] = {}
        """By method and code, when the current second began and how many calls were refused in it."""

    def log(self, error: CallError, method: str) -> None:
        """Log a refused call of a method, unless too many are."""
        now = self._clock.monotonic()
        for key, (begin, count) in list(self._windows.items()):
            if now - begin >= _WINDOW_SECONDS:
                del self._windows[key]
                # Without the context of this call, which may be another client's.
                contextvars.Context().run(_log_more, *key, count - LOGGED_REFUSALS)
        key = (method, code_pb2.Code.Name(error.code))
        begin, count = self._windows.get(key, (now, 0))
        self._windows[key] = (begin, count + 1)
        if count < LOGGED_REFUSALS:
            _log.info("call refused", **_refusal(error))


def _log_more(method: str, code: str, count: int) -> None:
    if count > 0:
        _log.info("more calls refused", method=method, code=code, count=count)


class Errors(aio.ServerInterceptor):
    """Ends a call whose handler raised: a CallError with its status, others with INTERNAL and the stack in the log."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Default `clock`: the machine's."""
        self._refusals = RefusalLog(clock or SystemClock())

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not is_ours(handler_call_details):
            return handler
        end = partial(_end, method=handler_call_details.method, refusals=self._refusals)
        return _streaming(handler, end) if handler.response_streaming else _unary(handler, end)


End: TypeAlias = Callable[[Exception, Context], Awaitable[Never]]
"""Ends a call with the status of an exception."""


def _unary(handler: Handler, end: End) -> Handler:
    inner = unary_behavior(handler)

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except (asyncio.CancelledError, aio.InternalError) as gone:
            _set_cancel_status(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            failed = error
        return await end(failed, context)  # outside of the handling, see _streaming

    return rebuild_handler(handler, answer)


def _streaming(handler: Handler, end: End) -> Handler:
    inner = streaming_behavior(handler)

    async def stream(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message
        except GeneratorExit:  # the stream was closed before its end: the caller disconnected
            _set_cancel_status(context)
            raise
        except (asyncio.CancelledError, aio.InternalError) as gone:
            # A write to a disconnected caller raises InternalError unless the task is cancelled first.
            _set_cancel_status(context)
            raise asyncio.CancelledError from gone
        except Exception as error:
            failed = error
        else:
            return
        # Outside of the handling: OpenTelemetry exports the exception that ends a call, together with the one that it
        # was raised for, and whose message may have content.
        await end(failed, context)

    return rebuild_handler(handler, stream)


async def _end(error: Exception, context: Context, *, method: str, refusals: RefusalLog) -> Never:
    if isinstance(error, aio.AbortError):  # an inner interceptor or handler has ended the call already
        raise error
    if not isinstance(error, CallError):
        _log.error("a call failed", exc_info=error)
        # The exception's own text stays in the log: it may contain secrets.
        error = CallError("The server failed unexpectedly. Its log has the details.")
    else:
        refusals.log(error, method)
    await abort(error, context)


async def abort(error: CallError, context: Context) -> Never:
    """End a call with the status of an error."""
    status = status_of(error)
    # abort() replaces the trailing metadata that the handler has set, so it is passed on.
    trailing = (*(context.trailing_metadata() or ()), (DETAILS_KEY, status.SerializeToString()))
    await context.abort(_STATUS[error.code], status.message, trailing)


def _refusal(error: CallError) -> dict[str, str]:
    """Return what the log says of a refused call; the values of the request stay out of it, they may be secret."""
    facts = {"code": code_pb2.Code.Name(error.code), "reason": _name(error.reason)}
    if isinstance(error, Unauthenticated) and error.why:
        facts["why"] = error.why
    if isinstance(error, InvalidRequest):
        facts["fields"] = ", ".join(_truncate(each.field) for each in error.violations[:_LOGGED_FIELDS])
    return facts


def _set_cancel_status(context: Context) -> None:
    """Set the status code on the span: OpenTelemetry's interceptor would record 0 (OK) for a cancelled call."""
    remaining = context.time_remaining()
    overdue = remaining is not None and remaining <= _EARLY
    span = trace.get_current_span()
    span.set_attribute("rpc.grpc.status_code", code_pb2.DEADLINE_EXCEEDED if overdue else code_pb2.CANCELLED)
    if overdue:
        span.set_status(Status(StatusCode.ERROR, "The deadline passed."))


_PLAIN: Final = bytes(code for code in range(0x20, 0x7F) if code != ord("%"))
"""Bytes that are not percent-encoded."""


def status_of(error: CallError) -> status_pb2.Status:
    """Return the status of an error.

    It always has ErrorInfo. It has BadRequest, PreconditionFailure, QuotaFailure, ResourceInfo and RetryInfo if they
    apply.
    """
    info = error_details_pb2.ErrorInfo(reason=_name(error.reason), domain=DOMAIN, metadata=_fit_details(error.details))
    details: list[Message] = [info]
    if error.violations:
        details.append(_bad_request(error, info))
    if isinstance(error, AgentLinked):
        details.append(_precondition_failure(error, info))
    if isinstance(error, QuotaExceeded):
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=_truncate(error.subject, _FIELD_BYTES),
            quota_id=error.name,
            quota_value=error.limit,
            description=_truncate(error.message, _DESCRIPTION_BYTES),
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if isinstance(error, NotFound):
        details.append(
            error_details_pb2.ResourceInfo(resource_type=_truncate(error.kind), resource_name=_truncate(error.name))
        )
    if error.retry_delay is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_delay * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code, message=_message(error), details=[_pack(detail) for detail in details])


def _name(reason: Reason) -> str:
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def _message(error: CallError) -> str:
    """Return the error's sentence; for many violations as many as fit, and the number of the remaining ones."""
    if _percent_encoded_size(error.message) <= _MESSAGE_BYTES:
        return error.message
    if not isinstance(error, InvalidRequest):
        return _truncate_encoded_text(error.message, _MESSAGE_BYTES)
    first, *others = map(str, error.violations)
    rest = f"; and {len(others)} more" if others else ""
    text = _truncate_encoded_text(first, _MESSAGE_BYTES - len(rest))
    for number, other in enumerate(others, start=2):
        longer, left = f"{text}; {other}", f"; and {len(error.violations) - number} more"
        if _percent_encoded_size(longer) + len(left) > _MESSAGE_BYTES:
            break
        text, rest = longer, left
    return text + rest


def _fit_details(details: Mapping[str, str]) -> dict[str, str]:
    """Return the details that fit, each truncated if it is long."""
    bounded: dict[str, str] = {}
    room = _METADATA_BYTES
    for key, value in details.items():
        key, value = _truncate(key), _truncate(value)
        room -= len(key.encode()) + len(value.encode())
        if room < 0:
            break
        bounded[key] = value
    return bounded


def _bad_request(error: CallError, info: error_details_pb2.ErrorInfo) -> error_details_pb2.BadRequest:
    """Return every field violation that fits; if some do not, ErrorInfo holds the number of all."""
    request = error_details_pb2.BadRequest()
    for violation in error.violations:
        request.field_violations.add(
            field=_truncate(violation.field, _FIELD_BYTES),
            description=_truncate(violation.description, _DESCRIPTION_BYTES),
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
    """Return every linking agent that fits; if some do not, ErrorInfo holds the number of all."""
    failure = error_details_pb2.PreconditionFailure()
    for name in error.linked_by:
        failure.violations.add(type=info.reason, subject=_truncate(name), description="links to the agent")
        if failure.ByteSize() > _VIOLATIONS_BYTES:
            del failure.violations[-1]
            info.metadata["violations"] = str(len(error.linked_by))
            break
    return failure


def _truncate(text: str, most: int = _NAME_BYTES) -> str:
    data = text.encode()
    if len(data) <= most:
        return text
    return data[: most - len(_ELLIPSIS.encode())].decode(errors="ignore") + _ELLIPSIS


def _truncate_encoded_text(text: str, most: int) -> str:
    """Truncate a text to at most `most` bytes of its percent-encoded form."""
    if _percent_encoded_size(text) <= most:
        return text
    room = most - _percent_encoded_size(_ELLIPSIS)
    kept = ""
    for character in text:
        room -= _percent_encoded_size(character)
        if room < 0:
            break
        kept += character
    return kept + _ELLIPSIS


def _percent_encoded_size(text: str) -> int:
    data = text.encode()
    return len(data) + 2 * len(data.translate(None, _PLAIN))


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
