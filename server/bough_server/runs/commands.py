"""Commands between workers: send them to the owner of a run, and carry out those sent to this worker's runs."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, cast

import structlog

from bough.v1 import agent_service_pb2, event_pb2
from bough_server import events
from bough_server.errors import CallError, Fenced, ServerStopping, StorageFailed
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.follow import Pages
from bough_server.runs.recovery import retry_until_stored
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import RunRecord
from bough_server.store.ports.workers import RunCommand

PENDING_SECONDS: Final = 1.0
"""Seconds between two looks at whether a command is still pending; its owner may have dropped it."""

_log = structlog.get_logger(__name__)

Act = Callable[[RunRecord, RunCommand], Awaitable[None]]
"""Carries out a command on a run that this worker executes, or that no worker does."""


class RemoteCommands:
    """Sends commands to other workers, and receives the commands of others, through the mailbox."""

    def __init__(self, dependencies: RunDependencies) -> None:
        self._dependencies = dependencies

    async def cancel(self, record: RunRecord, request: event_pb2.CancelRequested) -> bool:
        """Ask the owner to end a run, and wait until the request is in its log; return False if the owner dropped it.

        Raises Fenced if the run has ended.
        """
        run_id = record.run.run_id
        return await self._send(RunCommand(command_id=0, run_id=run_id, cancel=request), record, _cancels_run)

    async def answer(
        self,
        record: RunRecord,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        user_id: str,
        deadline_time_ns: int | None,
    ) -> None:
        """Send checked answers to the owner of a run, and wait until its log holds an answer or its end.

        Returns too if the owner dropped them.
        """
        run_id = record.run.run_id
        command = RunCommand(
            command_id=0, run_id=run_id, answers=request, user_id=user_id, deadline_time_ns=deadline_time_ns
        )
        await self._send(command, record, _answers_run)

    async def read(self, act: Act, is_elsewhere: Callable[[RunRecord], Awaitable[bool]]) -> None:
        """Carry out commands to runs that no other live worker executes, until the store closes."""
        await retry_until_stored(self._dependencies.clock, partial(self._carry_out_all, act, is_elsewhere))

    async def _carry_out_all(self, act: Act, is_elsewhere: Callable[[RunRecord], Awaitable[bool]]) -> None:
        """Carry out commands as they arrive. Raises ServerStopping, and StorageFailed if it cannot begin."""
        async for run_id in self._dependencies.store.mailbox.arrivals():
            carry_out = partial(self._carry_out, run_id, act, is_elsewhere)
            try:
                await retry_until_stored(self._dependencies.clock, carry_out)
            except Exception as error:  # one bad run must not keep commands from the others
                _log.error("commands of a run not carried out", run_id=run_id, exc_info=error)

    async def _carry_out(self, run_id: str, act: Act, is_elsewhere: Callable[[RunRecord], Awaitable[bool]]) -> None:
        """Carry out a run's pending commands, dropping those that are no longer possible or fail unexpectedly.

        Commands to evaluations arrive as well, and are left to their reader: no run with such an id is found.
        Raises ServerStopping and StorageFailed, after which the commands are still pending.
        """
        record = await self._dependencies.store.runs.find(run_id)
        if record is None or await is_elsewhere(record):
            return
        for command in await self._dependencies.store.mailbox.take(run_id):
            try:
                await act(record, command)
            except (ServerStopping, StorageFailed):  # both are CallErrors, but temporary: keep the command
                raise
            except (CallError, Fenced) as error:
                _log.warning("command dropped", run_id=run_id, error=str(error))
            except Exception as error:  # kept, it would fail again and hold up those after it
                _log.error("command failed, and is dropped", run_id=run_id, exc_info=error)
            await self._dependencies.store.mailbox.done(command.command_id)

    async def _send(self, command: RunCommand, record: RunRecord, is_done: Callable[[StoredEvent], bool]) -> bool:
        """Post a command, and wait until the log holds such an event or the run's end; return False if it never will.

        The owner deletes a command whose events are committed, and one that it drops.
        """
        mailbox, run_id, after = self._dependencies.store.mailbox, command.run_id, record.run.last_sequence
        command_id = await mailbox.post(command)
        found = asyncio.ensure_future(self._until(run_id, after=after, is_done=is_done))
        try:
            while not (await asyncio.wait({found}, timeout=PENDING_SECONDS))[0]:
                if all(pending.command_id != command_id for pending in await mailbox.take(run_id)):
                    return await self._is_recorded(run_id, after=after, is_done=is_done)
            found.result()
            return True
        finally:
            found.cancel()
            await asyncio.wait({found})

    async def _is_recorded(self, run_id: str, *, after: int, is_done: Callable[[StoredEvent], bool]) -> bool:
        while page := await self._dependencies.store.log.read(run_id, after=after, deltas=False):
            if any(stored.kind in events.TERMINAL_KINDS or is_done(stored) for stored in page):
                return True
            after = page[-1].sequence
        return False

    async def _until(self, run_id: str, *, after: int, is_done: Callable[[StoredEvent], bool]) -> None:
        """Wait for such an event after a sequence, or for the end of the run."""
        tail = cast(Pages, self._dependencies.store.log.tail(run_id, after=after))
        async with aclosing(tail):
            async for page in tail:
                if any(stored.kind in events.TERMINAL_KINDS or is_done(stored) for stored in page):
                    return


def _answers_run(stored: StoredEvent) -> bool:
    return stored.kind == events.INPUT_RECEIVED


def _cancels_run(stored: StoredEvent) -> bool:
    """Return whether an event cancels its run, and not only a part of it."""
    return stored.kind == events.CANCEL_REQUESTED and not events.parse(stored.data).cancel_requested.effect_scope
