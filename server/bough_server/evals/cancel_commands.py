"""Cancellations between workers: send them to the owner of an evaluation, and carry out those sent to this worker's."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, cast

import structlog

from bough.v1 import event_pb2
from bough_server import evaluation_events
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.runs.recovery import retry_until_stored
from bough_server.store.ports.evaluations import EvaluationRecord
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.workers import RunCommand

_STOPS: Final = evaluation_events.TERMINAL_KINDS | {evaluation_events.EVALUATION_CANCEL_REQUESTED}

_log = structlog.get_logger(__name__)


class CancelCommands:
    """Sends cancellations to other workers, and receives those of others, through the mailbox.

    `cancel` cancels an evaluation that this worker executes, or that no worker does.
    """

    def __init__(
        self,
        dependencies: EvaluationDependencies,
        *,
        cancel: Callable[[EvaluationRecord, event_pb2.CancelRequested], Awaitable[None]],
        is_elsewhere: Callable[[EvaluationRecord], Awaitable[bool]],
    ) -> None:
        self._dependencies, self._cancel, self._is_elsewhere = dependencies, cancel, is_elsewhere

    async def send(self, record: EvaluationRecord, request: event_pb2.CancelRequested) -> None:
        """Ask the owner to end an evaluation, and wait until the request, or the end, is in its log.

        Raises Fenced if it has ended, and StorageFailed.
        """
        store, evaluation_id = self._dependencies.store, record.evaluation.evaluation_id
        await store.mailbox.post(RunCommand(command_id=0, run_id=evaluation_id, cancel=request))
        tail = store.log.tail(evaluation_id, after=record.evaluation.last_sequence)
        async with aclosing(cast(AsyncGenerator[Sequence[StoredEvent], None], tail)) as pages:
            async for page in pages:
                if any(stored.kind in _STOPS for stored in page):
                    return

    async def read(self) -> None:
        """Carry out commands to evaluations that no other live worker executes, until the store closes."""
        await retry_until_stored(self._dependencies.clock, self._carry_out_all)

    async def _carry_out_all(self) -> None:
        """Carry out commands as they arrive. Raises ServerStopping, and StorageFailed if it cannot begin."""
        async for evaluation_id in self._dependencies.store.mailbox.arrivals():
            try:
                await retry_until_stored(self._dependencies.clock, partial(self._carry_out, evaluation_id))
            except Exception as error:  # one bad evaluation must not keep commands from the others
                _log.error("commands of an evaluation not carried out", evaluation_id=evaluation_id, exc_info=error)

    async def _carry_out(self, evaluation_id: str) -> None:
        """Carry out an evaluation's pending commands, of which only cancellations have a meaning.

        Commands to runs arrive as well, and are left to their reader. Raises ServerStopping and StorageFailed, after
        which the commands are still pending.
        """
        store = self._dependencies.store
        record = await store.evaluations.find(evaluation_id)
        if record is None or await self._is_elsewhere(record):
            return
        for command in await store.mailbox.take(evaluation_id):
            if command.cancel is not None:
                await self._cancel(record, command.cancel)
            await store.mailbox.done(command.command_id)
