"""The errors of the project, each with its gRPC code and its reason; independent of the transport.

BoughError
├── CallError                 a call that cannot be served: a gRPC status
│   ├── Unauthenticated       UNAUTHENTICATED: no valid proof of who calls
│   ├── PermissionDenied      PERMISSION_DENIED: a role is missing, for what the caller may see
│   ├── InvalidRequest        INVALID_ARGUMENT, with the fields
│   ├── NotFound              NOT_FOUND, also for what the caller may not see
│   │   └── UnknownAgent      the catalog has no agent of that name
│   ├── RequestIdReused       ALREADY_EXISTS
│   ├── SessionExists         ALREADY_EXISTS: the session id is in use
│   ├── SessionBusy           ABORTED
│   ├── ConcurrentChange      ABORTED: others changed it each time that the call was tried
│   ├── SessionQueueFull      RESOURCE_EXHAUSTED: too many runs wait for the session
│   ├── QuotaExceeded         RESOURCE_EXHAUSTED: a quota of the tenant, or of the user, is used up (quotas.py)
│   ├── RequestBytesExhausted RESOURCE_EXHAUSTED: the server holds as many bytes of requests as it may
│   ├── InsufficientBalance   RESOURCE_EXHAUSTED: nothing is left of the account; waiting does not help
│   ├── AccountsDisabled      FAILED_PRECONDITION: the server has no accounts
│   ├── StreamsExhausted      RESOURCE_EXHAUSTED: the server, or the caller, has as many streams as it may
│   ├── SequenceOutOfRange    OUT_OF_RANGE
│   ├── AlreadyAnswered       FAILED_PRECONDITION: the request has another answer
│   ├── RunEnded              FAILED_PRECONDITION: the run accepts no more answers
│   ├── EvaluationNotEnded    FAILED_PRECONDITION: it has no result yet
│   ├── ForkRefused           FAILED_PRECONDITION: the run cannot be forked there
│   ├── AgentExists           ALREADY_EXISTS: the name is taken
│   ├── AgentFixed            FAILED_PRECONDITION: it is defined in a file or in code
│   ├── AgentLinked           FAILED_PRECONDITION: others link to it
│   ├── AgentUnusable         FAILED_PRECONDITION: it names something that no longer exists
│   ├── RevisionMoved         ABORTED: the agent has changed since it was read
│   ├── CatalogFull           RESOURCE_EXHAUSTED
│   ├── RunParked             UNAVAILABLE: something that the run started with is missing
│   ├── ServerStopping        UNAVAILABLE
│   └── StorageFailed         UNAVAILABLE: the disk, the lock or the database
│       └── DatabaseRemoved   its file was deleted or replaced
├── RunError                  a failure inside a run: an AgentError in an event
│   ├── ModelError            a provider's failure, and whether to retry it
│   ├── ToolOutcomeUnknown    a call of a tool was sent, and no answer will come
│   └── NonDeterministic      replay asked for something other than the log holds
├── ConfigurationError        a mistake that the operator has to fix; the CLI's exit code 2
│   ├── DatabaseInUse         another process has the database
│   └── DatabaseUnreachable   nothing answers at its address, or it cannot serve yet
└── Fenced                    another owner writes this run's log now
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Final, TypeAlias

from google.rpc import code_pb2

from bough.v1 import error_pb2, event_pb2, usage_pb2
from bough_server.truncation import size_of, truncate_text

MAX_MESSAGE_BYTES: Final = 8 * 1024
"""The most bytes of an error's message in a run; its head and its tail are kept."""

MAX_DETAILS_BYTES: Final = 64 * 1024
"""The most bytes of an error's details; larger ones are dropped, because truncated JSON would not parse."""

MAX_NAMED: Final = 20
"""The most names in the message of one error."""

Reason: TypeAlias = error_pb2.ErrorReason.ValueType

_REASON: Final = "ERROR_REASON_"
_REASONS: Final[Mapping[str, Reason]] = {
    name.removeprefix(_REASON): value for name, value in error_pb2.ErrorReason.items() if value
}
"""The reasons by their names without the prefix; UNSPECIFIED is not one."""


