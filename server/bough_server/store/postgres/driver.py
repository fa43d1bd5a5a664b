"""Appends to logs by psycopg, and the meaning of PostgreSQL's errors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import psycopg
from psycopg import errors
from sqlalchemy.exc import DBAPIError

from bough_server.store.sql.driver import Driver, EventTuple, LogMove
from bough_server.store.sql.statements import DriverCursor

_APPEND: Final = """
WITH wanted AS (
  SELECT * FROM unnest(%b::bigint[], %b::text[], %b::bigint[], %b::bigint[]) AS w(last, run_id, epoch, expected)
), locked AS (
  SELECT r.run_id FROM runs r JOIN wanted USING (run_id) ORDER BY r.run_id FOR UPDATE OF r
), moved AS (
  UPDATE runs r SET last_sequence = w.last FROM wanted w, locked l
  WHERE r.run_id = w.run_id AND l.run_id = w.run_id
    AND r.epoch = w.epoch AND r.last_sequence = w.expected AND NOT r.ended
  RETURNING r.run_id
), stored AS (
  INSERT INTO events (run_id, sequence, kind, data)
  SELECT e.* FROM unnest(%b::text[], %b::bigint[], %b::int[], %b::bytea[]) AS e(run_id, sequence, kind, data)
  JOIN moved USING (run_id)
)
SELECT run_id FROM moved
"""
"""One statement for a batch: a run that another worker has taken over is left out, and its neighbors are written.

READ COMMITTED is what makes it so: the conditions are checked on the newest version of each row. The rows are locked in
one order, so that batches of several servers wait for one another instead of for ever.
"""


def _append_events(cursor: DriverCursor, moves: Mapping[str, LogMove], events: Sequence[EventTuple]) -> Collection[str]:
    parameters = [*map(list, zip(*moves.values(), strict=True)), *map(list, zip(*events, strict=True))]
    cursor.driver.execute(_APPEND, parameters)
    moved = {run_id for (run_id,) in cursor.driver.fetchall()}
    return moves.keys() - moved


def _cause(error: Exception) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def _is_transient(error: Exception) -> bool:
    """Return True for a lost connection, a deadlock, a serialization failure, and a server without room or time."""
    cause = _cause(error)
    if isinstance(cause, psycopg.Error):
        # Without a code: the connection was lost. 08: connection; 40: rolled back; 53: resources; 57: an operator
        # intervened; 55: a lock was not available; 58: an error of the system.
        return cause.sqlstate is None or cause.sqlstate[:2] in {"08", "25", "40", "53", "55", "57", "58"}
    return isinstance(cause, OSError)


def _is_busy(error: Exception) -> bool:
    return isinstance(_cause(error), (errors.LockNotAvailable, errors.OperationalError)) and not isinstance(
        _cause(error), (errors.DeadlockDetected, errors.SerializationFailure)
    )


POSTGRES: Final = Driver(append_events=_append_events, is_transient=_is_transient, is_busy=_is_busy)
"""psycopg 3, synchronous."""
