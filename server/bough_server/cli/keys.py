"""`bough keys`: make API keys. The server never sees a key before a caller sends it: its file has the hash."""

from typing import Annotated

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, print_stderr

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of the key, such as ci: a-z, 0-9 and '-'.")]
TenantOption = Annotated[str, typer.Option("--tenant", metavar="TENANT", help="The tenant of the caller.")]
UserOption = Annotated[str, typer.Option("--user", metavar="USER", help="The user of the caller.")]
RoleOption = Annotated[
    list[str] | None,
    typer.Option("--role", metavar="ROLE", help="RUN, READ, ADMIN or BILLING; several times.  [default: RUN]"),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option("--group", metavar="GROUP", help="A group whose questions the caller may answer; several times."),
]
ExpiresOption = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="When the key expires, such as 2027-01-31T00:00:00Z.")
]
ActsForOption = Annotated[
    str | None, typer.Option("--acts-for", metavar="WHOM", help="users or tenants: whom the caller may name.")
]

keys = typer.Typer(help="Make API keys for callers of a server.", no_args_is_help=True)


@command(keys, "create")
def create(
    key_id: IdArgument,
    tenant: TenantOption,
    user: UserOption,
    role: RoleOption = None,
    group: GroupOption = None,
    expires: ExpiresOption = None,
    acts_for: ActsForOption = None,
) -> None:
    """Make a key. Print it on standard output, once, and on standard error the entry for the file auth.keys_file."""
    import json

    from pydantic import ValidationError

    from bough_server.auth.api_keys import SECRET_BYTES, build_key, explain_mistake, hash_key
    from bough_server.auth.sections import KeySection
    from bough_server.ids import random_bytes

    key = build_key(key_id, random_bytes(SECRET_BYTES))
    entry = {"id": key_id, "sha256": hash_key(key), "tenant": tenant, "user": user, "roles": role, "groups": group}
    entry |= {"expires": expires, "acts_for": acts_for}
    given = {name: value for name, value in entry.items() if value is not None}
    try:
        KeySection.model_validate(given)
    except ValidationError as error:
        for each in error.errors():
            print_stderr(f"{each['loc'][0]}: {explain_mistake(each)}")
        raise typer.Exit(ExitCode.IMPOSSIBLE) from None
    print_stderr("Add to `keys` in the file that auth.keys_file names; the key is shown only now:")
    print_stderr(f"  - {json.dumps(given, ensure_ascii=False)}")
    print(key)
