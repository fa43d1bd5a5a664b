"""Exceptions of this package, as one tree, and their translation from gRPC errors.

BoughError
├── CallFailed             the server refused the call or was not reached: a gRPC status
│   ├── InvalidRequest     INVALID_ARGUMENT, with the fields that break a rule
│   ├── NotFound           NOT_FOUND, also for another tenant's resource
│   ├── AlreadyExists      ALREADY_EXISTS: the request id was used with other content, or the name or id is taken
│   ├── SessionBusy        ABORTED: another run holds the session
│   ├── ConcurrentChange   ABORTED: others changed the session or the run each time that the server tried
│   ├── InsufficientBalance RESOURCE_EXHAUSTED: nothing is left of the account that pays for the run
│   ├── SessionQueueFull   RESOURCE_EXHAUSTED: as many runs wait for the session as may
│   ├── OutOfRange         OUT_OF_RANGE: the sequence is beyond the end of the log
│   ├── AlreadyAnswered    FAILED_PRECONDITION: the input request has a different answer already
│   ├── RunEnded           FAILED_PRECONDITION: the run has ended and accepts no answers
│   ├── EvaluationNotEnded FAILED_PRECONDITION: the call takes an evaluation that has ended
│   ├── ForkRefused        FAILED_PRECONDITION: the run cannot be forked there
│   ├── AgentFixed         FAILED_PRECONDITION: the agent is defined in a file or in code
│   ├── AgentLinked        FAILED_PRECONDITION: other agents link to the agent
│   ├── AgentUnusable      FAILED_PRECONDITION: an agent, tool or model that the run needs is gone
│   ├── RevisionMoved      ABORTED: the agent has another revision than the caller read
│   ├── Unavailable        UNAVAILABLE: the server is unreachable, stopping, or cannot continue the run
│   ├── DeadlineExceeded   DEADLINE_EXCEEDED: the caller's timeout has passed
│   └── CallCancelled      CANCELLED
└── RunNotAnswered         the call succeeded and its run has no answer
    ├── RunFailedError      with its AgentError
    ├── RunCancelledError   with its AgentError
    └── RunInterruptedErrorwith its open input requests
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from bough.v1 import error_pb2, input_pb2

_DETAILS_KEY = "grpc-status-details-bin"

_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
"""How the messages begin that the gRPC library has for a server that cannot be reached."""

NO_SERVER = "No server could be reached: start one with `bough serve`, or check the client's address"
"""How the message of Unavailable begins if no connection could be made."""

_TOO_LARGE = re.compile(r"Received message larger than max \((\d+) vs\. (\d+)\)")
"""The message that the gRPC library has for a request which is larger than the server takes."""

_NEVER_ACCEPTED = "CANCELLED"
"""Details that the gRPC library sets, with the code CANCELLED, on calls in flight to a server that stops:
https://github.com/grpc/grpc/issues/41785."""


class BoughError(Exception):
    """Base of the exceptions of this package. `message` is a sentence for users."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    # The default calls the class with the message alone, but the classes below are made from other values.
    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), *self.args), self.__dict__


def _restore(kind: type[BaseException], *args: object) -> BaseException:
    """Return an exception whose attributes are set afterwards."""
    return kind.__new__(kind, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field of a request that breaks a rule; `reason` is the name of an ErrorReason without its prefix."""

    field: str
    description: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A failed call as the server described it.

    `reason` is the name of an ErrorReason without its prefix, empty if the server sent none; `details` are the metadata
    of its ErrorInfo, such as `run_id`; `subjects` are those of its PreconditionFailure; `retry_delay` is that of its
    RetryInfo, in seconds.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    subjects: tuple[str, ...] = ()
    retry_delay: float | None = None


