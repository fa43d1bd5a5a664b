"""`bough prune`: delete sessions in which nothing has run for a while, with their runs, and old evaluations."""

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish, print_stderr
from bough_server.cli.options import Target, parse_seconds, target_of

if TYPE_CHECKING:
    from bough import AsyncClient
    from bough.v1 import session_pb2

OlderThanOption = Annotated[
    float,
    typer.Option(
        "--older-than",
        parser=parse_seconds,
        metavar="DURATION",
        help="The least age of a session's last run, and of an evaluation's end, such as 30d or 12h.",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")]


def prune(context: typer.Context, older_than: OlderThanOption, dry_run: DryRunOption = False) -> None:
    """Delete the sessions in which no run has started or ended for a while, and the evaluations that ended before.

    Their runs, logs and messages go with them; the ledger of usage stays. A session that a run holds is kept, also if
    that run waits for input. Prints the id of each session that it deletes, and "evaluation ID" of each evaluation.
    """
    finish(_prune(target_of(context), older_than, is_dry=dry_run))


async def _prune(target: Target, older_than: float, *, is_dry: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.render.format import pluralize

    before_ns = time.time_ns() - int(older_than * 1e9)
    async with connect(target, is_reading=True) as connection:
        sessions = await _prune_sessions(connection.client, before_ns, is_dry=is_dry)
        evaluations = await _prune_evaluations(connection.client, before_ns, is_dry=is_dry)
    deleted = [pluralize(sessions, "session"), *([pluralize(evaluations, "evaluation")] if evaluations else [])]
    print_stderr(f"{' and '.join(deleted)} {'would be deleted' if is_dry else 'deleted'}.")
    return ExitCode.YES


async def _prune_sessions(client: "AsyncClient", before_ns: int, *, is_dry: bool) -> int:
    from bough import NotFound, SessionBusy
    from bough_server.cli.output import print_line

    number = 0
    # All of them first: pages of a list that is deleted from meanwhile could skip some.
    for session in [each async for each in _quiet_since(client, before_ns)]:
        if not is_dry:
            try:
                await client.sessions.delete(session.session_id)
            except (NotFound, SessionBusy):
                continue  # deleted, or in use again, since it was listed
        print_line(session.session_id)
        number += 1
    return number


async def _prune_evaluations(client: "AsyncClient", before_ns: int, *, is_dry: bool) -> int:
    from bough import NotFound
    from bough_server.cli.output import print_line

    number = 0
    for one in [each async for each in client.evaluations.list(page_size=1000)]:
        if not one.HasField("end_time") or one.end_time.ToNanoseconds() >= before_ns:
            continue
        if not is_dry:
            try:
                await client.evaluations.delete(one.evaluation_id)
            except NotFound:
                continue  # deleted since it was listed
        print_line(f"evaluation {one.evaluation_id}")
        number += 1
    return number


async def _quiet_since(client: "AsyncClient", before_ns: int) -> "AsyncIterator[session_pb2.Session]":
    async for session in client.sessions.list(include_evaluation_sessions=True, page_size=1000):
        used = session.last_run_time if session.HasField("last_run_time") else session.create_time
        if not session.current_run_id and used.ToNanoseconds() < before_ns:
            yield session
