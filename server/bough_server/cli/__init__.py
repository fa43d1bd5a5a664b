"""The `bough` command: a group of commands that speak to a server; what they do, the server does."""

import sys


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    try:
        from bough_server.cli.program import run_program
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bough", "bough_server"):
            raise  # a broken installation, which no extra mends
        print("This command needs more: pip install 'bough[server]'", file=sys.stderr)
        sys.exit(2)
    run_program()
