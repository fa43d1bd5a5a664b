"""Mailbox on SQL: stores commands to runs, and notifies listeners when one is posted."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.clock import Clock
from bough_server.errors import Fenced, NotFound, ServerStopping, StorageFailed
from bough_server.store.ports.workers import RunCommand, Topic
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach
from bough_server.store.sql.notifications import Notifier
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue

_commands, _runs = tables.run_commands.c, tables.runs.c

_IS_ENDED: Final = select(_runs.ended).where(_runs.run_id == bindparam("run")).with_for_update(read=True)
"""Locked, so that a run which ends meanwhile finds the command that is posted, and removes it."""

_POST: Final = insert(tables.run_commands).returning(_commands.command_id)
_COMMAND: Final = select(tables.run_commands).where(_commands.command_id == bindparam("command"))
_OF_RUN: Final = select(tables.run_commands).where(_commands.run_id == bindparam("run")).order_by(_commands.command_id)
_WAITING: Final = (
    select(_commands.run_id, func.max(_commands.command_id), _runs.epoch, _runs.owner)
    .join(tables.runs, _runs.run_id == _commands.run_id)
    .group_by(_commands.run_id, _runs.epoch, _runs.owner)
    .order_by(func.min(_commands.command_id))
)
_DELETE_COMMAND: Final = delete(tables.run_commands).where(_commands.command_id == bindparam("command"))


REPEAT_SECONDS: Final = 5.0
"""Seconds after which a listener is notified again of commands that are still pending.

Those of a run with another owner than the last time come at once: this server may be the one to carry them out now.
"""


class _PendingRun(NamedTuple):
    """A run with pending commands: the last of them, and the owner that is to carry them out."""

    run_id: str
    command_id: int
    epoch: int
    owner: str


class _Listener:
    """The runs that one listener has still to be notified of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.runs: dict[str, None] = {}  # an ordered set: oldest first, each run once
        self.is_poll_due = True
        """Whether commands may be pending of which it was not notified."""
        self.changed = asyncio.Event()
        self._seen: dict[_PendingRun, float] = {}

    def notify(self, run_id: str) -> None:
        if run_id:
            self.runs[run_id] = None
        else:
            self.is_poll_due = True
        self.changed.set()

    def add_pending(self, waiting: Sequence[_PendingRun]) -> None:
        """Add the runs that a poll has found, without those that it found lately."""
        now = self._clock.monotonic()
        seen, self._seen = self._seen, {}
        for one in waiting:
            at = seen.get(one)
            if at is None or now - at >= REPEAT_SECONDS:
                at = now
                self.runs[one.run_id] = None
            self._seen[one] = at

    def take(self) -> Iterator[str]:
        """Yield the runs, each when it is asked for."""
        while self.runs:
            run_id = next(iter(self.runs))
            del self.runs[run_id]
            yield run_id


class SqlMailbox:
    """Mailbox on SQL."""

    def __init__(self, queue: WriteQueue, readers: Readers, notifier: Notifier, clock: Clock) -> None:
        self._queue, self._readers, self._notifier, self._clock = queue, readers, notifier, clock
        # Weak, so that an iteration that is abandoned takes its listener with it.
        self._listeners: WeakSet[_Listener] = WeakSet()
        self._is_closed = False
        notifier.subscribe(Topic.COMMANDS, self._notify)

    async def post(self, command: RunCommand) -> int:
        """See Mailbox."""
        notify = partial(self._notifier.publish, Topic.COMMANDS, command.run_id)
        return await self._queue.execute(_Posting(command), reach=Reach(runs=[command.run_id]), then=notify)

    async def take(self, run_id: str) -> Sequence[RunCommand]:
        """See Mailbox."""
        rows = await self._readers.run(lambda connection: connection.execute(_OF_RUN, {"run": run_id}).all())
        return [_command_of(row) for row in rows]

    async def delete_command(self, command_id: int) -> None:
        """See Mailbox."""
        # Its run too: the end of that and the deletion of its session remove the command as well.
        forgetting = partial(_forget, command_id=command_id)
        await self._queue.execute(forgetting, reach=Reach(runs_of_commands=[command_id]))

    async def arrivals(self) -> AsyncIterator[str]:
        """See Mailbox."""
        listener = _Listener(self._clock)
        self._listeners.add(listener)  # before the read, so that no command is posted unnoticed in between
        listener.add_pending(await self._readers.run(_read_pending))
        listener.is_poll_due = is_failing = False
        while not self._is_closed:
            listener.changed.clear()
            for run_id in listener.take():
                yield run_id
            await listener.changed.wait()
            if listener.is_poll_due and not self._is_closed:
                listener.is_poll_due = False
                try:
                    listener.add_pending(await self._readers.run(_read_pending, is_logged=not is_failing))
                    is_failing = False
                except StorageFailed:
                    is_failing = True  # the next look finds it
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
        found = connection.execute(_COMMAND, {"command": self._command_id}).mappings().one_or_none()
        return found is not None and dict(found) == {"command_id": self._command_id, **self._row}


def _read_pending(connection: Connection) -> Sequence[_PendingRun]:
    return [_PendingRun(*row) for row in connection.execute(_WAITING)]


def _forget(connection: Connection, *, command_id: int) -> None:
    connection.execute(_DELETE_COMMAND, {"command": command_id})


def _command_of(row: Row[Any]) -> RunCommand:
    return RunCommand(
        command_id=row.command_id,
        run_id=row.run_id,
        cancel=None if row.cancel is None else event_pb2.CancelRequested.FromString(row.cancel),
        answers=None if row.answers is None else agent_service_pb2.ResumeRunRequest.FromString(row.answers),
        user_id=row.user_id,
        deadline_time_ns=row.deadline_time_ns,
    )
