"""Commands between workers: send them to the owner of a log, and carry out those sent to this worker's logs."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, Generic, TypeVar, cast

import structlog

from bough_server.clock import Clock
from bough_server.errors import CallError, Fenced, ServerStopping, StorageFailed
from bough_server.ownership.background import retry_until_stored
from bough_server.store.ports.log import EventLog, StoredEvent
from bough_server.store.ports.workers import Mailbox, RunCommand

PENDING_SECONDS: Final = 1.0
"""Seconds between two checks whether a command is still pending; its owner may have dropped it."""

Row = TypeVar("Row")
"""The row of a log: of a run or an evaluation."""

_log = structlog.get_logger(__name__)


class CommandSender:
    """Sends commands to the owners of logs."""

    def __init__(self, mailbox: Mailbox, log: EventLog) -> None:
        self._mailbox, self._log = mailbox, log

    async def send(self, command: RunCommand, *, after: int, is_done: Callable[[StoredEvent], bool]) -> bool:
        """Post a command, and wait until the log holds an event after a sequence that `is_done` accepts.

        Return False if it never will: the owner deletes a command whose events are committed, and one that it drops.
        Raises Fenced if the log has ended, and StorageFailed.
        """
        log_id = command.run_id
        command_id = await self._mailbox.post(command)
        found = asyncio.ensure_future(self._wait_for_event(log_id, after=after, is_done=is_done))
        try:
            while not (await asyncio.wait({found}, timeout=PENDING_SECONDS))[0]:
                if all(pending.command_id != command_id for pending in await self._mailbox.take(log_id)):
                    return await self._is_recorded(log_id, after=after, is_done=is_done)
            found.result()
            return True
        finally:
            found.cancel()
            await asyncio.wait({found})

    async def _is_recorded(self, log_id: str, *, after: int, is_done: Callable[[StoredEvent], bool]) -> bool:
        while page := await self._log.read(log_id, after=after, deltas=False):
            if any(is_done(stored) for stored in page):
                return True
            after = page[-1].sequence
        return False

    async def _wait_for_event(self, log_id: str, *, after: int, is_done: Callable[[StoredEvent], bool]) -> None:
        tail = cast(AsyncGenerator[Sequence[StoredEvent], None], self._log.tail(log_id, after=after))
        async with aclosing(tail):
            async for page in tail:
                if any(is_done(stored) for stored in page):
                    return


class CommandReader(Generic[Row]):
    """Carries out commands of other workers to logs of one kind: `kind` is "run" or "evaluation".

    `find` returns the row of such a log, or None for an id of the other kind: its commands are left to its reader.
    `act` carries out a command to a log that no other live worker executes.
    """

    def __init__(
        self,
        kind: str,
        mailbox: Mailbox,
        clock: Clock,
        *,
        find: Callable[[str], Awaitable[Row | None]],
        is_elsewhere: Callable[[Row], Awaitable[bool]],
        act: Callable[[Row, RunCommand], Awaitable[None]],
    ) -> None:
        self._kind, self._mailbox, self._clock = kind, mailbox, clock
        self._find, self._is_elsewhere, self._act = find, is_elsewhere, act

    async def read(self) -> None:
        """Carry out commands until the store closes."""
        await retry_until_stored(self._clock, self._carry_out_all)

    async def _carry_out_all(self) -> None:
        """Carry out commands as they arrive. Raises ServerStopping, and StorageFailed if it cannot begin."""
        async for log_id in self._mailbox.arrivals():
            try:
                await retry_until_stored(self._clock, partial(self._carry_out, log_id))
            except Exception as error:  # one bad log must not keep commands from the others
                _log.error("commands not carried out", exc_info=error, **self._log_fields(log_id))

    async def _carry_out(self, log_id: str) -> None:
        """Carry out a log's pending commands, dropping those that are no longer possible or fail unexpectedly.

        Raises ServerStopping and StorageFailed, after which the commands are still pending.
        """
        row = await self._find(log_id)
        if row is None or await self._is_elsewhere(row):
            return
        for command in await self._mailbox.take(log_id):
            try:
                await self._act(row, command)
            except (ServerStopping, StorageFailed):  # both are CallErrors, but temporary: keep the command
                raise
            except (CallError, Fenced) as error:
                _log.warning("command dropped", error=str(error), **self._log_fields(log_id))
            except Exception as error:  # kept, it would fail again and hold up those after it
                _log.error("command failed, and is dropped", exc_info=error, **self._log_fields(log_id))
            await self._mailbox.delete_command(command.command_id)

    def _log_fields(self, log_id: str) -> dict[str, str]:
        return {f"{self._kind}_id": log_id}
