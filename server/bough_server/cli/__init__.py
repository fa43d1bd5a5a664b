"""The `bough` command: a group of commands that speak to a server; what they do, the server does."""

import os
import sys


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    # gRPC reads this when it is loaded. The embedded model is a child process that never speaks gRPC:
    # without this gRPC says on the terminal that it does nothing for it.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251  # nothing is read
    try:
        from bough_server.cli.program import run_program
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bough", "bough_server"):
            raise  # a broken installation, which no extra mends
        print("This command needs more: pip install 'bough[server]'", file=sys.stderr)
        sys.exit(2)
    run_program()
