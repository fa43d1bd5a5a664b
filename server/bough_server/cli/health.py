"""`bough health`: ask a server whether it serves, for the probes of containers and scripts."""

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import Target, target_of


def health(context: typer.Context) -> None:
    """Report whether a server serves: the one at the address, or the one that commands would use.

    Prints "serving HOST:PORT" and exits with 0 if it does; exits with 1 if it drains, cannot write its database, or
    does not answer.
    """
    finish(_health(target_of(context)))


async def _health(target: Target) -> ExitCode:
    from bough_server.cli.connection import NoServer, is_serving, running_server
    from bough_server.cli.output import print_line

    try:
        found = await running_server(target)
    except NoServer as error:
        print_stderr(str(error))
        return ExitCode.FAILED
    if found is None:
        print_stderr("No server answers: start one with `bough serve`, or name another with --address.")
        return ExitCode.FAILED
    if not await is_serving(found):
        print_stderr(f"The server at {found.address} answers, and does not serve: its log says why.")
        return ExitCode.FAILED
    print_line(f"serving {found.address}")
    return ExitCode.YES
