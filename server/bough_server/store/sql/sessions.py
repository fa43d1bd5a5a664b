"""Sessions, their messages and their states on SQL; runs change them in the transactions of their events."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Row,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal_column,
    select,
    update,
)

from bough.v1 import message_pb2, session_pb2
from bough_server.errors import FieldViolation, InvalidRequest, NotFound, RequestIdReused
from bough_server.identity import Principal, Scope
from bough_server.log.session_state import MAX_STATE_BYTES, apply_write, fits, json_of, values_of, write_of
from bough_server.messages import set_time
from bough_server.store.ports.runs import Page
from bough_server.store.ports.sessions import SessionPosition, StoredCall, StoredMessage
from bough_server.store.sql import tables
from bough_server.store.sql.append import SET_STATE
from bough_server.store.sql.blobs import delete_blobs
from bough_server.store.sql.create_run import NO_LABELS, build_busy_error, build_exists_error, labels_text
from bough_server.store.sql.driver import Reach, Sharing, build_lock_name
from bough_server.store.sql.pages import Listing, decode_token, encode_token, read_page
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.rows import state_row
from bough_server.store.sql.statements import for_update, in_scope, scope_parameters
from bough_server.store.sql.write_queue import WriteQueue

_sessions, _messages, _runs = tables.sessions.c, tables.messages.c, tables.runs.c

_RESOURCE_COLUMNS: Final = [column for column in _sessions if column.name not in ("state_json", "state_run_id")]
"""Every column but the state, which can be large and is not needed for the resource."""
_WHERE: Final = (_sessions.session_id == bindparam("session"), *in_scope(tables.sessions))
_SESSION: Final = select(*_RESOURCE_COLUMNS).where(*_WHERE)
_BY_REQUEST: Final = select(*_RESOURCE_COLUMNS).where(
    _sessions.tenant_id == bindparam("tenant"),
    _sessions.user_id == bindparam("user"),
    _sessions.request_id == bindparam("request"),
    _sessions.request_id != literal_column("''"),  # the condition of the partial index, literally, or it is not used
)
_SET_LABELS: Final = update(tables.sessions).where(*_WHERE).values(labels=bindparam("new_labels"))
_POSITION: Final = select(_sessions.last_position, _sessions.state_json, _sessions.current_run_id).where(*_WHERE)
_ITS_MESSAGES: Final = (_messages.tenant_id == bindparam("tenant"), _messages.session_id == bindparam("session"))
_ITS_RUNS: Final = (_runs.tenant_id == bindparam("tenant"), _runs.session_id == bindparam("session"))
_MESSAGES: Final = (
    select(_messages.run_id, _messages.agent, _messages.chain, _messages.data)
    .where(*_ITS_MESSAGES, _messages.position >= bindparam("since"), _messages.position <= bindparam("through"))
    .order_by(_messages.position)
)
_calls = tables.calls.c
_ITS_CALLS: Final = (_calls.tenant_id == bindparam("tenant"), _calls.session_id == bindparam("session"))
_CALLS: Final = (
    select(*(column for column in _calls if column.name not in ("tenant_id", "session_id")))
    .where(*_ITS_CALLS, _calls.position >= bindparam("since"), _calls.position <= bindparam("through"))
    .order_by(_calls.position, _calls.sequence)
)
_RUN_IDS: Final = select(_runs.run_id).where(*_ITS_RUNS)
_DELETIONS: Final = (
    delete(tables.run_commands).where(tables.run_commands.c.run_id.in_(_RUN_IDS)),
    delete(tables.events).where(tables.events.c.run_id.in_(_RUN_IDS)),
    delete(tables.run_definitions).where(tables.run_definitions.c.run_id.in_(_RUN_IDS)),
    delete(tables.runs).where(*_ITS_RUNS),
    delete(tables.messages).where(*_ITS_MESSAGES),
    delete(tables.calls).where(*_ITS_CALLS),
    delete(tables.sessions).where(*_WHERE),
)
_named, _definitions = tables.run_definitions.c, tables.definitions.c
_NAMED: Final = select(_named.revision).where(_named.run_id.in_(_RUN_IDS)).distinct()
_DROP_UNNAMED: Final = delete(tables.definitions).where(
    _definitions.revision.in_(bindparam("revisions", expanding=True)),
    ~exists().where(_named.revision == _definitions.revision),
)

_IS_OF_CALLER: Final = func.substr(_sessions.session_id, 1, 6) != "bough/"


class SqlSessions:
    """Sessions on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers, *, on_delete: Callable[[], None]) -> None:
        self._queue, self._readers = queue, readers
        self._on_delete = on_delete

    async def create(
        self,
        principal: Principal,
        *,
        session_id: str,
        labels: Mapping[str, str],
        now_ns: int,
        request_id: str = "",
        request_digest: str = "",
    ) -> session_pb2.Session:
        """See Sessions."""
        row: dict[str, object] = {
            "tenant_id": principal.tenant_id,
            "session_id": session_id,
            "user_id": principal.user_id,
            "labels": labels_text(dict(labels)),
            "create_time_ns": now_ns,
            "last_run_time_ns": None,
            "request_id": request_id,
            "request_digest": request_digest,
            "current_run_id": "",
            "last_position": 0,
            "state_json": "",
            "state_run_id": "",
        }
        reach = _reach(principal, session_id)
        if request_id:
            request = build_lock_name("request of a session", principal.tenant_id, principal.user_id, request_id)
            reach = replace(reach, names=[*reach.names, request])
        return _to_session(await self._queue.execute(_Creation(row), reach=reach))

    async def get(self, scope: Scope, session_id: str) -> session_pb2.Session:
        """See Sessions."""
        return _to_session(await self._row(scope, session_id))

    async def list(
        self, scope: Scope, *, labels: Mapping[str, str], page: Page, include_evaluations: bool = False
    ) -> tuple[Sequence[session_pb2.Session], str]:
        """See Sessions."""
        filters = ["sessions", scope.tenant_id, scope.user_id, dict(labels), include_evaluations]
        common = [] if include_evaluations else [_IS_OF_CALLER]
        if scope.user_id is not None:
            common.append(_sessions.user_id == scope.user_id)
        listing = Listing(
            table=tables.sessions,
            kind=tables.SESSION,
            name=_sessions.session_id,
            scope=scope,
            common=common,
            labels=labels,
            after=decode_token(page.token, filters),
            columns=_RESOURCE_COLUMNS,
        )
        shown, following = await self._readers.run(partial(listing.read, count=page.size, size=_size_of_session))
        token = encode_token(following, filters) if following is not None else ""
        return [_to_session(row) for row in shown], token

    async def set_labels(self, scope: Scope, session_id: str, labels: Mapping[str, str]) -> session_pb2.Session:
        """See Sessions."""
        setting = partial(_set_labels, here=_here(scope, session_id), text=labels_text(dict(labels)))
        return _to_session(await self._queue.execute(setting, reach=_reach(scope, session_id)))

    async def delete(self, scope: Scope, session_id: str) -> None:
        """See Sessions."""
        deleting = partial(_delete, scope=scope, session_id=session_id)
        reach = _reach(scope, session_id)
        reach = replace(reach, sharing=Sharing.DROPS, runs_of_sessions=reach.sessions)
        await self._queue.execute(deleting, reach=reach)
        self._on_delete()

    async def read_position(self, scope: Scope, session_id: str) -> SessionPosition:
        """See Sessions."""
        row = await self._row(scope, session_id, statement=_POSITION)
        return SessionPosition(position=row.last_position, state_json=row.state_json)

    async def update_state(
        self, scope: Scope, session_id: str, changes: Sequence[session_pb2.SessionStateChange]
    ) -> str:
        """See Sessions."""
        updating = partial(_update_state, scope=scope, session_id=session_id, changes=changes)
        return await self._queue.execute(updating, reach=_reach(scope, session_id))

    async def messages(self, principal: Principal, session_id: str, *, through: int) -> Sequence[StoredMessage]:
        """See Sessions."""
        here = {"tenant": principal.tenant_id, "session": session_id, "since": 0, "through": through}
        return list(map(_to_stored_message, await self._rows(_MESSAGES, here)))

    async def history(
        self, principal: Principal, session_id: str, *, through: int, since: int = 0
    ) -> Sequence[StoredMessage]:
        """See Sessions."""
        here = {"tenant": principal.tenant_id, "session": session_id, "since": since, "through": through}
        messages, calls = await self._readers.run(lambda connection: _read_history(connection, here))
        found = [*map(_to_stored_message, messages), *map(_to_stored_call, calls)]
        # A stable sort: calls come after the message at their position, and stay in the order of their sequences.
        return sorted(found, key=lambda one: one.message.position) if calls else found

    async def list_messages(
        self, scope: Scope, session_id: str, page: Page
    ) -> tuple[Sequence[message_pb2.Message], str]:
        """See Sessions."""
        filters = ["messages", scope.tenant_id, scope.user_id, session_id]
        after = decode_token(page.token, filters)
        session = await self._row(scope, session_id)
        before = after[0] if after is not None else session.last_position + 1
        statement = (
            select(_messages.position, _messages.run_id, _messages.data)
            .where(
                _messages.tenant_id == scope.tenant_id,
                _messages.session_id == session_id,
                _messages.position < before,
            )
            .order_by(_messages.position.desc())
        )
        read = partial(read_page, statement=statement, count=page.size, size=_size_of_message)
        shown, more = await self._readers.run(read)
        token = encode_token((shown[-1].position, ""), filters) if more else ""
        return [_to_message(row) for row in shown], token

    async def _row(self, scope: Scope, session_id: str, *, statement: Select[Any] = _SESSION) -> Row[Any]:
        rows = await self._rows(statement, _here(scope, session_id))
        if not rows:
            raise NotFound("session", session_id)
        return rows[0]

    async def _rows(self, statement: Select[Any], parameters: Mapping[str, object] | None = None) -> Sequence[Row[Any]]:
        return await self._readers.run(lambda connection: connection.execute(statement, parameters or {}).all())


