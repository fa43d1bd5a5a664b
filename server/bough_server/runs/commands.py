"""Commands between workers: send them to the owner of a run, and carry out those sent to this worker's runs."""

from collections.abc import Awaitable, Callable

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.log import events
from bough_server.ownership.mailbox import CommandReader, CommandSender
from bough_server.runs.dependencies import RunDependencies
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import RunRow
from bough_server.store.ports.workers import RunCommand

Act = Callable[[RunRow, RunCommand], Awaitable[None]]
"""Carries out a command on a run that this worker executes, or that no worker does."""


class RemoteCommands:
    """Sends commands to other workers, and receives the commands of others, through the mailbox."""

    def __init__(self, dependencies: RunDependencies) -> None:
        self._dependencies = dependencies
        self._sender = CommandSender(dependencies.store.mailbox, dependencies.store.log)

    async def cancel(self, run_row: RunRow, request: event_pb2.CancelRequested) -> bool:
        """Ask the owner to end a run, and wait until the request is in its log; return False if the owner dropped it.

        Raises Fenced if the run has ended.
        """
        run_id = run_row.run.run_id
        command = RunCommand(command_id=0, run_id=run_id, cancel=request)
        return await self._sender.send(command, after=run_row.run.last_sequence, is_done=_cancels_run)

    async def answer(
        self,
        run_row: RunRow,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        user_id: str,
        deadline_time_ns: int | None,
    ) -> None:
        """Send checked answers to the owner of a run, and wait until its log holds an answer or its end.

        Returns too if the owner dropped them.
        """
        run_id = run_row.run.run_id
        command = RunCommand(
            command_id=0, run_id=run_id, answers=request, user_id=user_id, deadline_time_ns=deadline_time_ns
        )
        await self._sender.send(command, after=run_row.run.last_sequence, is_done=_answers_run)

    async def serve(self, act: Act, is_elsewhere: Callable[[RunRow], Awaitable[bool]]) -> None:
        """Carry out commands to runs that no other live worker executes, until the store closes."""
        store = self._dependencies.store
        reader = CommandReader(
            "run", store.mailbox, self._dependencies.clock, find=store.runs.find, is_elsewhere=is_elsewhere, act=act
        )
        await reader.read()


def _answers_run(stored: StoredEvent) -> bool:
    """Return whether an event answers its run, or ends it."""
    return stored.kind == events.INPUT_RECEIVED or stored.kind in events.TERMINAL_KINDS


def _cancels_run(stored: StoredEvent) -> bool:
    """Return whether an event ends its run or cancels it, and not only a part of it."""
    if stored.kind == events.CANCEL_REQUESTED:
        return not events.parse(stored.data).cancel_requested.effect_scope
    return stored.kind in events.TERMINAL_KINDS
