"""Exit codes of commands, and errors as sentences on standard error."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from enum import IntEnum
from typing import Final, NoReturn

import typer

from bough_server.errors import BoughError

_COMMANDS: Final = {"CatalogService.ListAgents": "bough agents list"}
"""Calls that messages of servers name, and the commands that make them."""


class ExitCode(IntEnum):
    """What a command's exit code says."""

    YES = 0
    FAILED = 1
    IMPOSSIBLE = 2
    INPUT_REQUIRED = 3
    CANCELLED = 4
    INTERRUPTED = 130


def say(text: str) -> None:
    """Writes a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def finish(work: Coroutine[None, None, ExitCode], *, is_server: bool = False) -> NoReturn:
    """Does a command's work and exits with its code; what is wrong with a call is a sentence and code 2.

    A server's event loop is uvloop's where the platform has it: a turn costs it a sixth less.
    """
    from bough import BoughError as ClientError

    try:
        with asyncio.Runner(loop_factory=_fast_loop() if is_server else None) as runner:
            code = runner.run(work)
    except (ClientError, BoughError) as error:
        for line in sentences(error):
            say(line)
        code = ExitCode.IMPOSSIBLE
    except BrokenPipeError:
        # The reader has left; the interpreter must not stumble over it again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # That is no failure of a command; a server has not served.
        code = ExitCode.IMPOSSIBLE if is_server else ExitCode.YES
    except OSError as error:
        say(f"{error.filename or 'The operating system'}: {error.strerror or error}.")
        code = ExitCode.IMPOSSIBLE
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    raise typer.Exit(code)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def sentences(error: Exception) -> Iterator[str]:
    """An error in words: its message, then the fields it names, each on a line.

    A call that the message sends its reader to becomes the command that makes it.
    """
    from bough import CallFailed, DeadlineExceeded, InvalidRequest

    if not isinstance(error, CallFailed):
        yield str(error)
        return
    if isinstance(error, InvalidRequest) and error.violations:
        yield "The request was refused:" if len(error.violations) > 1 else "The request was refused."
        for violation in error.violations:
            yield f"  {violation.field}: {violation.description}" if violation.field else f"  {violation.description}"
        return
    is_grpcs_own = isinstance(error, DeadlineExceeded) and not error.reason
    yield "The call's time was over before the server had ended it." if is_grpcs_own else _in_commands(error.message)
    if error.run_id and error.run_id not in error.message:
        yield f"  run: {error.run_id}"


def _in_commands(message: str) -> str:
    for call, words in _COMMANDS.items():
        message = message.replace(call, f"`{words}`")
    return message
