"""Create a fork in one transaction: a copy of the beginning of its origin's log, and its own first events.

The shared beginning never changes, so a reader thread folds it beforehand and the writer thread only copies it, in SQL.
"""

from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Final

from sqlalchemy import Connection, bindparam, case, insert, or_, select

from bough_server.errors import ForkRefused, NotFound
from bough_server.log import events
from bough_server.store.ports.log import LogEvent, NewFork
from bough_server.store.projected import LogAddress, Projected
from bough_server.store.projection import RunFold
from bough_server.store.sql import tables
from bough_server.store.sql.append import FirstEvents, write_first
from bough_server.store.sql.blobs import check_blobs, share_blobs
from bough_server.store.sql.create_run import check_request, insert_run, insert_session, is_accepted
from bough_server.store.sql.log_heads import Head, LogHeads, iter_log
from bough_server.store.sql.quotas import check_quotas
from bough_server.store.sql.statements import DriverCursor

_runs, _events, _messages, _calls = tables.runs.c, tables.events.c, tables.messages.c, tables.calls.c

_ORIGIN: Final = select(_runs.session_id).where(
    _runs.run_id == bindparam("origin"),
    _runs.tenant_id == bindparam("tenant"),
    _runs.last_sequence >= bindparam("sequence"),
    tables.IS_RUN,
)
_COPY_EVENTS: Final = insert(tables.events).from_select(
    ["run_id", "sequence", "kind", "data"],
    select(bindparam("fork"), _events.sequence, _events.kind, _events.data).where(
        _events.run_id == bindparam("origin"), _events.sequence <= bindparam("sequence")
    ),
)
_COPIED: Final = (_messages.tenant_id, _messages.position, _messages.agent, _messages.chain, _messages.data)
_ITS_RUN: Final = case((_messages.position > bindparam("cut"), bindparam("fork")), else_=_messages.run_id)
"""The run of a copied message: the fork for messages of the origin's run, else the earlier run as before."""
_COPY_MESSAGES: Final = insert(tables.messages).from_select(
    ["session_id", "run_id", *(column.name for column in _COPIED)],
    select(bindparam("own_session"), _ITS_RUN, *_COPIED).where(
        _messages.tenant_id == bindparam("tenant"),
        _messages.session_id == bindparam("its_session"),
        _messages.position <= bindparam("shared_position"),
    ),
)
_COPIED_OF_CALLS: Final = (
    *(_calls.tenant_id, _calls.position, _calls.sequence, _calls.agent, _calls.chain, _calls.inside, _calls.data),
)
_IS_OF_ORIGIN: Final = _calls.run_id == bindparam("origin")
_COPY_CALLS: Final = insert(tables.calls).from_select(
    ["session_id", "run_id", *(column.name for column in _COPIED_OF_CALLS)],
    select(
        bindparam("own_session"), case((_IS_OF_ORIGIN, bindparam("fork")), else_=_calls.run_id), *_COPIED_OF_CALLS
    ).where(
        _calls.tenant_id == bindparam("tenant"),
        _calls.session_id == bindparam("its_session"),
        _calls.position <= bindparam("shared_position"),
        # Positions do not say which calls of the origin are shared: several events can follow one message.
        or_(~_IS_OF_ORIGIN, _calls.sequence <= bindparam("sequence")),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedFork:
    """A fork with all values derived from its log, ready to be created."""

    new_fork: NewFork
    address: LogAddress
    fold: RunFold
    projected: Projected


def check_fork(new_fork: NewFork) -> None:
    """Raise ValueError if a new fork is inconsistent: a defect of the caller."""
    first = new_fork.log_events[0]
    forked = first.event.run_forked
    if first.kind != events.RUN_FORKED or first.sequence != new_fork.origin_sequence + 1:
        raise ValueError("a fork's own records must begin with run_forked, right after the shared events")
    if (forked.origin.run_id, forked.origin.sequence) != (new_fork.origin_run_id, new_fork.origin_sequence):
        raise ValueError("run_forked must name the origin that is copied")
    if (forked.request_id, forked.request_digest) != (new_fork.request_id, new_fork.request_digest):
        raise ValueError("run_forked must hold the fork's request id and digest: a rebuild restores them from it")


def fold_fork(connection: Connection, new_fork: NewFork) -> FoldedFork:
    """Fold the shared events and the fork's own, reading only.

    Raises NotFound, and ForkRefused if the shared events contain the origin's end.
    """
    _origin_session(connection, new_fork)
    address = LogAddress(
        run_id=new_fork.run_id,
        tenant_id=new_fork.principal.tenant_id,
        user_id=new_fork.principal.user_id,
        session_id=new_fork.session_id,
    )
    fold = RunFold(address)
    shared = iter_log(connection, new_fork.origin_run_id, through=new_fork.origin_sequence)
    with closing(shared):  # a refusal leaves it where it is
        first = next(shared, None)
        if first is None:
            raise _build_origin_error(new_fork)
        projected = fold.project(chain([first], map(_check_not_terminal, shared), new_fork.log_events))
    return FoldedFork(new_fork=new_fork, address=address, fold=fold, projected=projected)


def accept_fork(connection: Connection, heads: LogHeads, folded: FoldedFork) -> None:
    """Create a fork.

    Raises RequestIdTaken, QuotaExceeded, NotFound and InvalidRequest, all before it writes anything.
    """
    new_fork = folded.new_fork
    if is_accepted(connection, new_fork.run_id, new_fork.log_events[0]):
        return
    check_request(connection, new_fork.principal, new_fork.request_id)
    check_quotas(connection, new_fork.quotas, now_ns=new_fork.create_time_ns)
    origin_session = _origin_session(connection, new_fork)  # again: the origin may have been deleted since the fold
    tenant_id = folded.address.tenant_id
    check_blobs(connection, tenant_id=tenant_id, session_id=origin_session, log_events=new_fork.log_events)
    _write_rows(connection, folded)
    connection.execute(_COPY_EVENTS, {"fork": new_fork.run_id, **_origin_parameters(new_fork)})
    copied: dict[str, object] = {
        "own_session": new_fork.session_id,
        "its_session": origin_session,
        "tenant": tenant_id,
    }
    copied |= {"fork": new_fork.run_id, "cut": folded.fold.session_position}
    copied["shared_position"] = folded.fold.shared_position
    connection.execute(_COPY_MESSAGES, copied)
    del copied["cut"]
    connection.execute(_COPY_CALLS, {**copied, **_origin_parameters(new_fork)})
    del copied["shared_position"]
    share_blobs(connection, {**copied, **_origin_parameters(new_fork)})
    first = FirstEvents(
        run_id=new_fork.run_id,
        tenant_id=folded.address.tenant_id,
        session_id=new_fork.session_id,
        log_events=new_fork.log_events,
        projected=folded.projected,
    )
    write_first(connection, first)
    head = Head(
        address=folded.address,
        epoch=1,
        last_sequence=new_fork.log_events[-1].sequence,
        is_ended=folded.projected.end is not None,
        fold=folded.fold,
    )
    heads.put(head)


def _check_not_terminal(shared: LogEvent) -> LogEvent:
    if shared.kind in events.TERMINAL_KINDS:
        raise ForkRefused(f"The run ended at sequence {shared.sequence}: fork it before that sequence.")
    return shared


def _origin_session(connection: Connection, new_fork: NewFork) -> str:
    session_id: str | None = connection.execute(_ORIGIN, _origin_parameters(new_fork)).scalar_one_or_none()
    if session_id is None:
        raise _build_origin_error(new_fork)
    return session_id


def _build_origin_error(new_fork: NewFork) -> NotFound:
    hint = f"The origin's log must reach sequence {new_fork.origin_sequence}."
    return NotFound("run", new_fork.origin_run_id, hint=hint)


def _origin_parameters(new_fork: NewFork) -> dict[str, object]:
    return {
        "origin": new_fork.origin_run_id,
        "tenant": new_fork.principal.tenant_id,
        "sequence": new_fork.origin_sequence,
    }


def _write_rows(connection: Connection, folded: FoldedFork) -> None:
    new_fork, start = folded.new_fork, folded.projected.start
    assert start is not None, "run_forked starts the fork's row"
    now, position = new_fork.create_time_ns, folded.fold.shared_position
    with DriverCursor(connection) as cursor:
        insert_session(cursor, folded.address, create_time_ns=now, run_time_ns=start.start_time_ns, position=position)
        insert_run(
            cursor,
            folded.address,
            start,
            create_time_ns=now,
            owner=new_fork.owner,
            last_sequence=new_fork.log_events[-1].sequence,
            definitions=new_fork.definitions,
        )
