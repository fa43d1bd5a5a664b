"""The `bough` command line: most commands are clients of a server, running or embedded."""

import atexit
import os
import sys

from bough_server.distribution import install_command


def main() -> None:
    """Run the command line of this process and exit with its code."""
    code: int | None = None

    def leave() -> None:
        if code is None:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            return  # the interpreter says so
        os._exit(code)

    # What is registered first is called last: all that is left for the interpreter is to free every object, one by
    # one. The system frees a process at once, and most commands would take a third longer.
    atexit.register(leave)
    try:
        execute()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else None
        raise


def execute() -> None:
    """Run the command line of this process. Raises SystemExit with its code."""
    # gRPC reads this variable when it is imported. The embedded model is a child process that never uses gRPC;
    # without the setting, gRPC prints a warning about the fork to the terminal.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251  # sets a default, reads nothing
    try:
        from bough_server.cli.program import run_program
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bough", "bough_server"):
            raise  # our own module is missing: the installation is broken, and no extra repairs it
        print(f"This command needs the server packages: {install_command()}", file=sys.stderr)
        sys.exit(2)
    run_program()