class BoughError(Exception):
    """Every error that the project raises on purpose. `message` is a sentence for its reader."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    # The default calls the class with the message alone, which most classes of the tree cannot be made from.
    def __reduce__(self) -> tuple[object, ...]:
        return _unpickle, (type(self), *self.args), self.__dict__


def _unpickle(kind: type[BaseException], *args: object) -> BaseException:
    """Return an exception whose attributes are set afterwards."""
    return kind.__new__(kind, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """A field of a request and the problem with it; `reason` is one of those of all errors."""

    field: str
    description: str
    reason: Reason = error_pb2.ERROR_REASON_INVALID_REQUEST

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class CallError(BoughError):
    """A call that cannot be served; one interceptor translates it to a gRPC status."""

    code: ClassVar[int] = code_pb2.INTERNAL
    reason: Reason = error_pb2.ERROR_REASON_INTERNAL
    retry_delay: float | None = None
    violations: Sequence[FieldViolation] = ()
    """The fields of the request that the error is about; BadRequest names them."""

    def __init__(self, message: str, *, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.details: dict[str, str] = dict(details or {})


class InvalidRequest(CallError):
    """A request that breaks rules; carries every field that does."""

    code = code_pb2.INVALID_ARGUMENT
    reason = error_pb2.ERROR_REASON_INVALID_REQUEST

    def __init__(self, violations: Sequence[FieldViolation], *, reason: Reason | None = None) -> None:
        super().__init__("; ".join(map(str, violations)))
        self.violations = tuple(violations)
        if reason is not None:
            self.reason = reason


class Unauthenticated(CallError):
    """A call without a valid proof of who calls. The caller reads the message, the server's log `why` as well."""

    code = code_pb2.UNAUTHENTICATED
    reason = error_pb2.ERROR_REASON_UNAUTHENTICATED

    def __init__(self, message: str, *, why: str = "") -> None:
        super().__init__(message)
        self.why = why


class PermissionDenied(CallError):
    """A call that needs a role which the caller lacks; only for what the caller may see, else it is NotFound."""

    code = code_pb2.PERMISSION_DENIED
    reason = error_pb2.ERROR_REASON_PERMISSION_DENIED


class NotFound(CallError):
    """Something that does not exist or is not visible to the caller; `kind` is "run", "session" or "agent"."""

    code = code_pb2.NOT_FOUND
    reason = error_pb2.ERROR_REASON_NOT_FOUND

    def __init__(self, kind: str, name: str, *, reason: Reason | None = None, hint: str = "") -> None:
        super().__init__(f"There is no {kind} {name!r}." + (f" {hint}" if hint else ""))
        self.kind, self.name = kind, name
        if reason is not None:
            self.reason = reason


class UnknownAgent(NotFound):
    """A name that no agent of the catalog has; details have it and `nearest`, the closest one of those `known`."""

    reason = error_pb2.ERROR_REASON_UNKNOWN_AGENT

    def __init__(self, name: str, known: Iterable[str] = (), *, hint: str = "") -> None:
        near = "".join(get_close_matches(name, sorted(known), n=1, cutoff=0.6))
        super().__init__("agent", name, hint=f"Did you mean {near!r}? {hint}".rstrip() if near else hint)
        self.details = {"name": name, "nearest": near} if near else {"name": name}


class RequestIdReused(CallError):
    """A request id that was used before with other content."""

    code = code_pb2.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_REQUEST_ID_REUSED


class SessionExists(CallError):
    """A session id that is in use in the tenant."""

    code = code_pb2.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_SESSION_EXISTS


class SessionBusy(CallError):
    """A session that another run holds."""

    code = code_pb2.ABORTED
    reason = error_pb2.ERROR_REASON_SESSION_BUSY


class ConcurrentChange(CallError):
    """A change of what others changed each time that it was tried."""

    code = code_pb2.ABORTED
    reason = error_pb2.ERROR_REASON_CONCURRENT_CHANGE
    retry_delay = 0.1


class SessionQueueFull(CallError):
    """A run for a session that as many runs wait for as may."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_SESSION_QUEUE_FULL


class RequestBytesExhausted(CallError):
    """A request for which there was no room among those that the server handles; nothing of it has happened."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_REQUEST_BYTES_EXHAUSTED
    retry_delay = 1.0