def _here(scope: Scope, session_id: str) -> Mapping[str, str | None]:
    return {"session": session_id, **scope_parameters(scope)}


def _reach(scope: Scope, session_id: str) -> Reach:
    # Its name too, so that it is not created after it was to be locked and before it is changed.
    session = scope.tenant_id, session_id
    return Reach(names=[build_lock_name("session", *session)], sessions=[session])


def _read_history(connection: Connection, here: Mapping[str, object]) -> tuple[Sequence[Row[Any]], Sequence[Row[Any]]]:
    return connection.execute(_MESSAGES, here).all(), connection.execute(_CALLS, here).all()


def _to_stored_message(row: Row[Any]) -> StoredMessage:
    message = message_pb2.Message.FromString(row.data)
    return StoredMessage(message=message, run_id=row.run_id, agent=row.agent, chain=row.chain)


def _to_stored_call(row: Row[Any]) -> StoredCall:
    return StoredCall(
        message=message_pb2.Message.FromString(row.data),
        run_id=row.run_id,
        agent=row.agent,
        chain=row.chain,
        sequence=row.sequence,
        inside=tuple(row.inside.split()),
    )


def _size_of_session(row: Row[Any]) -> int:
    return len(row.labels.encode())


def _size_of_message(row: Row[Any]) -> int:
    return len(row.data)


