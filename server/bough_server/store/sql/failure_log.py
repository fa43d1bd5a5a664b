"""Lines of the log about a database that does not work, each once a minute and without a stack."""

from typing import Any, Final

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from bough_server.clock import Clock
from bough_server.plain_text import one_line

REPEAT_SECONDS: Final = 60.0
"""Seconds until the same line may be logged again."""

_MOST: Final = 64
"""The most different lines in that time; more are not logged."""

_log = structlog.get_logger(__name__)


def cause_of(error: Exception) -> str:
    """Return what the database or its driver says, on one line without a full stop; not the statement."""
    return one_line(str(error.orig if isinstance(error, DBAPIError) else error)).rstrip(".")


def is_outage(error: Exception) -> bool:
    """Return True for an error of the database or of the way to it, whose stack says nothing more."""
    return isinstance(error, OperationalError | InterfaceError | OSError)


class FailureLog:
    """Logs failures that come again and again while the database is away."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged_at: dict[tuple[str, str, tuple[Any, ...]], float] = {}

    def warn(self, event: str, error: Exception, **fields: Any) -> None:
        """Log a failure as a warning, unless the same was logged within REPEAT_SECONDS."""
        line, now = (event, cause_of(error), tuple(fields.values())), self._clock.monotonic()
        self._logged_at = {each: at for each, at in self._logged_at.items() if now - at < REPEAT_SECONDS}
        if line in self._logged_at or len(self._logged_at) == _MOST:
            return
        self._logged_at[line] = now
        _log.warning(event, error=line[1], **fields)

    def clear(self) -> None:
        """Log every failure again: the database works."""
        self._logged_at.clear()
