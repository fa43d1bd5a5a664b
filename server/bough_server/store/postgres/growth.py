"""One read of what is new in many logs."""

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, text

from bough_server.store.ports.log import StoredEvent
from bough_server.store.sql.followed_logs import Growth
from bough_server.store.window import PAGE_BYTES, PAGE_EVENTS

_GROWTH: Final = text("""
WITH found AS (
  SELECT w.run_id, r.last_sequence, r.epoch, e.sequence, e.kind, e.data, coalesce(e.sequence - w.after, 0) AS place,
    sum(octet_length(e.data)) OVER (ORDER BY coalesce(e.sequence - w.after, 0), w.run_id ROWS UNBOUNDED PRECEDING)
      - octet_length(e.data) AS before
  FROM unnest(CAST(:runs AS text[]), CAST(:ends AS bigint[])) AS w(run_id, after)
  JOIN runs r ON r.run_id = w.run_id
  LEFT JOIN LATERAL (
    SELECT * FROM events WHERE run_id = w.run_id AND sequence > w.after AND r.last_sequence > w.after
    ORDER BY sequence LIMIT :count
  ) e ON true
)
SELECT run_id, last_sequence, epoch, sequence, kind, data FROM found
WHERE sequence IS NULL OR before <= :bytes ORDER BY run_id, sequence
""")
"""The events of each log after the last that is known of it, the first ones of every log before the second ones.

One of a log that has no such event has no data. Lengths of values are known without reading them.
"""


def read_growth(connection: Connection, ends: Mapping[str, int]) -> tuple[Mapping[str, Growth], bool]:
    """Read what is new in logs, up to PAGE_EVENTS of each and about PAGE_BYTES of all; see ReadGrowth."""
    parameters = {"runs": list(ends), "ends": list(ends.values()), "count": PAGE_EVENTS, "bytes": PAGE_BYTES}
    events: dict[str, list[StoredEvent]] = {}
    heads: dict[str, tuple[int, int]] = {}
    size = 0
    for run_id, last_sequence, epoch, sequence, kind, data in connection.execute(_GROWTH, parameters):
        heads[run_id] = last_sequence, epoch
        if sequence is not None:
            events.setdefault(run_id, []).append(StoredEvent(sequence, kind, data))
            size += len(data)
    found = {
        run_id: Growth(stored, epoch, has_more=bool(stored) and stored[-1].sequence < last_sequence)
        for run_id, (last_sequence, epoch) in heads.items()
        for stored in [events.get(run_id, [])]
    }
    return found, size <= PAGE_BYTES
