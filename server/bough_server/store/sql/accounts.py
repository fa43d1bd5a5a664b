"""Accounts on SQL: a balance is the adjustments less the charges in the ledger since the first of them."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    ScalarSelect,
    Select,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    select,
    true,
)
from sqlalchemy.dialects.sqlite import insert as upsert

from bough_server.errors import FieldViolation, InvalidRequest, RequestIdReused
from bough_server.store.ports.accounts import AccountKey, AccountSums, StoredAdjustment
from bough_server.store.ports.runs import Page
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach, build_lock_name
from bough_server.store.sql.pages import decode_token, encode_token, is_before, read_page
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.usage import CHARGE, LARGEST, join_halves, sum_halves
from bough_server.store.sql.write_queue import WriteQueue

_runs, _adjustments, _snapshots, _usage = (
    tables.runs.c,
    tables.adjustments.c,
    tables.account_snapshots.c,
    tables.usage_entries.c,
)

_MINE: Final = (
    _adjustments.tenant_id == bindparam("tenant"),
    _adjustments.user_id == bindparam("user"),
    _adjustments.currency_code == bindparam("currency"),
)
_SNAPSHOTS: Final = (
    _snapshots.tenant_id == bindparam("tenant"),
    _snapshots.user_id == bindparam("user"),
    _snapshots.currency_code == bindparam("currency"),
)


def _scalar(statement: Select[Any]) -> ScalarSelect[Any]:
    return statement.scalar_subquery()


_UPPER, _LOWER = sum_halves(_adjustments.amount_nanos)
_CHARGE_UPPER, _CHARGE_LOWER = sum_halves(CHARGE)
_BEGIN: Final = _scalar(select(func.min(_adjustments.time_ns)).where(*_MINE))
_NEWEST: Final = _scalar(select(func.max(_snapshots.before_ns)).where(*_SNAPSHOTS))
_BEFORE: Final = _scalar(
    select(_snapshots.charge_nanos).where(*_SNAPSHOTS).order_by(_snapshots.before_ns.desc()).limit(1)
)
_FROM: Final = func.coalesce(_NEWEST, _BEGIN)


def _lines(is_whole_tenant: bool) -> Sequence[ColumnElement[bool]]:
    """Return the conditions on the lines of an account that no snapshot holds."""
    tenant, user = _usage.tenant_id == bindparam("tenant"), _usage.user_id == bindparam("user")
    rest = _usage.currency_code == bindparam("currency"), _usage.time_ns >= _FROM
    return [tenant, *rest] if is_whole_tenant else [tenant, user, *rest]


def _reserving(is_whole_tenant: bool) -> Sequence[ColumnElement[bool]]:
    """Return the conditions on the runs that reserve something of an account, those of one worker left out."""
    tenant, user = _runs.tenant_id == bindparam("tenant"), _runs.user_id == bindparam("user")
    rest = _runs.reserved_nanos != literal_column("0"), _runs.owner != bindparam("worker")
    return [tenant, *rest] if is_whole_tenant else [tenant, user, *rest]


def _select_sums(*, is_whole_tenant: bool) -> Select[Any]:
    """Return the query of the sums of an account: adjustments, charges before the newest snapshot, and since."""
    adjusted = select(_UPPER.label("upper"), _LOWER.label("lower")).where(*_MINE).subquery()
    charged = (
        select(_CHARGE_UPPER.label("upper"), _CHARGE_LOWER.label("lower")).where(*_lines(is_whole_tenant)).subquery()
    )
    return select(
        adjusted.c.upper,
        adjusted.c.lower,
        charged.c.upper,
        charged.c.lower,
        func.coalesce(_BEFORE, 0),
        _FROM,
        _scalar(select(func.coalesce(func.sum(_runs.reserved_nanos), 0)).where(*_reserving(is_whole_tenant))),
    ).join_from(adjusted, charged, true())


_SUMS: Final = _select_sums(is_whole_tenant=False)
_SUMS_OF_TENANT: Final = _select_sums(is_whole_tenant=True)

_ADJUSTED: Final = select(_UPPER, _LOWER).where(*_MINE)
_SAME: Final = select(tables.adjustments).where(
    _adjustments.tenant_id == bindparam("tenant"),
    _adjustments.user_id == bindparam("user"),
    _adjustments.request_id == bindparam("request"),
)
_INSERT: Final = insert(tables.adjustments)


def _select_snapshot(*, is_whole_tenant: bool) -> Select[Any]:
    """Return the query of the charges of an account up to a time: those of the newest snapshot, and since."""
    conditions = *_lines(is_whole_tenant), _usage.time_ns < bindparam("end")
    return select(func.coalesce(_BEFORE, 0), _CHARGE_UPPER, _CHARGE_LOWER).where(*conditions)


_SNAPSHOT: Final = _select_snapshot(is_whole_tenant=False)
_SNAPSHOT_OF_TENANT: Final = _select_snapshot(is_whole_tenant=True)
_KEEP: Final = upsert(tables.account_snapshots).on_conflict_do_nothing()
_DROP_OLDER: Final = delete(tables.account_snapshots).where(*_SNAPSHOTS, _snapshots.before_ns < bindparam("end"))


class SqlAccounts:
    """AccountStore on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers) -> None:
        self._queue, self._readers = queue, readers

    async def read_sums(self, keys: Sequence[AccountKey], *, but_worker: str = "") -> Sequence[AccountSums]:
        """See AccountStore."""
        return await self._readers.run(lambda connection: [_read_sums(connection, key, but_worker) for key in keys])

    async def adjust(self, key: AccountKey, adjustment: StoredAdjustment) -> StoredAdjustment:
        """See AccountStore."""
        # Two servers could record different adjustments of one id at the same time, or exceed 64 bits together.
        reach = Reach(names=[build_lock_name("account", key.tenant_id, key.user_id)])
        return await self._queue.execute(partial(_adjust, key=key, adjustment=adjustment), reach=reach)

    async def list_adjustments(self, key: AccountKey, page: Page) -> tuple[Sequence[StoredAdjustment], str]:
        """See AccountStore."""
        filters = ["adjustments", key.tenant_id, key.user_id]
        after = decode_token(page.token, filters)
        statement = select(tables.adjustments).where(
            _adjustments.tenant_id == key.tenant_id, _adjustments.user_id == key.user_id
        )
        if after is not None:
            statement = statement.where(is_before(_adjustments.time_ns, _adjustments.request_id, after))
        statement = statement.order_by(_adjustments.time_ns.desc(), _adjustments.request_id.desc())
        rows, more = await self._readers.run(
            lambda connection: read_page(connection, statement, count=page.size, size=lambda row: 512 + len(row.note))
        )
        found = [_adjustment_of(row) for row in rows]
        return found, encode_token((found[-1].time_ns, found[-1].request_id), filters) if more else ""

    async def take_snapshot(self, key: AccountKey, *, before_ns: int) -> None:
        """See AccountStore."""
        await self._queue.execute(partial(_take_snapshot, key=key, before_ns=before_ns))


