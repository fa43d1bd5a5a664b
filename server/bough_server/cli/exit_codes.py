"""Exit codes of commands, and errors printed as sentences on standard error."""

import os
import sys
from collections.abc import Coroutine, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NoReturn

import typer

if TYPE_CHECKING:
    from bough_server.process.loop import ServerRunner

_COMMANDS: Final = {"CatalogService.ListAgents": "bough agents list"}
"""RPCs that a server's messages refer to, and the commands that call them."""


class ExitCode(IntEnum):
    """The exit codes of commands."""

    YES = 0
    FAILED = 1
    IMPOSSIBLE = 2
    INPUT_REQUIRED = 3
    CANCELLED = 4
    INTERRUPTED = 130


def print_stderr(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def finish(work: Coroutine[None, None, ExitCode], *, is_server: bool = False) -> NoReturn:
    """Run a command's coroutine and exit with its code; an error is printed as sentences and exits with IMPOSSIBLE.

    A server ends without code of agents and tools that does not end with it.
    """
    from bough import BoughError as ClientError
    from bough_server.cli.loop import run_command
    from bough_server.errors import BoughError

    runner = _server_runner() if is_server else None
    try:
        code = runner.run(work) if runner is not None else run_command(work)
    except (ClientError, BoughError) as error:
        for line in sentences(error):
            print_stderr(line)
        code = ExitCode.IMPOSSIBLE
    except BrokenPipeError:
        # The reader closed the pipe. Without this, flushing at exit would raise the error once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Normal for a command, as in `bough events last | head`; but a server could not announce itself.
        code = ExitCode.IMPOSSIBLE if is_server else ExitCode.YES
    except OSError as error:
        print_stderr(f"{error.filename or 'The operating system'}: {error.strerror or error}.")
        code = ExitCode.IMPOSSIBLE
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    if runner is not None and runner.has_leftovers:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit would wait for the code that does not end
    raise typer.Exit(code)


def _server_runner() -> "ServerRunner":
    from bough_server.process.loop import ServerRunner

    return ServerRunner()


def sentences(error: Exception) -> Iterator[str]:
    """Yield an error as text: its message, then each violated field or the run's id on a line.

    RPCs that the message refers to are replaced by the commands that call them.
    """
    from bough import CallFailed, InvalidRequest

    if not isinstance(error, CallFailed):
        yield str(error)
        return
    if isinstance(error, InvalidRequest) and error.violations:
        yield "The request was refused:" if len(error.violations) > 1 else "The request was refused."
        for violation in error.violations:
            yield f"  {violation.field}: {violation.description}" if violation.field else f"  {violation.description}"
        return
    yield with_commands(error.message)
    if error.run_id and error.run_id not in error.message:
        yield f"  run: {error.run_id}"


def with_commands(message: str) -> str:
    """Return a server's message with the commands that call the RPCs that it refers to."""
    for call, command in _COMMANDS.items():
        message = message.replace(call, f"`{command}`")
    return message
