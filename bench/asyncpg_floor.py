"""The floor of append-postgres: asyncpg with group commit of the same bytes by one fenced statement, and nothing else.

Its tables are the log and its head; no rows are derived.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, Self

import asyncpg  # type: ignore[import-untyped]

Row = tuple[str, int, int, bytes]
Job = tuple[Row, asyncio.Future[None]]

_MAKE: Final = """
CREATE TABLE runs (
  run_id text COLLATE "C" PRIMARY KEY, epoch bigint NOT NULL, last_sequence bigint NOT NULL, ended boolean NOT NULL
);
CREATE TABLE events (
  run_id text COLLATE "C", sequence bigint, kind bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (run_id, sequence)
);
"""
_APPEND: Final = """
WITH wanted AS (
  SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS w(run_id, epoch, expected, last)
), locked AS (
  SELECT r.run_id FROM runs r JOIN wanted USING (run_id) ORDER BY r.run_id FOR UPDATE OF r
), moved AS (
  UPDATE runs r SET last_sequence = w.last FROM wanted w, locked l
  WHERE r.run_id = w.run_id AND l.run_id = w.run_id
    AND r.epoch = w.epoch AND r.last_sequence = w.expected AND NOT r.ended
  RETURNING r.run_id
), stored AS (
  INSERT INTO events SELECT e.* FROM unnest($5::text[], $6::bigint[], $7::bigint[], $8::bytea[])
    AS e(run_id, sequence, kind, data) JOIN moved USING (run_id)
)
SELECT run_id FROM moved
"""


class AsyncpgWriter:
    """Commits whatever is queued, at most one append of a run in a batch; `commits` counts how often it did."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.commits = 0
        self._connection = connection
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._task = asyncio.create_task(self._work())

    @classmethod
    async def open(cls, url: str, run_ids: Iterable[str]) -> Self:
        """Connect to an empty database, and create its tables and the rows of some runs, which have one event."""
        connection = await asyncpg.connect(url)
        await connection.execute(_MAKE)
        await connection.executemany("INSERT INTO runs VALUES ($1, 1, 1, false)", [(run_id,) for run_id in run_ids])
        return cls(connection)

    def append(self, row: Row) -> asyncio.Future[None]:
        """Queue a row; the future is done when it is committed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((row, future))
        return future

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._connection.close()

    async def _work(self) -> None:
        while True:
            group = [await self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get_nowait())
            try:
                await self._commit([row for row, _ in group])
            except Exception as error:
                for _, future in group:
                    future.set_exception(error)
            else:
                for _, future in group:
                    future.set_result(None)

    async def _commit(self, rows: Sequence[Row]) -> None:
        names, sequences, kinds, data = map(list, zip(*rows, strict=True))
        before = [sequence - 1 for sequence in sequences]
        async with self._connection.transaction():
            moved = await self._connection.fetch(
                _APPEND, names, [1] * len(rows), before, sequences, names, sequences, kinds, data
            )
        self.commits += 1
        assert len(moved) == len(rows), "nothing fences these runs"
