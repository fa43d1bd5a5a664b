"""The rows that a new run begins with: its own, its session's, those of its definitions; it checks nothing."""

import json
from collections.abc import Sequence
from typing import Final

from sqlalchemy import insert
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.engine.interfaces import DBAPICursor

from bough.v1 import agent_pb2, event_pb2
from bough_server.store.derived import LogAddress, RunStart
from bough_server.store.sql import tables
from bough_server.store.sql.statements import DriverStatement

_INSERT_SESSION: Final = DriverStatement(insert(tables.sessions))
_INSERT_RUN: Final = DriverStatement(insert(tables.runs))
_INSERT_RUN_DEFINITION: Final = DriverStatement(insert(tables.run_definitions))
_KEEP_DEFINITION: Final = DriverStatement(upsert(tables.definitions).on_conflict_do_nothing())


def start_values(start: RunStart) -> dict[str, object]:
    """The columns of a run's row that come from its first event, with those of a run that goes on."""
    return {
        "agent": start.agent,
        "state": event_pb2.STATE_RUNNING,
        "labels": labels_text(start.labels),
        "start_time_ns": start.start_time_ns,
        "end_time_ns": None,
        "error": None,
        "tree_usage": None,
        "request_id": start.request_id,
        "request_digest": start.request_digest,
        "open_requests": None,
        "next_expire_time_ns": None,
        "origin_run_id": start.origin_run_id,
        "origin_sequence": start.origin_sequence,
    }


def labels_text(labels: dict[str, str]) -> str:
    """Labels as the JSON object that a column holds."""
    return json.dumps(labels, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def insert_run(
    cursor: DBAPICursor,
    address: LogAddress,
    start: RunStart,
    *,
    create_time_ns: int,
    owner: str,
    last_sequence: int,
    definitions: Sequence[agent_pb2.AgentDefinition],
) -> None:
    """Writes the row of a run at epoch 1, and keeps what it names."""
    row = {"run_id": address.run_id, **_tenancy(address), "session_id": address.session_id}
    row |= {"create_time_ns": create_time_ns, "epoch": 1, "owner": owner, "last_sequence": last_sequence}
    _INSERT_RUN.write(cursor, [{**row, "ended": False, **start_values(start)}])
    kept = [
        {"revision": one.revision, "name": one.name, "data": one.SerializeToString(deterministic=True)}
        for one in definitions
    ]
    _KEEP_DEFINITION.write(cursor, kept)
    named = [{"run_id": address.run_id, "revision": revision} for revision in start.revisions]
    _INSERT_RUN_DEFINITION.write(cursor, named)


def insert_session(cursor: DBAPICursor, address: LogAddress, *, now_ns: int, position: int) -> None:
    """Writes the row of a session that a run is the first to hold."""
    row = {"session_id": address.session_id, **_tenancy(address), "labels": "{}", "last_position": position}
    row |= {"create_time_ns": now_ns, "update_time_ns": now_ns, "current_run_id": address.run_id}
    row |= {"state_json": "", "state_run_id": ""}
    _INSERT_SESSION.write(cursor, [row])


def _tenancy(address: LogAddress) -> dict[str, object]:
    return {"tenant_id": address.tenant_id, "user_id": address.user_id}
