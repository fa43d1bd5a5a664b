"""The `bough` command line: most commands are clients of a server, running or embedded."""

import os
import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    # gRPC reads this variable when it is imported. The embedded model is a child process that never uses gRPC;
    # without the setting, gRPC prints a warning about the fork to the terminal.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251  # sets a default, reads nothing
    try:
        from bough_server.cli.program import run_program
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bough", "bough_server"):
            raise  # our own module is missing: the installation is broken, and no extra repairs it
        print("This command needs the server packages: pip install 'bough[server]'", file=sys.stderr)
        sys.exit(2)
    run_program()
