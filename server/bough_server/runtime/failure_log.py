"""What the log says of the operator's code: exceptions with their stacks, and the invocation that each line is of."""

import structlog

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.runtime.running_agent import RunningAgent

_log = structlog.get_logger(__name__)


def bind_invocation(run_id: str, running: RunningAgent) -> None:
    """Add run, agent and invocation to every line that this task and the tasks which it starts will log."""
    structlog.contextvars.bind_contextvars(run_id=run_id, agent=running.name, invocation_id=running.invocation_id)


def log_failure(what: str, error: BaseException, **names: str) -> None:
    """Log an exception of the operator's code with its stack; nothing for a RunError, which code raises on purpose."""
    if _is_unexpected(error):
        _log.error(what, exc_info=error, **names)


def _is_unexpected(error: BaseException) -> bool:
    """True for an exception that is no RunError, also if one was made of it to be recorded."""
    seen: list[BaseException] = []
    while isinstance(error, RunError):
        cause = error.__cause__
        seen.append(error)
        # A RunError that was raised from itself is its own cause.
        if error.reason != error_pb2.ERROR_REASON_INTERNAL or cause is None or cause in seen:
            return False
        error = cause
    return True