class CallFailed(BoughError):
    """The server refused the call or was not reached."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return self.status.code

    @property
    def reason(self) -> str:
        """Name of an ErrorReason without its prefix; empty if the server sent none."""
        return self.status.reason

    @property
    def run_id(self) -> str:
        """Id of the run that caused the error; empty if the server names none."""
        return self.status.details.get("run_id", "")


class InvalidRequest(CallFailed):
    """The request breaks a rule; `violations` names each field."""

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """Every field that breaks a rule."""
        return self.status.violations


class NotFound(CallFailed):
    """A resource that the request names does not exist, or belongs to another tenant."""


class AlreadyExists(CallFailed):
    """The request id was used with other content, for the run `run_id`; or the agent name or session id is taken."""


class SessionBusy(CallFailed):
    """The session has a run that has not ended: `run_id`."""


class ConcurrentChange(CallFailed):
    """Others changed the session or the run each time that the server tried; nothing has happened: call again."""


class SessionQueueFull(CallFailed):
    """As many runs wait for the session as may; the run `run_id` holds it."""


class InsufficientBalance(CallFailed):
    """Nothing is left of the account that pays for the run: add to it; waiting does not help."""


class OutOfRange(CallFailed):
    """The sequence is beyond the end of the log."""


class AlreadyAnswered(CallFailed):
    """The input request has a different answer already, which is kept."""


class RunEnded(CallFailed):
    """The run has ended and accepts no answers."""


class EvaluationNotEnded(CallFailed):
    """The call takes an evaluation that has ended: it has no result yet, or cannot be deleted before."""


class ForkRefused(CallFailed):
    """The run cannot be forked there; the message says why."""


class AgentFixed(CallFailed):
    """The agent is defined in a file or in code of the server; no call can change it."""


class AgentLinked(CallFailed):
    """The agent cannot be deleted because other agents link to it: `linked_by`."""

    @property
    def linked_by(self) -> tuple[str, ...]:
        """Names of the agents that link to it; empty if the server sent none."""
        return self.status.subjects


class AgentUnusable(CallFailed):
    """An agent, a tool or a model that a run of the agent may need does not exist any more."""


class RevisionMoved(CallFailed):
    """The agent has changed since the caller read it; its revision is now `revision`."""

    @property
    def revision(self) -> str:
        """Current revision of the agent; empty if the server sent none."""
        return self.status.details.get("revision", "")


class Unavailable(CallFailed):
    """The server is unreachable, is stopping, or cannot continue the run; `reason` says which."""


class DeadlineExceeded(CallFailed):
    """The caller's timeout has passed."""


class CallCancelled(CallFailed):
    """The call was cancelled."""


class RunNotAnswered(BoughError):
    """The run has no answer. Raised as this class itself if the run has not ended."""

    def __init__(self, run_id: str, error: error_pb2.AgentError) -> None:
        super().__init__(error.message or "The run ended without an answer.")
        self.run_id = run_id
        self.error = error


class RunFailedError(RunNotAnswered):
    """The run ended with an error."""


class RunCancelledError(RunNotAnswered):
    """The run was cancelled."""


class RunInterruptedError(RunNotAnswered):
    """The run waits for input: resume it with an answer to each of `requests`."""

    def __init__(self, run_id: str, requests: Sequence[input_pb2.InputRequest]) -> None:
        asked = "; ".join(request.prompt or "an answer" for request in requests)
        super().__init__(run_id, error_pb2.AgentError(message=f"The run waits for input: {asked or 'an answer'}"))
        self.requests = tuple(requests)


_BY_CODE: Mapping[grpc.StatusCode, type[CallFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: CallCancelled,
}

_BY_REASON: Mapping[tuple[grpc.StatusCode, str], type[CallFailed]] = {
    (grpc.StatusCode.ABORTED, "SESSION_BUSY"): SessionBusy,
    (grpc.StatusCode.ABORTED, "CONCURRENT_CHANGE"): ConcurrentChange,
    (grpc.StatusCode.FAILED_PRECONDITION, "ALREADY_ANSWERED"): AlreadyAnswered,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "SESSION_QUEUE_FULL"): SessionQueueFull,
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_BALANCE"): InsufficientBalance,
    (grpc.StatusCode.FAILED_PRECONDITION, "RUN_ENDED"): RunEnded,
    (grpc.StatusCode.FAILED_PRECONDITION, "EVALUATION_NOT_ENDED"): EvaluationNotEnded,
    (grpc.StatusCode.FAILED_PRECONDITION, "FORK_REFUSED"): ForkRefused,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_FIXED"): AgentFixed,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_LINKED"): AgentLinked,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_UNUSABLE"): AgentUnusable,
    (grpc.StatusCode.ABORTED, "REVISION_MOVED"): RevisionMoved,
}


