"""Commands to runs on SQL, and the bell that rings when one arrives; what a command means is its taker's."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Connection, Row, bindparam, delete, insert, select

from bough.v1 import agent_service_pb2, execution_pb2
from bough_server.errors import Fenced, NotFound, ServerStopping
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue
from bough_server.store.worker_ports import RunCommand

_commands, _runs = tables.run_commands.c, tables.runs.c

_IS_ENDED: Final = select(_runs.ended).where(_runs.run_id == bindparam("run"))
_POST: Final = insert(tables.run_commands).returning(_commands.command_id)
_ONE: Final = select(tables.run_commands).where(_commands.command_id == bindparam("command"))
_OF_RUN: Final = select(tables.run_commands).where(_commands.run_id == bindparam("run")).order_by(_commands.command_id)
_WAITING: Final = select(_commands.run_id).distinct()
_DONE: Final = delete(tables.run_commands).where(_commands.command_id == bindparam("command"))


class _Listener:
    """The runs that somebody who listens has not been told of."""

    def __init__(self) -> None:
        self.runs: dict[str, None] = {}
        self.changed = asyncio.Event()

    def tell(self, run_id: str) -> None:
        self.runs[run_id] = None
        self.changed.set()


class SqlMailbox:
    """Mailbox on one SQLite file."""

    def __init__(self, queue: WriteQueue, readers: Readers) -> None:
        self._queue, self._readers = queue, readers
        self._listeners: WeakSet[_Listener] = WeakSet()
        self._is_closed = False

    async def post(self, letter: RunCommand) -> int:
        """See Mailbox. Raises NotFound where there is no such run."""
        return await self._queue.execute(_Posting(letter), then=partial(self._ring, letter.run_id))

    async def take(self, run_id: str) -> Sequence[RunCommand]:
        """See Mailbox."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_letter(row) for row in rows]

    async def done(self, letter_id: int) -> None:
        """See Mailbox."""
        await self._queue.execute(partial(_forget, letter_id=letter_id))

    async def arrivals(self) -> AsyncIterator[str]:
        """See Mailbox. Raises ServerStopping when the store is closed."""
        listener = _Listener()
        self._listeners.add(listener)
        for run_id in await self._readers.run(lambda connection: connection.execute(_WAITING).scalars().all()):
            listener.tell(run_id)
        while not self._is_closed:
            listener.changed.clear()
            while listener.runs:
                run_id = next(iter(listener.runs))
                del listener.runs[run_id]
                yield run_id
            await listener.changed.wait()
        raise ServerStopping("The server is stopping: nothing more arrives here.")

    def close(self) -> None:
        """Sends home who listens."""
        self._is_closed = True
        for listener in self._listeners:
            listener.changed.set()

    def _ring(self, run_id: str) -> None:
        for listener in self._listeners:
            listener.tell(run_id)


class _Posting:
    """One posting. It may be run again, and then knows whether it was committed after all."""

    def __init__(self, letter: RunCommand) -> None:
        if (letter.answers is None) == (letter.cancel == execution_pb2.CANCEL_REASON_UNSPECIFIED):
            raise ValueError("a letter is a wish to cancel, or brings answers")
        self._row: dict[str, object] = {
            "run_id": letter.run_id,
            "cancel_reason": letter.cancel,
            "answers": None if letter.answers is None else letter.answers.SerializeToString(deterministic=True),
            "user_id": letter.user_id,
            "note": letter.note,
            "deadline_time_ns": letter.deadline_time_ns,
        }
        self._letter_id = 0

    def __call__(self, connection: Connection) -> int:
        """Stores the letter and gives its id. Raises NotFound, Fenced."""
        if self._letter_id and self._is_stored(connection):
            return self._letter_id
        run_id = str(self._row["run_id"])
        is_ended = connection.execute(_IS_ENDED, {"run": run_id}).scalar_one_or_none()
        if is_ended is None:
            raise NotFound("run", run_id)
        if is_ended:
            raise Fenced(f"The run {run_id} has ended: nobody takes letters to it.")
        self._letter_id = connection.execute(_POST, self._row).scalar_one()
        return self._letter_id

    def _is_stored(self, connection: Connection) -> bool:
        found = connection.execute(_ONE, {"command": self._letter_id}).mappings().one_or_none()
        return found is not None and dict(found) == {"command_id": self._letter_id, **self._row}


def _forget(connection: Connection, *, letter_id: int) -> None:
    connection.execute(_DONE, {"command": letter_id})


def _letter(row: Row[Any]) -> RunCommand:
    return RunCommand(
        letter_id=row.command_id,
        run_id=row.run_id,
        cancel=row.cancel_reason,
        answers=None if row.answers is None else agent_service_pb2.ResumeRunRequest.FromString(row.answers),
        user_id=row.user_id,
        note=row.note,
        deadline_time_ns=row.deadline_time_ns,
    )
