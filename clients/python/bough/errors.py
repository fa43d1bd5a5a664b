"""What can go wrong for a caller, as one tree of exceptions; it decides nothing about trying again.

BoughError
├── CallFailed             the server refused the call, or it never arrived: a gRPC status
│   ├── InvalidRequest     INVALID_ARGUMENT, with the fields
│   ├── NotFound           NOT_FOUND, also for somebody else's
│   ├── AlreadyExists      ALREADY_EXISTS: the request id was used with another content, or the name or id is taken
│   ├── SessionBusy        ABORTED: another run holds the session
│   ├── OutOfRange         OUT_OF_RANGE: the sequence lies beyond the log
│   ├── AlreadyAnswered    FAILED_PRECONDITION: the request has another answer
│   ├── RunEnded           FAILED_PRECONDITION: the run takes no answers any more
│   ├── ForkRefused        FAILED_PRECONDITION: the run cannot be forked there
│   ├── AgentFixed         FAILED_PRECONDITION: the agent stands in a file or in code
│   ├── AgentLinked        FAILED_PRECONDITION: other agents link to the agent
│   ├── AgentUnusable      FAILED_PRECONDITION: the run would need something that is gone
│   ├── RevisionMoved      ABORTED: the agent is another one by now
│   ├── Unavailable        UNAVAILABLE: nobody answers, or the server stops
│   ├── DeadlineExceeded   DEADLINE_EXCEEDED: the caller's own time is over
│   └── CallCancelled      CANCELLED
└── RunNotAnswered         the call was served and its run has no answer
    ├── RunFailed          with its AgentError
    ├── RunCancelled       with its AgentError
    └── RunInterrupted     with what it asks
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from bough.v1 import error_pb2, input_pb2

_DETAILS_KEY = "grpc-status-details-bin"

_NEVER_TAKEN_UP = "CANCELLED"
"""What gRPC's own library says, with the code CANCELLED, of calls that were on their way to a server as it stopped:
https://github.com/grpc/grpc/issues/41785."""


class BoughError(Exception):
    """Everything that this package raises on purpose. `message` is a sentence for people."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field of a request and what is wrong with it; `reason` is the name of an ErrorReason without its prefix."""

    field: str
    description: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A failed call as the server described it.

    `reason` is the name of an ErrorReason without its prefix, empty where the server gave none; `details` are the
    metadata of its ErrorInfo, such as `run_id`; `subjects` are what its PreconditionFailure names; `retry_delay` is the
    server's wish in seconds.
    """

    code: grpc.StatusCode
    message: str
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    subjects: tuple[str, ...] = ()
    retry_delay: float | None = None


class CallFailed(BoughError):
    """A call that was not served."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message)
        self.status = status

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return self.status.code

    @property
    def reason(self) -> str:
        """The name of an ErrorReason without its prefix; empty where the server gave none."""
        return self.status.reason

    @property
    def run_id(self) -> str:
        """The run that the server names as the cause; empty where it names none."""
        return self.status.details.get("run_id", "")


class InvalidRequest(CallFailed):
    """The request breaks a rule; `violations` names each field."""

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """Every field that breaks a rule."""
        return self.status.violations


class NotFound(CallFailed):
    """What the request names does not exist, or is not the caller's to see."""


class AlreadyExists(CallFailed):
    """The request id was used before with another content, for the run `run_id`; or an agent has the name, or a session
    the id already."""


class SessionBusy(CallFailed):
    """The session has a run that has not ended: `run_id`."""


class OutOfRange(CallFailed):
    """The sequence lies beyond the end of the log."""


class AlreadyAnswered(CallFailed):
    """The request has another answer already, which stands."""


class RunEnded(CallFailed):
    """The run has ended and takes no answers any more."""


class ForkRefused(CallFailed):
    """The run cannot be forked there; the message says why."""


class AgentFixed(CallFailed):
    """The agent stands in a file or in code of the server, and no call changes it."""


class AgentLinked(CallFailed):
    """Other agents link to the agent, so it stays: `linked_by`."""

    @property
    def linked_by(self) -> tuple[str, ...]:
        """The names of the agents that link to it; empty if the server does not say."""
        return self.status.subjects


class AgentUnusable(CallFailed):
    """What a run of the agent can reach names an agent, a tool or a model that is not there any more."""


class RevisionMoved(CallFailed):
    """The agent is another one by now than the one that was read: `revision`."""

    @property
    def revision(self) -> str:
        """The revision that it has; empty where the server does not say."""
        return self.status.details.get("revision", "")


class Unavailable(CallFailed):
    """Nobody answers at the address, the server is stopping, or it cannot go on with the run; `reason` says which."""


class DeadlineExceeded(CallFailed):
    """The caller's own time is over."""


class CallCancelled(CallFailed):
    """The call was cancelled."""


class RunNotAnswered(BoughError):
    """A run that has no answer; of this class itself where it has not ended."""

    def __init__(self, run_id: str, error: error_pb2.AgentError) -> None:
        super().__init__(error.message or "The run ended without an answer.")
        self.run_id = run_id
        self.error = error


class RunFailed(RunNotAnswered):
    """A run that ended with an error."""


class RunCancelled(RunNotAnswered):
    """A run that was cancelled."""


class RunInterrupted(RunNotAnswered):
    """A run that waits for answers: resume it with one for each of `requests`."""

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
    (grpc.StatusCode.FAILED_PRECONDITION, "ALREADY_ANSWERED"): AlreadyAnswered,
    (grpc.StatusCode.FAILED_PRECONDITION, "RUN_ENDED"): RunEnded,
    (grpc.StatusCode.FAILED_PRECONDITION, "FORK_REFUSED"): ForkRefused,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_FIXED"): AgentFixed,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_LINKED"): AgentLinked,
    (grpc.StatusCode.FAILED_PRECONDITION, "AGENT_UNUSABLE"): AgentUnusable,
    (grpc.StatusCode.ABORTED, "REVISION_MOVED"): RevisionMoved,
}


def from_status(status: Status) -> CallFailed:
    """The exception for a failed call."""
    kind = _BY_REASON.get((status.code, status.reason)) or _BY_CODE.get(status.code, CallFailed)
    return kind(status)


def from_rpc_error(error: grpc.RpcError) -> CallFailed:
    """The exception for what a call of gRPC raised, with the google.rpc details of its trailing metadata.

    Takes the errors of both kinds of channel: grpc.aio.AioRpcError, and grpc.RpcError of a synchronous one.
    """
    code, said = error.code(), error.details()
    if code is grpc.StatusCode.CANCELLED and said == _NEVER_TAKEN_UP:
        code, said = grpc.StatusCode.UNAVAILABLE, "The server stopped before it took up the call."
    message = said or f"The call failed with {code.name}."
    # Each kind of channel has a class of its own for metadata; both are pairs.
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    return from_status(_described(Status(code=code, message=message), metadata))


def deadline_exceeded(message: str) -> DeadlineExceeded:
    """The exception for a deadline that passed on this side, between two calls."""
    return DeadlineExceeded(Status(code=grpc.StatusCode.DEADLINE_EXCEEDED, message=message, reason="DEADLINE_EXCEEDED"))


def _described(status: Status, metadata: Iterable[tuple[str, str | bytes]]) -> Status:
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
