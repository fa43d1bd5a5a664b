"""Log exceptions of the operator's code, with their stacks."""

import structlog

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.observability.logs import get_code_stack

_log = structlog.get_logger(__name__)


def log_failure(what: str, error: BaseException, **names: str) -> None:
    """Log an exception of the operator's code with its stack; nothing for a RunError, which code raises on purpose."""
    if _is_unexpected(error):
        _log.error(what, exc_info=get_code_stack(error), **names)


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
