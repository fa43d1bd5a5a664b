"""The server's log on standard error, as lines for people or as JSON; stacks never show local variables."""

import logging
import re
import sys
from collections.abc import Sequence
from typing import Final

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from bough_server.settings_sections import LogFormat, LogLevel

_FIRST: Final[Sequence[Processor]] = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso"),
)

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tabs and line feeds, which stacks have."""


class _Lines(structlog.dev.ConsoleRenderer):
    """Renders lines for people. What models and users wrote may be in an exception: it must not control a terminal."""

    def __call__(self, logger: WrappedLogger, name: str, event_dict: EventDict) -> str:
        line = super().__call__(logger, name, event_dict)
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", line)


def configure_logging(level: LogLevel, log_format: LogFormat = "text") -> None:
    """Log to stderr from this level on; lines of libraries from warning on, in the same format."""
    last = _json() if log_format == "json" else _text()
    structlog.configure(
        processors=[*_FIRST, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
            foreign_pre_chain=[*_FIRST, structlog.stdlib.add_logger_name],
        )
    )
    least = max(logging.getLevelNamesMapping()[level.upper()], logging.WARNING)
    logging.basicConfig(handlers=[handler], level=least)


def _text() -> list[Processor]:
    return [_Lines(colors=False, exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    # The stack as one text: structlog's stacks as values would contain the local variables, which may be secret.
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
