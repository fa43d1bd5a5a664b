"""Mailbox on SQL: stores commands to runs, and notifies listeners when one is posted."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Connection, Row, bindparam, delete, insert, select

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.errors import Fenced, NotFound, ServerStopping
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue
from bough_server.store.worker_ports import RunCommand

_commands, _runs = tables.run_commands.c, tables.runs.c

_IS_ENDED: Final = select(_runs.ended).where(_runs.run_id == bindparam("run")).with_for_update(read=True)
"""Locked, so that a run which ends meanwhile finds the command that is posted, and removes it."""

_POST: Final = insert(tables.run_commands).returning(_commands.command_id)
_ONE: Final = select(tables.run_commands).where(_commands.command_id == bindparam("command"))
_OF_RUN: Final = select(tables.run_commands).where(_commands.run_id == bindparam("run")).order_by(_commands.command_id)
_WAITING: Final = select(_commands.run_id).distinct()
_DONE: Final = delete(tables.run_commands).where(_commands.command_id == bindparam("command"))


class _Listener:
    """The runs that one listener has still to be notified of."""

    def __init__(self) -> None:
        self.runs: dict[str, None] = {}  # an ordered set: oldest first, each run once
        self.changed = asyncio.Event()

    def notify(self, run_id: str) -> None:
        self.runs[run_id] = None
        self.changed.set()


class SqlMailbox:
    """Mailbox on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers) -> None:
        self._queue, self._readers = queue, readers
        # Weak, so that an iteration that is abandoned takes its listener with it.
        self._listeners: WeakSet[_Listener] = WeakSet()
        self._is_closed = False

    async def post(self, command: RunCommand) -> int:
        """See Mailbox."""
        return await self._queue.execute(
            _Posting(command), reach=Reach(runs=[command.run_id]), then=partial(self._notify, command.run_id)
        )

    async def take(self, run_id: str) -> Sequence[RunCommand]:
        """See Mailbox."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_command_of(row) for row in rows]

    async def done(self, command_id: int) -> None:
        """See Mailbox."""
        await self._queue.execute(partial(_forget, command_id=command_id))

    async def arrivals(self) -> AsyncIterator[str]:
        """See Mailbox."""
        listener = _Listener()
        self._listeners.add(listener)  # before the read, so that no command is posted unnoticed in between
        for run_id in await self._readers.run(lambda connection: connection.execute(_WAITING).scalars().all()):
            listener.notify(run_id)
        while not self._is_closed:
            listener.changed.clear()
            while listener.runs:
                run_id = next(iter(listener.runs))
                del listener.runs[run_id]
                yield run_id
            await listener.changed.wait()
        raise ServerStopping("The server is stopping: no more commands arrive here.")

    def close(self) -> None:
        """End every `arrivals` with ServerStopping."""
        self._is_closed = True
        for listener in self._listeners:
            listener.changed.set()

    def _notify(self, run_id: str) -> None:
        for listener in self._listeners:
            listener.notify(run_id)


class _Posting:
    """The transaction that stores one command. If it is run again, it finds out whether it was committed before."""

    def __init__(self, command: RunCommand) -> None:
        if (command.answers is None) == (command.cancel is None):
            raise ValueError("a command must either cancel a run or bring answers")
        self._row: dict[str, object] = {
            "run_id": command.run_id,
            "cancel": None if command.cancel is None else command.cancel.SerializeToString(deterministic=True),
            "answers": None if command.answers is None else command.answers.SerializeToString(deterministic=True),
            "user_id": command.user_id,
            "deadline_time_ns": command.deadline_time_ns,
        }
        self._command_id = 0

    def __call__(self, connection: Connection) -> int:
        """Store the command and return its id. Raises NotFound, Fenced."""
        run_id = str(self._row["run_id"])
        is_ended = connection.execute(_IS_ENDED, {"run": run_id}).scalar_one_or_none()
        # A run that has ended since the earlier attempt ended in its transaction, which was committed then, and which
        # removed the commands of the run, this one too.
        if self._command_id and (is_ended is not False or self._is_stored(connection)):
            return self._command_id
        if is_ended is None:
            raise NotFound("run", run_id)
        if is_ended:
            raise Fenced(f"The run {run_id} has ended: it accepts no commands.")
        self._command_id = connection.execute(_POST, self._row).scalar_one()
        return self._command_id

    def _is_stored(self, connection: Connection) -> bool:
        # The whole row is compared: if the earlier attempt was rolled back, another command may have its id.
        found = connection.execute(_ONE, {"command": self._command_id}).mappings().one_or_none()
        return found is not None and dict(found) == {"command_id": self._command_id, **self._row}


def _forget(connection: Connection, *, command_id: int) -> None:
    connection.execute(_DONE, {"command": command_id})


def _command_of(row: Row[Any]) -> RunCommand:
    return RunCommand(
        command_id=row.command_id,
        run_id=row.run_id,
        cancel=None if row.cancel is None else event_pb2.CancelRequested.FromString(row.cancel),
        answers=None if row.answers is None else agent_service_pb2.ResumeRunRequest.FromString(row.answers),
        user_id=row.user_id,
        deadline_time_ns=row.deadline_time_ns,
    )