class _Creation:
    """The transaction that creates a session. If it is run again, it finds out whether it was committed before."""

    def __init__(self, row: dict[str, object]) -> None:
        self._row = row
        self._has_written = False

    def __call__(self, connection: Connection) -> Row[Any]:
        """Create the session, or return the one that its request created. Raises RequestIdReused, SessionExists."""
        if (earlier := self._find_earlier(connection)) is not None:
            return earlier
        here = {"tenant": self._row["tenant_id"], "user": None, "session": self._row["session_id"]}
        found = connection.execute(_SESSION, here).one_or_none()
        if found is None:
            connection.execute(insert(tables.sessions), self._row)
            self._has_written = True
            return connection.execute(_SESSION, here).one()
        own = self._row["user_id"], self._row["create_time_ns"]
        if self._has_written and (found.user_id, found.create_time_ns) == own:
            return found
        raise build_exists_error(str(self._row["session_id"]))

    def _find_earlier(self, connection: Connection) -> Row[Any] | None:
        request_id = self._row["request_id"]
        asked = {"tenant": self._row["tenant_id"], "user": self._row["user_id"], "request": request_id}
        found = connection.execute(_BY_REQUEST, asked).one_or_none() if request_id else None
        if found is not None and found.request_digest != self._row["request_digest"]:
            raise RequestIdReused(
                f"The request id {request_id!r} was used for another session with other content. Use a new one.",
                details={"session_id": found.session_id},
            )
        return found


def _set_labels(connection: Connection, *, here: Mapping[str, str | None], text: str) -> Row[Any]:
    connection.execute(_SET_LABELS, {**here, "new_labels": text})
    row = connection.execute(_SESSION, here).one_or_none()
    if row is None:
        raise NotFound("session", str(here["session"]))
    return row


def _update_state(
    connection: Connection, *, scope: Scope, session_id: str, changes: Sequence[session_pb2.SessionStateChange]
) -> str:
    row = connection.execute(for_update(_POSITION), _here(scope, session_id)).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    if row.current_run_id:
        raise build_busy_error(session_id, row.current_run_id)
    values = apply_write(values_of(row.state_json), write_of(changes))
    if not fits(values):
        description = f"The session state would be larger than {MAX_STATE_BYTES // 1024} KiB with these changes."
        raise InvalidRequest([FieldViolation(field="changes", description=description)])
    state_json = json_of(values)
    connection.execute(SET_STATE, state_row(scope.tenant_id, session_id, "", state_json))
    return state_json


def _delete(connection: Connection, *, scope: Scope, session_id: str) -> None:
    here = _here(scope, session_id)
    row = connection.execute(for_update(_SESSION), here).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    if row.current_run_id:
        raise build_busy_error(session_id, row.current_run_id)
    named = connection.execute(_NAMED, here).scalars().all()
    delete_blobs(connection, tenant_id=scope.tenant_id, session_id=session_id)
    for statement in _DELETIONS:
        connection.execute(statement, here)
    # Definitions are shared between runs: delete those that no other run names.
    connection.execute(_DROP_UNNAMED, {"revisions": named})


def _to_session(row: Row[Any]) -> session_pb2.Session:
    columns = row._mapping  # the attributes of a row take five times as long
    session = session_pb2.Session(
        session_id=columns["session_id"],
        user_id=columns["user_id"],
        current_run_id=columns["current_run_id"],
    )
    if columns["labels"] != NO_LABELS:
        session.labels.update(json.loads(columns["labels"]))
    set_time(session.create_time, columns["create_time_ns"])
    if columns["last_run_time_ns"] is not None:
        set_time(session.last_run_time, columns["last_run_time_ns"])
    return session


def _to_message(row: Row[Any]) -> message_pb2.Message:
    message = message_pb2.Message.FromString(row.data)
    message.run_id = row.run_id
    return message
