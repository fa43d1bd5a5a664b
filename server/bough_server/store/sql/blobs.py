"""Files of sessions on SQL: bytes by tenant and hash, and references by session and run.

Files are written in the transactions of the events that refer to them, and deleted with the last session that does.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, case, delete, exists, func, insert, or_, select
from sqlalchemy.dialects.sqlite import insert as upsert

from bough_server.errors import FieldViolation, InvalidRequest, NotFound
from bough_server.identity import Principal, Scope
from bough_server.log.blobs import UNKNOWN
from bough_server.store.ports.log import AnyLogEvent, LogEvent
from bough_server.store.ports.sessions import BlobPiece
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.rows import strip_nul
from bough_server.store.sql.statements import DriverCursor, DriverStatement, in_scope, scope_parameters

_blobs, _refs, _messages, _sessions = tables.blobs.c, tables.session_blobs.c, tables.messages.c, tables.sessions.c

_KEEP: Final = DriverStatement(upsert(tables.blobs).on_conflict_do_nothing())
_REFER: Final = DriverStatement(upsert(tables.session_blobs).on_conflict_do_nothing())

_OF_SESSION: Final = (_refs.tenant_id == bindparam("tenant"), _refs.session_id == bindparam("session"))
_HELD: Final = select(_refs.sha256).where(*_OF_SESSION, _refs.sha256.in_(bindparam("hashes", expanding=True)))
_IS_SESSION: Final = select(_sessions.session_id).where(
    _sessions.session_id == bindparam("session"), *in_scope(tables.sessions)
)
_PIECE: Final = (
    select(
        func.substr(_blobs.data, bindparam("start"), bindparam("count")).label("data"),
        func.length(_blobs.data).label("size"),
        _refs.media_type,
    )
    .join_from(
        tables.session_blobs, tables.blobs, (_blobs.tenant_id == _refs.tenant_id) & (_blobs.sha256 == _refs.sha256)
    )
    .where(*_OF_SESSION, _refs.sha256 == bindparam("hash"), _IS_SESSION.exists())
    .order_by(_refs.media_type == "", _refs.run_id)
    .limit(1)
)

_IS_OF_ORIGIN: Final = _refs.run_id == bindparam("origin")
_COPIED: Final = (_refs.tenant_id, _refs.sha256, _refs.sequence, _refs.media_type)
_SHARE: Final = insert(tables.session_blobs).from_select(
    ["session_id", "run_id", *(column.name for column in _COPIED)],
    select(bindparam("own_session"), case((_IS_OF_ORIGIN, bindparam("fork")), else_=_refs.run_id), *_COPIED).where(
        _refs.tenant_id == bindparam("tenant"),
        _refs.session_id == bindparam("its_session"),
        or_(
            _IS_OF_ORIGIN & (_refs.sequence <= bindparam("sequence")),
            # Of the runs before the origin; those after it have no message among the copied ones.
            ~_IS_OF_ORIGIN
            & exists().where(
                _messages.tenant_id == bindparam("tenant"),
                _messages.session_id == bindparam("own_session"),
                _messages.run_id == _refs.run_id,
            ),
        ),
    ),
)

_others = tables.session_blobs.alias("others")
DELETIONS: Final = (
    delete(tables.blobs).where(
        _blobs.tenant_id == bindparam("tenant"),
        _blobs.sha256.in_(select(_refs.sha256).where(*_OF_SESSION)),
        ~exists().where(
            _others.c.tenant_id == bindparam("tenant"),
            _others.c.sha256 == _blobs.sha256,
            _others.c.session_id != bindparam("session"),
        ),
    ),
    delete(tables.session_blobs).where(*_OF_SESSION),
)


def write_blobs(
    cursor: DriverCursor, *, tenant_id: str, session_id: str, run_id: str, log_events: Sequence[AnyLogEvent]
) -> None:
    """Store the files that some records bring, and the references of their run; most records bring none."""
    for record in log_events:
        if not record.blobs:
            continue
        for blob in record.blobs:
            if blob.data is not None:
                _KEEP.write(cursor, [{"tenant_id": tenant_id, "sha256": blob.sha256, "data": blob.data}])
        _REFER.write(
            cursor,
            [
                {
                    "tenant_id": tenant_id,
                    "session_id": session_id,
                    "sha256": blob.sha256,
                    "run_id": run_id,
                    "sequence": record.sequence,
                    "media_type": strip_nul(blob.media_type),
                }
                for blob in record.blobs
            ],
        )


def check_blobs(connection: Connection, *, tenant_id: str, session_id: str, log_events: Sequence[LogEvent]) -> None:
    """Raise InvalidRequest if records name files without their bytes that a session does not have."""
    named = [blob for record in log_events for blob in record.blobs if blob.data is None]
    if not named:
        return
    missing = _find_missing(
        connection, tenant_id=tenant_id, session_id=session_id, sha256s={blob.sha256 for blob in named}
    )
    if wrong := [FieldViolation(field=blob.field, description=UNKNOWN) for blob in named if blob.sha256 in missing]:
        raise InvalidRequest(wrong)


def share_blobs(connection: Connection, shared: dict[str, object]) -> None:
    """Let a fork's session refer to the files of the events and messages that were copied to it.

    `shared` are tenant, own_session, its_session, fork, origin and sequence, as for the copies of messages.
    """
    connection.execute(_SHARE, shared)


def delete_blobs(connection: Connection, *, tenant_id: str, session_id: str) -> None:
    """Remove a session's references, and the files that no other session of the tenant refers to."""
    for statement in DELETIONS:
        connection.execute(statement, {"tenant": tenant_id, "session": session_id})


class SqlBlobs:
    """Blobs on SQL."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def read(
        self, scope: Scope, session_id: str, sha256: str, *, offset: int = 0, count: int | None = None
    ) -> BlobPiece:
        """See Blobs."""
        asked: dict[str, object] = {**scope_parameters(scope), "session": session_id, "hash": sha256}
        asked |= {"start": offset + 1, "count": _EVERYTHING if count is None else count}
        return await self._readers.run(partial(_read, asked=asked))

    async def find_missing(self, principal: Principal, session_id: str, sha256s: Collection[str]) -> Collection[str]:
        """See Blobs."""
        if not sha256s:
            return ()
        tenant_id = principal.tenant_id
        return await self._readers.run(
            partial(_find_missing, tenant_id=tenant_id, session_id=session_id, sha256s=sha256s)
        )


_EVERYTHING: Final = 2**31 - 1


def _read(connection: Connection, *, asked: dict[str, object]) -> BlobPiece:
    row = connection.execute(_PIECE, asked).one_or_none() if _is_hash(asked["hash"]) else None
    if row is None:
        if connection.execute(_IS_SESSION, asked).one_or_none() is None:
            raise NotFound("session", str(asked["session"]))
        raise NotFound("file", str(asked["hash"]), hint=f"The session {asked['session']!r} has none with this SHA-256.")
    return BlobPiece(data=row.data, size=row.size, media_type=row.media_type)


def _find_missing(
    connection: Connection, *, tenant_id: str, session_id: str, sha256s: Collection[str]
) -> Collection[str]:
    asked = {"tenant": tenant_id, "session": session_id, "hashes": sorted(filter(_is_hash, sha256s))}
    return set(sha256s) - set(connection.execute(_HELD, asked).scalars())


def _is_hash(text: object) -> bool:
    """Return False for a text with U+0000: agents' code may name a file by it, but PostgreSQL cannot look for it."""
    return "\0" not in str(text)
