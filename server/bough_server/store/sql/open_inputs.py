"""Pages of the open input requests of many runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, literal, select, tuple_

from bough.v1 import event_pb2, input_pb2
from bough_server.identity import Principal, Scope
from bough_server.store.sql import tables
from bough_server.store.sql.pages import Key
from bough_server.store.window import PAGE_BYTES

MAX_SEARCHED: Final = 1_000
"""The most runs that are searched for a page."""

_runs = tables.runs.c
_ASKING: Final = (
    select(
        _runs.run_id,
        _runs.session_id,
        _runs.agent,
        _runs.user_id,
        _runs.input_excerpt,
        _runs.create_time_ns,
        _runs.open_requests,
    )
    .where(tables.IS_RUN, _runs.open_requests.is_not(None))
    .order_by(_runs.create_time_ns, _runs.run_id)
    .limit(MAX_SEARCHED)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenInputs:
    """The open requests of a scope's runs that `takes` accepts, by the time at which their runs were created.

    The key of one is its run's time, and the run with the number of the request in it.
    """

    scope: Scope
    takes: Callable[[Principal, input_pb2.InputRequest], bool]
    count: int
    after: Key | None

    def read(self, connection: Connection) -> tuple[list[input_pb2.OpenInput], Key | None]:
        """Return a page, and the key after which the next one begins; None on the last page."""
        found: list[input_pb2.OpenInput] = []
        last: Key | None = None
        size = 0
        rows = self._rows(connection)
        for row in rows:
            for number, each in enumerate(_open_inputs(row), start=1):
                key = (row.create_time_ns, f"{row.run_id}/{number:06}")
                if (self.after is not None and key <= self.after) or not self._accepts(each):
                    continue
                size += each.ByteSize()
                if found and (len(found) == self.count or size > PAGE_BYTES):
                    return found, last
                found.append(each)
                last = key
        if len(rows) < MAX_SEARCHED:
            return found, None
        # The last run may be one whose request the caller may not answer: only its time is named.
        searched = (rows[-1].create_time_ns, "")
        return found, searched if last is None else max(last, searched)

    def _rows(self, connection: Connection) -> list[Row[Any]]:
        statement = _ASKING.where(_runs.tenant_id == self.scope.tenant_id)
        if self.scope.user_id is not None:
            statement = statement.where(_runs.user_id == self.scope.user_id)
        if self.after is not None:
            run_id = self.after[1].partition("/")[0]
            begin = tuple_(literal(self.after[0]), literal(run_id))
            statement = statement.where(tuple_(_runs.create_time_ns, _runs.run_id) >= begin)
        return list(connection.execute(statement))

    def _accepts(self, each: input_pb2.OpenInput) -> bool:
        owner = Principal(tenant_id=self.scope.tenant_id, user_id=each.user_id)
        return self.takes(owner, each.request)


def _open_inputs(row: Row[Any]) -> Iterator[input_pb2.OpenInput]:
    """Return the open requests of a run, in the order in which they were made."""
    asked = event_pb2.RunInterrupted.FromString(row.open_requests)
    for index, request in enumerate(asked.requests):
        time = asked.request_times[index] if index < len(asked.request_times) else None
        yield input_pb2.OpenInput(
            run_id=row.run_id,
            session_id=row.session_id,
            agent=row.agent,
            user_id=row.user_id,
            input_excerpt=row.input_excerpt,
            request_time=time if time is not None and time.seconds else None,
            request=request,
        )
