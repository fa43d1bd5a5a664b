"""Usage, quotas and accounts as text."""

from collections.abc import Sequence

from rich.text import Text

from bough.v1 import usage_pb2
from bough_server.cli.render.blocks import truncate_line
from bough_server.cli.render.format import UNKNOWN, nanos_text, time_text, tokens_text
from bough_server.plain_text import one_line, printable


def usage_table(groups: Sequence[usage_pb2.UsageGroup], fields: Sequence[str], width: int) -> list[Text]:
    """Return a row for each group: what it is grouped by, its runs, model calls and tokens, and its charge.

    Fields are those of UsageGroup by which the groups differ.
    """
    names = [field.removesuffix("_id") for field in fields]
    header = [*names, "runs", "calls", "tokens", "charge"]
    rows = [[*(printable(getattr(group, field)) or UNKNOWN for field in fields), *_numbers(group)] for group in groups]
    return _build_table(header, rows, width, left=len(names))


def _build_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, left: int) -> list[Text]:
    """Return rows below their header, the first `left` columns aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [Text(_align(header, widths, left), style="dim"), *(Text(_align(row, widths, left)) for row in rows)]
    return [truncate_line(line, width) for line in lines]


def _align(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    aligned = [
        cell.ljust(size) if number < left else cell.rjust(size)
        for number, (cell, size) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _numbers(group: usage_pb2.UsageGroup) -> list[str]:
    charge = f"{nanos_text(group.charge_nanos)} {group.currency_code}" if group.currency_code else UNKNOWN
    return [f"{group.runs:,}", f"{group.usage.model_calls:,}", tokens_text(group.usage), charge]


def quotas_table(quotas: Sequence[usage_pb2.QuotaStatus], width: int) -> list[Text]:
    """Return a row for each quota: whose it is, its name, what is used of how much, and when that is reset."""
    names = [usage_pb2.QuotaKind.Name(one.kind).removeprefix("QUOTA_KIND_").lower() for one in quotas]
    header = ["of", "quota", "used", "limit", "reset"]
    rows = [
        [
            f"user {printable(one.user_id)}" if one.user_id else "tenant",
            name,
            _quota_amount(one, one.used),
            _quota_amount(one, one.limit),
            time_text(one.reset_time) if one.HasField("reset_time") else UNKNOWN,
        ]
        for name, one in zip(names, quotas, strict=True)
    ]
    return _build_table(header, rows, width, left=2)


def _quota_amount(quota: usage_pb2.QuotaStatus, number: int) -> str:
    return f"{nanos_text(number)} {quota.currency_code}" if quota.currency_code else f"{number:,}"


def account_text(account: usage_pb2.Account) -> str:
    """Return the balance of an account in a line, with what is reserved of it."""
    owner = f"user {printable(account.user_id)}" if account.user_id else "tenant"
    text = f"{owner}: {nanos_text(account.balance_nanos)} {account.currency_code}"
    return f"{text}, {nanos_text(account.reserved_nanos)} of it reserved" if account.reserved_nanos else text


def adjustments_table(adjustments: Sequence[usage_pb2.Adjustment], width: int) -> list[Text]:
    """Return a row for each adjustment: its time, amount, request id, who made it, and the note."""
    header = ["made", "amount", "request id", "by", "note"]
    rows = [
        [
            time_text(one.time),
            f"{nanos_text(one.amount_nanos)} {one.currency_code}",
            one.request_id,
            printable(one.made_by),
            one_line(one.note),
        ]
        for one in adjustments
    ]
    return _build_table(header, rows, width, left=len(header))
