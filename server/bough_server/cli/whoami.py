"""`bough whoami`: who the server takes the caller for."""

from typing import TYPE_CHECKING

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, target_of

if TYPE_CHECKING:
    from bough.v1 import access_service_pb2


def whoami(context: typer.Context, json: JsonOption = False) -> None:
    """Print the caller as the server sees it: tenant, user, roles, groups, and what proves it."""
    finish(_whoami(target_of(context), json=json))


async def _whoami(target: Target, *, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_text, print_line

    async with connect(target, is_reading=True) as connection:
        caller = await connection.client.get_caller()
    if json:
        print_line(json_text(caller))
        return ExitCode.YES
    for name, value in _facts(caller).items():
        print_line(f"{name:<8} {value}")
    return ExitCode.YES


def _facts(caller: "access_service_pb2.GetCallerResponse") -> dict[str, str]:
    from bough.v1 import options_pb2

    names = [options_pb2.AccessRole.Name(role).removeprefix("ACCESS_ROLE_") for role in caller.roles]
    facts = {
        "tenant": caller.tenant_id,
        "user": caller.user_id,
        "roles": ", ".join(names) or "none",
        "groups": ", ".join(caller.groups) or "none",
        "via": caller.via,
    }
    if caller.HasField("expire_time"):
        facts["expires"] = caller.expire_time.ToJsonString()
    return facts
