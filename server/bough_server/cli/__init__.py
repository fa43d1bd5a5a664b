"""The `bough` command: a group of commands that speak to a server; what they do, the server does."""


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    from bough_server.cli.program import run_program

    run_program()
