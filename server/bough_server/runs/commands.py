"""Commands to runs that another worker executes: posted to its mailbox until it has acted, and taken from it."""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import cast

import structlog

from bough.v1 import agent_service_pb2, event_pb2
from bough_server import events
from bough_server.errors import CallError, Fenced, ServerStopping, StorageFailed
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import Pages
from bough_server.runs.recovery import retry_until_stored
from bough_server.store.ports import RunRecord
from bough_server.store.worker_ports import RunCommand

_log = structlog.get_logger(__name__)

Act = Callable[[RunRecord, RunCommand], Awaitable[None]]
"""Carries a command out on a run that this worker executes, or that nobody does."""


class RemoteCommands:
    """This worker's way to runs of others, and theirs to its own."""

    def __init__(self, equipment: RunDependencies) -> None:
        self._equipment = equipment

    async def cancel(self, record: RunRecord, request: event_pb2.CancelRequested) -> None:
        """Asks the owner to end a run, and waits until the wish is in its log."""
        run_id = record.run.run_id
        letter = RunCommand(
            letter_id=0, run_id=run_id, cancel=request.reason, user_id=request.requested_by, note=request.note
        )
        await self._equipment.mailbox.post(letter)
        await self._until(run_id, after=record.run.last_sequence, kinds={events.CANCEL_REQUESTED})

    async def answer(
        self,
        record: RunRecord,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        user_id: str,
        deadline_time_ns: int | None,
    ) -> None:
        """Gives the owner of a run answers that fit, with their caller's deadline; waits until some are in its log."""
        run_id = record.run.run_id
        letter = RunCommand(
            letter_id=0, run_id=run_id, answers=request, user_id=user_id, deadline_time_ns=deadline_time_ns
        )
        await self._equipment.mailbox.post(letter)
        await self._until(run_id, after=record.run.last_sequence, kinds={events.INPUT_RECEIVED})

    async def read(self, act: Act, is_elsewhere: Callable[[RunRecord], Awaitable[bool]]) -> None:
        """Carries out what comes to runs that no other worker executes, until the store closes."""
        with suppress(ServerStopping):
            async for run_id in self._equipment.mailbox.arrivals():
                await retry_until_stored(self._equipment.clock, partial(self._carry_out, run_id, act, is_elsewhere))

    async def _carry_out(self, run_id: str, act: Act, is_elsewhere: Callable[[RunRecord], Awaitable[bool]]) -> None:
        """Does what the letters to a run say; what cannot be done any more is dropped. Raises what may pass."""
        record = await self._equipment.index.find(run_id)
        if record is None or await is_elsewhere(record):
            return
        for letter in await self._equipment.mailbox.take(run_id):
            try:
                await act(record, letter)
            except (ServerStopping, StorageFailed):
                raise
            except (CallError, Fenced) as error:
                _log.warning("command dropped", run_id=run_id, error=str(error))
            await self._equipment.mailbox.done(letter.letter_id)

    async def _until(self, run_id: str, *, after: int, kinds: Iterable[int]) -> None:
        """Waits for an event of these kinds that is not there yet, or the end of the run."""
        wanted = {*kinds, *events.TERMINAL_KINDS}
        tail = cast(Pages, self._equipment.log.tail(run_id, after=after))
        async with aclosing(tail):
            async for page in tail:
                if any(stored.kind in wanted for stored in page):
                    return