class StreamsExhausted(CallError):
    """A stream beyond those that the server, or one caller, may have at once."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_STREAMS_EXHAUSTED
    retry_delay = 1.0


class InsufficientBalance(CallError):
    """A call that begins or continues a run, while nothing is left of the account that pays for it."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_INSUFFICIENT_BALANCE


class AccountsDisabled(CallError):
    """A call that concerns accounts, at a server without them."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_NOT_INSTALLED


class SequenceOutOfRange(CallError):
    """A sequence beyond the end of a log."""

    code = code_pb2.OUT_OF_RANGE
    reason = error_pb2.ERROR_REASON_SEQUENCE_OUT_OF_RANGE


class AlreadyAnswered(CallError):
    """An answer to a request that has another answer."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_ALREADY_ANSWERED


class EvaluationNotEnded(CallError):
    """A call that takes an evaluation that has ended; `field` is the request's that names it."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_EVALUATION_NOT_ENDED

    def __init__(self, evaluation_id: str, *, field: str, advice: str) -> None:
        sentence = f"The evaluation {evaluation_id!r} has not ended: {advice}."
        super().__init__(sentence, details={"evaluation_id": evaluation_id})
        self.violations = (FieldViolation(field=field, description=sentence, reason=self.reason),)


class RunEnded(CallError):
    """An answer to a run that has ended."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_RUN_ENDED


class ForkRefused(CallError):
    """A fork at a point where none is possible; the message says why."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_FORK_REFUSED


class AgentExists(CallError):
    """A name that another agent has; details say where that agent is defined."""

    code = code_pb2.ALREADY_EXISTS
    reason = error_pb2.ERROR_REASON_AGENT_EXISTS


class AgentFixed(CallError):
    """A change of an agent that is defined in a file or in code, which a call cannot change."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_AGENT_FIXED


class AgentLinked(CallError):
    """A deletion of an agent that others link to; `linked_by` names them."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_AGENT_LINKED

    def __init__(self, name: str, linked_by: Sequence[str]) -> None:
        named = ", ".join(linked_by[:MAX_NAMED])
        more = f" and {len(linked_by) - MAX_NAMED} more" if len(linked_by) > MAX_NAMED else ""
        message = f"The agent {name!r} is linked by {named}{more}: remove the links first."
        super().__init__(message, details={"name": name})
        self.linked_by = tuple(linked_by)


class AgentUnusable(CallError):
    """A run of a stored agent that can reach something that no longer exists."""

    code = code_pb2.FAILED_PRECONDITION
    reason = error_pb2.ERROR_REASON_AGENT_UNUSABLE


class RevisionMoved(CallError):
    """A change of an agent that has changed since the caller read it."""

    code = code_pb2.ABORTED
    reason = error_pb2.ERROR_REASON_REVISION_MOVED


class CatalogFull(CallError):
    """More agents than a tenant may store."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_CATALOG_FULL


class RunParked(CallError):
    """A run that no worker executes until a server has everything it started with; the message says what is missing."""

    code = code_pb2.UNAVAILABLE
    reason = error_pb2.ERROR_REASON_RUN_PARKED
    retry_delay = 5.0


class ServerStopping(CallError):
    """A server that drains: the same call succeeds at another server, or here later."""

    code = code_pb2.UNAVAILABLE
    reason = error_pb2.ERROR_REASON_SERVER_STOPPED
    retry_delay = 1.0


class StorageFailed(CallError):
    """A store that cannot read or write. The driver's own error goes only to the server's log."""

    code = code_pb2.UNAVAILABLE
    reason = error_pb2.ERROR_REASON_STORAGE_FAILED
    retry_delay = 1.0


class DatabaseRemoved(StorageFailed):
    """A database whose files no longer have their names, so that what is written would be lost with the process."""

    reason = error_pb2.ERROR_REASON_DATABASE_REMOVED


