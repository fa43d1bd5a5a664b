"""The server's log on standard error, as lines for people or as JSON; stacks never show local variables."""

import logging
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
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


_OF_HEADERS: Final[Mapping[str, str]] = {
    "grpc._cython.cygrpc": "Invalid encoding on",
    "opentelemetry.baggage.propagation": "",
    "opentelemetry.trace.propagation.tracecontext": "",
    "opentelemetry.trace.span": "Invalid key/value pair",
}
"""Loggers of packages, and how their lines begin that have the values of headers of calls.

Such a value may be a token, and callers that nothing has proved send as many as they like.
"""


_SERVER: Final = str(Path(__file__).parents[1])
_LIBRARY: Final = sysconfig.get_path("stdlib")
"""Where the frames are that lead from the server to the code of operators."""


def get_code_stack(error: BaseException) -> "tuple[type[BaseException], BaseException, TracebackType | None]":
    """Return an exception of the operator's code for a line of the log, with a stack that begins in that code.

    An exception that was raised elsewhere keeps its whole stack.
    """
    stack = error.__traceback__
    while stack is not None and _is_of_the_server(stack.tb_frame.f_code.co_filename):
        stack = stack.tb_next
    return type(error), error, stack or error.__traceback__


def _is_of_the_server(file: str) -> bool:
    is_library = file.startswith(_LIBRARY) and "site-packages" not in file
    return is_library or file.startswith(_SERVER)


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
    for name, begin in _OF_HEADERS.items():
        logging.getLogger(name).addFilter(partial(_begins_otherwise, begin))


def _begins_otherwise(begin: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(begin)


def _text() -> list[Processor]:
    return [_Lines(colors=False, exception_formatter=structlog.dev.plain_traceback)]


def _json() -> list[Processor]:
    # The stack as one text: structlog's stacks as values would contain the local variables, which may be secret.
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
