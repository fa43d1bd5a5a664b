"""Commands to runs that another worker executes: posted until their owner has acted, and taken from there by it."""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import cast

import structlog

from bough.v1 import agent_service_pb2, event_pb2
from bough_server import events
from bough_server.errors import CallError
from bough_server.runs.equipment import Equipment
from bough_server.runs.following import Pages
from bough_server.store.owners import Letter
from bough_server.store.ports import RunRecord

_log = structlog.get_logger(__name__)

Act = Callable[[RunRecord, Letter], Awaitable[None]]
"""Carries a command out on a run that this worker executes, or that nobody does."""


class Letters:
    """This worker's way to runs of others, and theirs to its own."""

    def __init__(self, equipment: Equipment) -> None:
        self._equipment = equipment

    async def cancel(self, record: RunRecord, reason: event_pb2.CancelReason.ValueType) -> None:
        """Asks the owner to end a run, and waits until the wish is in its log."""
        run_id = record.run.run_id
        await self._equipment.mailbox.post(Letter(letter_id=0, run_id=run_id, cancel=reason))
        await self._until(run_id, after=record.run.last_sequence, kinds={events.CANCEL_REQUESTED})

    async def answer(self, record: RunRecord, request: agent_service_pb2.ResumeRunRequest, user_id: str) -> None:
        """Gives the owner of a run answers that fit, and waits until some are in its log."""
        run_id = record.run.run_id
        await self._equipment.mailbox.post(Letter(letter_id=0, run_id=run_id, answers=request, user_id=user_id))
        await self._until(run_id, after=record.run.last_sequence, kinds={events.INPUT_RECEIVED})

    async def read(self, act: Act) -> None:
        """Carries out what comes, for ever. What cannot be carried out any more is dropped."""
        async for run_id in self._equipment.mailbox.arrivals():
            record = await self._equipment.index.find(run_id)
            if record is None or record.owner != self._equipment.worker:
                continue
            for letter in await self._equipment.mailbox.take(run_id):
                try:
                    await act(record, letter)
                except CallError as error:
                    _log.warning("command dropped", run_id=run_id, error=error.message)
                await self._equipment.mailbox.done(letter.letter_id)

    async def _until(self, run_id: str, *, after: int, kinds: Iterable[int]) -> None:
        """Waits for an event of these kinds that is not there yet, or the end of the run."""
        wanted = {*kinds, *events.TERMINAL_KINDS}
        tail = cast(Pages, self._equipment.log.tail(run_id, after=after))
        async with aclosing(tail):
            async for page in tail:
                if any(stored.kind in wanted for stored in page):
                    return
