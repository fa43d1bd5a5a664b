"""`bough account`: what is left of an account, its adjustments, and changes of its balance."""

from decimal import Decimal, InvalidOperation
from typing import Annotated, Final

import typer

from bough_server.cli.commands import command
from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, LimitOption, Target, target_of

_NANOS: Final = 10**9

UserArgument = Annotated[
    str,
    typer.Argument(
        metavar="[USER]",
        help="The user whose account it is.  [default: the caller, or the tenant if accounts are those of tenants]",
        show_default=False,
    ),
]

account = typer.Typer(help="Show accounts, and change their balances.", no_args_is_help=True)


@command(account, "show")
def show(context: typer.Context, user: UserArgument = "", limit: LimitOption = 20, json: JsonOption = False) -> None:
    """Show the balance of an account and its adjustments, newest first."""
    finish(_show(target_of(context), user, limit=limit, json=json))


@command(account, "adjust")
def adjust(
    context: typer.Context,
    amount: Annotated[
        str, typer.Argument(metavar="AMOUNT", help="What is added, such as 20 or 0.5; `-- -5` takes 5 from it.")
    ],
    currency: Annotated[str, typer.Argument(metavar="CURRENCY", help="The currency, such as USD.")],
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            metavar="ID",
            help="Your name for it, such as the id of a payment: once used, the same command changes nothing.",
        ),
    ],
    user: Annotated[
        str,
        typer.Option(
            "--user", metavar="USER", help="The user whose account it is.  [default: the tenant's]", show_default=False
        ),
    ] = "",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="A note about it.", show_default=False)] = "",
    json: JsonOption = False,
) -> None:
    """Change the balance of an account once; this needs the role BILLING."""
    nanos = parse_amount(amount)
    finish(
        _adjust(target_of(context), nanos, currency=currency, request_id=request_id, user=user, note=note, json=json)
    )


def parse_amount(text: str) -> int:
    """Parse an amount of money into billionths. Raises typer.BadParameter."""
    try:
        nanos = Decimal(text) * _NANOS
        if nanos != nanos.to_integral_value():
            raise typer.BadParameter("has more than nine decimals.", param_hint="AMOUNT")
    except InvalidOperation:
        raise typer.BadParameter(f"{text!r} is no number, such as 20 or 0.5.", param_hint="AMOUNT") from None
    if not 0 < abs(nanos) < 2**63:
        raise typer.BadParameter("must not be 0, nor above 9,223,372,036.", param_hint="AMOUNT")
    return int(nanos)


async def _show(target: Target, user: str, *, limit: int, json: bool) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_text, print_line, print_table
    from bough_server.cli.render.usage import account_text, adjustments_table

    async with connect(target, is_reading=True) as connection:
        found = await connection.client.usage.get_account(user)
        adjustments = []
        async for adjustment in connection.client.usage.list_adjustments(user, page_size=min(limit, 1000)):
            adjustments.append(adjustment)
            if len(adjustments) == limit:
                break
    print_line(json_text(found) if json else account_text(found))
    if adjustments and not json:
        print_table(adjustments, adjustments_table, json=False)
    return ExitCode.YES


async def _adjust(
    target: Target, nanos: int, *, currency: str, request_id: str, user: str, note: str, json: bool
) -> ExitCode:
    from bough_server.cli.connection import connect
    from bough_server.cli.output import json_text, print_line
    from bough_server.cli.render.usage import account_text

    async with connect(target) as connection:
        found = await connection.client.usage.adjust_balance(
            nanos, currency_code=currency, request_id=request_id, user_id=user, note=note
        )
    print_line(json_text(found) if json else account_text(found))
    return ExitCode.YES