def _parameters(key: AccountKey) -> dict[str, object]:
    return {"tenant": key.tenant_id, "user": key.user_id, "currency": key.currency_code}


def _read_sums(connection: Connection, key: AccountKey, but_worker: str) -> AccountSums:
    statement = _SUMS if key.user_id else _SUMS_OF_TENANT
    row = connection.execute(statement, {**_parameters(key), "worker": but_worker}).one()
    *sums, before, summed_from_ns, reserved = row
    if summed_from_ns is None:
        return AccountSums(reserved_nanos=int(reserved))
    balance = join_halves(*sums[:2]) - join_halves(*sums[2:]) - before
    return AccountSums(
        balance_nanos=max(-LARGEST, min(LARGEST, balance)),
        summed_from_ns=summed_from_ns,
        reserved_nanos=int(reserved),
    )


def _adjust(connection: Connection, *, key: AccountKey, adjustment: StoredAdjustment) -> StoredAdjustment:
    here = _parameters(key)
    row = connection.execute(_SAME, {**here, "request": adjustment.request_id}).one_or_none()
    if row is not None:
        recorded = _adjustment_of(row)
        if (recorded.amount_nanos, recorded.currency_code, recorded.note) != (
            adjustment.amount_nanos,
            adjustment.currency_code,
            adjustment.note,
        ):
            raise RequestIdReused(
                f"The request id {adjustment.request_id!r} was used for another adjustment of this account. Use a new "
                "one."
            )
        return recorded
    upper, lower = connection.execute(_ADJUSTED, here).one()
    if abs(int(upper) * 2**32 + int(lower) + adjustment.amount_nanos) > LARGEST:
        description = "the adjustments of this account would add up to more than 2^63 - 1"
        raise InvalidRequest([FieldViolation(field="amount_nanos", description=description)])
    connection.execute(_INSERT, {"tenant_id": key.tenant_id, "user_id": key.user_id, **dataclasses.asdict(adjustment)})
    return adjustment


def _adjustment_of(row: Row[Any]) -> StoredAdjustment:
    return StoredAdjustment(
        request_id=row.request_id,
        amount_nanos=row.amount_nanos,
        currency_code=row.currency_code,
        note=row.note,
        time_ns=row.time_ns,
        made_by=row.made_by,
    )


def _take_snapshot(connection: Connection, *, key: AccountKey, before_ns: int) -> None:
    here = {**_parameters(key), "end": before_ns}
    statement = _SNAPSHOT if key.user_id else _SNAPSHOT_OF_TENANT
    before, upper, lower = connection.execute(statement, here).one()
    values = {"tenant_id": key.tenant_id, "user_id": key.user_id, "currency_code": key.currency_code}
    charge = min(LARGEST, before + join_halves(upper, lower))
    connection.execute(_KEEP, {**values, "before_ns": before_ns, "charge_nanos": charge})
    connection.execute(_DROP_OLDER, here)
