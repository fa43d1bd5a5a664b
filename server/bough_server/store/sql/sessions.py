"""Sessions, their messages and states on SQL; a session's runs write to it in the transactions of their events."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, delete, insert, select

from bough.v1 import message_pb2, session_service_pb2, state_pb2
from bough_server.errors import FieldViolation, InvalidRequest, NotFound
from bough_server.session_state import MAX_STATE_BYTES, applied, fits, json_of, values_of, write_of
from bough_server.store.ports import Page, Principal, SessionCut, StoredMessage
from bough_server.store.sql import tables
from bough_server.store.sql.append import SET_STATE, state_row
from bough_server.store.sql.create_run import labels_text, session_busy
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.runs import has_labels, is_before, key_of, read_page, token_of
from bough_server.store.sql.write_queue import WriteQueue

_sessions, _messages = tables.sessions.c, tables.messages.c

_SHOWN: Final = [column for column in _sessions if column.name not in ("state_json", "state_run_id")]
"""What a session is shown by: a page of sessions must not read all their states."""
_WHERE: Final = (_sessions.session_id == bindparam("session"), _sessions.tenant_id == bindparam("tenant"))
_ONE: Final = select(*_SHOWN).where(*_WHERE)
_CUT: Final = select(_sessions.last_position, _sessions.state_json, _sessions.current_run_id).where(*_WHERE)
_MESSAGES: Final = (
    select(_messages.run_id, _messages.agent, _messages.chain, _messages.data)
    .where(_messages.session_id == bindparam("session"), _messages.position <= bindparam("through"))
    .order_by(_messages.position)
)
_ITS_RUNS: Final = select(tables.runs.c.run_id).where(tables.runs.c.session_id == bindparam("session"))
_DELETIONS: Final = (
    delete(tables.letters).where(tables.letters.c.run_id.in_(_ITS_RUNS)),
    delete(tables.events).where(tables.events.c.run_id.in_(_ITS_RUNS)),
    delete(tables.run_definitions).where(tables.run_definitions.c.run_id.in_(_ITS_RUNS)),
    delete(tables.runs).where(tables.runs.c.session_id == bindparam("session")),
    delete(tables.messages).where(_messages.session_id == bindparam("session")),
    delete(tables.sessions).where(_sessions.session_id == bindparam("session")),
)
_UNNAMED: Final = delete(tables.definitions).where(
    tables.definitions.c.revision.not_in(select(tables.run_definitions.c.revision))
)


class SqlSessions:
    """Sessions on one SQLite file."""

    def __init__(self, queue: WriteQueue, readers: Readers) -> None:
        self._queue, self._readers = queue, readers

    async def create(
        self, principal: Principal, *, session_id: str, labels: Mapping[str, str], now_ns: int
    ) -> session_service_pb2.Session:
        """See Sessions."""
        row: dict[str, object] = {
            "session_id": session_id,
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "labels": labels_text(dict(labels)),
            "create_time_ns": now_ns,
            "update_time_ns": now_ns,
            "current_run_id": "",
            "last_position": 0,
            "state_json": "",
            "state_run_id": "",
        }
        await self._queue.execute(partial(_create, row=row))
        return await self.get(principal, session_id)

    async def get(self, principal: Principal, session_id: str) -> session_service_pb2.Session:
        """See Sessions."""
        return _session(await self._row(principal, session_id))

    async def list(
        self, principal: Principal, *, labels: Mapping[str, str], page: Page
    ) -> tuple[Sequence[session_service_pb2.Session], str]:
        """See Sessions."""
        filters = ["sessions", principal.tenant_id, dict(labels)]
        statement = select(*_SHOWN).where(
            _sessions.tenant_id == principal.tenant_id, *has_labels(_sessions.labels, dict(labels))
        )
        if (after := key_of(page.token, filters)) is not None:
            statement = statement.where(is_before(_sessions.create_time_ns, _sessions.session_id, after))
        statement = statement.order_by(_sessions.create_time_ns.desc(), _sessions.session_id.desc())
        read = partial(read_page, statement=statement, count=page.size, size=_size_of_session)
        shown, more = await self._readers.run(read)
        token = token_of((shown[-1].create_time_ns, shown[-1].session_id), filters) if more else ""
        return [_session(row) for row in shown], token

    async def delete(self, principal: Principal, session_id: str) -> None:
        """See Sessions."""
        await self._queue.execute(partial(_delete, tenant_id=principal.tenant_id, session_id=session_id))

    async def cut(self, principal: Principal, session_id: str) -> SessionCut:
        """See Sessions."""
        row = await self._row(principal, session_id, statement=_CUT)
        return SessionCut(position=row.last_position, state_json=row.state_json)

    async def update_state(
        self, principal: Principal, session_id: str, changes: Sequence[state_pb2.StateChange]
    ) -> str:
        """See Sessions."""
        return await self._queue.execute(
            partial(_update_state, tenant_id=principal.tenant_id, session_id=session_id, changes=changes)
        )

    async def messages(self, session_id: str, *, through: int) -> Sequence[StoredMessage]:
        """See Sessions."""
        rows = await self._rows(_MESSAGES, {"session": session_id, "through": through})
        return [
            StoredMessage(
                message=message_pb2.Message.FromString(row.data), run_id=row.run_id, agent=row.agent, chain=row.chain
            )
            for row in rows
        ]

    async def list_messages(
        self, principal: Principal, session_id: str, page: Page
    ) -> tuple[Sequence[message_pb2.Message], str]:
        """See Sessions. Raises NotFound."""
        filters = ["messages", principal.tenant_id, session_id]
        after = key_of(page.token, filters)
        session = await self._row(principal, session_id)
        before = after[0] if after is not None else session.last_position + 1
        statement = (
            select(_messages.position, _messages.data)
            .where(_messages.session_id == session_id, _messages.position < before)
            .order_by(_messages.position.desc())
        )
        read = partial(read_page, statement=statement, count=page.size, size=_size_of_message)
        shown, more = await self._readers.run(read)
        token = token_of((shown[-1].position, ""), filters) if more else ""
        return [message_pb2.Message.FromString(row.data) for row in shown], token

    async def _row(self, principal: Principal, session_id: str, *, statement: Select[Any] = _ONE) -> Row[Any]:
        rows = await self._rows(statement, {"session": session_id, "tenant": principal.tenant_id})
        if not rows:
            raise NotFound("session", session_id)
        return rows[0]

    async def _rows(self, statement: Select[Any], parameters: dict[str, object] | None = None) -> Sequence[Row[Any]]:
        return await self._readers.run(lambda connection: connection.execute(statement, parameters or {}).all())


def _size_of_session(row: Row[Any]) -> int:
    return len(row.labels.encode())


def _size_of_message(row: Row[Any]) -> int:
    return len(row.data)


def _create(connection: Connection, *, row: dict[str, object]) -> None:
    found = connection.execute(_ONE, {"session": row["session_id"], "tenant": row["tenant_id"]}).one_or_none()
    if found is None:  # else an earlier attempt of this very transaction was committed after all
        connection.execute(insert(tables.sessions), row)


def _update_state(
    connection: Connection, *, tenant_id: str, session_id: str, changes: Sequence[state_pb2.StateChange]
) -> str:
    row = connection.execute(_CUT, {"session": session_id, "tenant": tenant_id}).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    if row.current_run_id:
        raise session_busy(session_id, row.current_run_id)
    values = applied(values_of(row.state_json), write_of(changes))
    if not fits(values):
        said = f"With these the session's state would be larger than {MAX_STATE_BYTES // 1024} KiB."
        raise InvalidRequest([FieldViolation(field="changes", description=said)])
    state_json = json_of(values)
    connection.execute(SET_STATE, state_row(session_id, "", state_json))
    return state_json


def _delete(connection: Connection, *, tenant_id: str, session_id: str) -> None:
    row = connection.execute(_ONE, {"session": session_id, "tenant": tenant_id}).one_or_none()
    if row is None:
        raise NotFound("session", session_id)
    if row.current_run_id:
        raise session_busy(session_id, row.current_run_id)
    for statement in _DELETIONS:
        connection.execute(statement, {"session": session_id})
    connection.execute(_UNNAMED)


def _session(row: Row[Any]) -> session_service_pb2.Session:
    session = session_service_pb2.Session(
        session_id=row.session_id,
        user_id=row.user_id,
        labels=json.loads(row.labels),
        current_run_id=row.current_run_id,
    )
    session.create_time.FromNanoseconds(row.create_time_ns)
    session.update_time.FromNanoseconds(row.update_time_ns)
    return session
