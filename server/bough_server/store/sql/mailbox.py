"""Commands to runs on SQL, and the bell that rings when one arrives; what a command means is its taker's."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy import Connection, Row, bindparam, delete, insert, select

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.errors import Fenced, NotFound, ServerStopping
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue
from bough_server.store.worker_ports import Letter

_letters, _runs = tables.letters.c, tables.runs.c

_IS_ENDED: Final = select(_runs.ended).where(_runs.run_id == bindparam("run"))
_POST: Final = insert(tables.letters).returning(_letters.letter_id)
_ONE: Final = select(
    _letters.run_id, _letters.cancel, _letters.answers, _letters.user_id, _letters.deadline_time_ns
).where(_letters.letter_id == bindparam("letter"))
_OF_RUN: Final = select(tables.letters).where(_letters.run_id == bindparam("run")).order_by(_letters.letter_id)
_WAITING: Final = select(_letters.run_id).distinct()
_DONE: Final = delete(tables.letters).where(_letters.letter_id == bindparam("letter"))


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

    async def post(self, letter: Letter) -> int:
        """See Mailbox. Raises NotFound where there is no such run."""
        return await self._queue.execute(_Posting(letter), then=partial(self._ring, letter.run_id))

    async def take(self, run_id: str) -> Sequence[Letter]:
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

    def __init__(self, letter: Letter) -> None:
        if (letter.answers is None) == (letter.cancel == event_pb2.CANCEL_REASON_UNSPECIFIED):
            raise ValueError("a letter is a wish to cancel, or brings answers")
        answers = None if letter.answers is None else letter.answers.SerializeToString(deterministic=True)
        self._row = (letter.run_id, letter.cancel, answers, letter.user_id, letter.deadline_time_ns)
        self._letter_id = 0

    def __call__(self, connection: Connection) -> int:
        """Stores the letter and gives its id. Raises NotFound, Fenced."""
        if self._letter_id and connection.execute(_ONE, {"letter": self._letter_id}).one_or_none() == self._row:
            return self._letter_id
        run_id, cancel, answers, user_id, deadline_ns = self._row
        is_ended = connection.execute(_IS_ENDED, {"run": run_id}).scalar_one_or_none()
        if is_ended is None:
            raise NotFound("run", run_id)
        if is_ended:
            raise Fenced(f"The run {run_id} has ended: nobody takes letters to it.")
        row = {
            "run_id": run_id,
            "cancel": cancel,
            "answers": answers,
            "user_id": user_id,
            "deadline_time_ns": deadline_ns,
        }
        self._letter_id = connection.execute(_POST, row).scalar_one()
        return self._letter_id


def _forget(connection: Connection, *, letter_id: int) -> None:
    connection.execute(_DONE, {"letter": letter_id})


def _letter(row: Row[Any]) -> Letter:
    return Letter(
        letter_id=row.letter_id,
        run_id=row.run_id,
        cancel=row.cancel,
        answers=None if row.answers is None else agent_service_pb2.ResumeRunRequest.FromString(row.answers),
        user_id=row.user_id,
        deadline_time_ns=row.deadline_time_ns,
    )