def from_status(status: Status) -> CallFailed:
    """Return the exception for a failed call."""
    kind = _BY_REASON.get((status.code, status.reason)) or _BY_CODE.get(status.code, CallFailed)
    return kind(status)


def from_rpc_error(error: grpc.RpcError) -> CallFailed:
    """Return the exception for a gRPC error, with the google.rpc details of its trailing metadata.

    Accepts the errors of both kinds of channel: grpc.aio.AioRpcError, and grpc.RpcError of a synchronous one.
    """
    code, text = error.code(), error.details()
    if code is grpc.StatusCode.CANCELLED and text == _NEVER_ACCEPTED:
        # Not the caller's cancellation: another server can serve the call, so it has to count as retryable.
        code, text = grpc.StatusCode.UNAVAILABLE, "The server stopped before it accepted the call; repeat it."
    if code is grpc.StatusCode.UNAVAILABLE and text is not None and text.startswith(_NO_CONNECTION):
        text = f"{NO_SERVER} ({text})."
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (sizes := _TOO_LARGE.search(text or "")):
        sent, most = (f"{int(size):,}" for size in sizes.groups())
        text = f"The request has {sent} bytes, and the server takes {most}: send smaller files, or raise its setting "
        text += "server.max_files_bytes."
    message = text or f"The call failed with {code.name}."
    # The two kinds of channel have different classes for metadata; both iterate over pairs.
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    status = _parse_details(Status(code=code, message=message), metadata)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not status.reason:
        # It passed in the gRPC library, whose message means nothing to users, before the server could say so.
        return build_deadline_error("The call's deadline passed before the server answered.")
    return from_status(status)


def build_deadline_error(message: str) -> DeadlineExceeded:
    """Return the exception for a deadline that passed in the client."""
    return DeadlineExceeded(Status(code=grpc.StatusCode.DEADLINE_EXCEEDED, message=message, reason="DEADLINE_EXCEEDED"))


def build_early_end_error(subject: str) -> Unavailable:
    """Return the exception for a stream that ended without an error, and without the event that it was to end with."""
    message = f"The server ended the stream before the end of the {subject}."
    return Unavailable(Status(code=grpc.StatusCode.UNAVAILABLE, message=message))


def _parse_details(status: Status, metadata: Iterable[tuple[str, str | bytes]]) -> Status:
    encoded = next((value for key, value in metadata if key == _DETAILS_KEY), None)
    if not isinstance(encoded, bytes):
        return status
    reason, retry_delay = "", None
    details: dict[str, str] = {}
    violations: tuple[FieldViolation, ...] = ()
    subjects: tuple[str, ...] = ()
    for detail in status_pb2.Status.FromString(encoded).details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        precondition = error_details_pb2.PreconditionFailure()
        if detail.Unpack(info):
            reason, details = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            violations = tuple(
                FieldViolation(field=v.field, description=v.description, reason=v.reason) for v in bad.field_violations
            )
        elif detail.Unpack(precondition):
            subjects = tuple(violation.subject for violation in precondition.violations)
        elif detail.Unpack(retry):
            retry_delay = retry.retry_delay.ToTimedelta().total_seconds()
    return Status(
        code=status.code,
        message=status.message,
        reason=reason,
        details=details,
        violations=violations,
        subjects=subjects,
        retry_delay=retry_delay,
    )