class RunError(BoughError):
    """A failure inside a run: raised by tools and agents to fail, and by a context whose effect failed.

    `reason` is an ErrorReason or its name without the prefix, such as "BAD_ARGUMENTS"; default: TOOL_FAILED, which
    stands for a failure of a tool or of an agent's code. A caller reads it as `reason` or `reason_name`. The error
    becomes the AgentError of an event, so its size is bounded and its text is valid Unicode. `provider_status` is the
    HTTP status with which a model's provider refused; 0 if none did. Raises ValueError for an unknown name.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | str = error_pb2.ERROR_REASON_TOOL_FAILED,
        retryable: bool = False,
        details_json: str = "",
        provider_status: int = 0,
    ) -> None:
        super().__init__(truncate_text(_unicode(message), MAX_MESSAGE_BYTES))
        details_json = _unicode(details_json)
        self.reason = _reason_of(reason) if isinstance(reason, str) else reason
        self.retryable = retryable
        self.details_json = details_json if size_of(details_json) <= MAX_DETAILS_BYTES else ""
        self.provider_status = provider_status

    @property
    def reason_name(self) -> str:
        """The reason's name without the prefix, such as "TOOL_FAILED"; its number if this version does not know it."""
        return next((name for name, value in _REASONS.items() if value == self.reason), str(self.reason))

    @classmethod
    def of(cls, error: error_pb2.AgentError) -> "RunError":
        """Return the RunError that an event's AgentError was made from."""
        return RunError(
            error.message,
            reason=error.reason,
            retryable=error.retryable,
            details_json=error.details_json,
            provider_status=error.provider_status,
        )

    def to_agent_error(self, *, agent: str = "", invocation_id: str = "") -> error_pb2.AgentError:
        """Return the error as an event holds it, with the agent and the invocation that it happened to."""
        return error_pb2.AgentError(
            reason=self.reason,
            message=self.message,
            agent=agent,
            invocation_id=invocation_id,
            retryable=self.retryable,
            details_json=self.details_json,
            provider_status=self.provider_status,
        )


def _reason_of(name: str) -> Reason:
    """Return the reason of a name. Raises ValueError with the nearest names."""
    if name.removeprefix(_REASON) not in _REASONS:
        near = get_close_matches(name.removeprefix(_REASON).upper(), _REASONS)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"The names are {', '.join(_REASONS)}."
        raise ValueError(f"There is no error reason {name!r}. {hint}")
    return _REASONS[name.removeprefix(_REASON)]


def text_of_error(error: BaseException) -> str:
    """Return an exception's own text; empty if that cannot be made."""
    try:
        return str(error)
    except BaseException:  # a broken __str__ must not hide the failure, whatever it raises
        return ""


def _unicode(text: str) -> str:
    """Replace unpaired surrogates, which file names may contain and events may not."""
    return text if text.isascii() else text.encode(errors="replace").decode()


class ModelError(RunError):
    """A failure of a model's provider.

    `retry` says why another attempt may succeed; None if it may not. `retry_after` is the delay that the provider asked
    for, in seconds. `lost_usage` is the usage of the failed attempt as far as the provider reported it. With
    `is_of_the_request` other models would reject the request too.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: Reason,
        retry: event_pb2.RetryReason.ValueType | None = None,
        retry_after: float | None = None,
        lost_usage: usage_pb2.Usage | None = None,
        is_of_the_request: bool = False,
        provider_status: int = 0,
    ) -> None:
        super().__init__(message, reason=reason, retryable=retry is not None, provider_status=provider_status)
        self.retry = retry
        self.retry_after = retry_after
        self.lost_usage = lost_usage
        self.is_of_the_request = is_of_the_request


class ToolOutcomeUnknown(RunError):
    """A call of a tool that was sent, and whose answer will not come; its tool's rule decides what follows."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=error_pb2.ERROR_REASON_TOOL_OUTCOME_UNKNOWN)


class NonDeterministic(RunError):
    """A replay asked for something other than the log holds."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason=error_pb2.ERROR_REASON_NON_DETERMINISTIC)


class ConfigurationError(BoughError):
    """A mistake that the operator has to fix; the message names the file, line and field if there are any."""


class DatabaseInUse(ConfigurationError):
    """A database that another process has open."""


class DatabaseUnreachable(ConfigurationError):
    """A database at whose address nothing answers, or that cannot serve yet: it may later."""


class Fenced(BoughError):
    """An append was refused because the log has moved on: another owner writes it, or it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A mistake in a file: its place, and what to do."""

    path: str
    line: int
    field: str
    description: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.field}: {self.description}" if self.field else f"{place}: {self.description}"
