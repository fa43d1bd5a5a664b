"""A run that this process executes: its task, its bounds in time, its followers, its end; not which runs there are."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from bough.v1 import error_pb2, event_pb2, policy_pb2
from bough_server.endings import why_ended
from bough_server.errors import Fenced, RunError, ServerStopping, StorageFailed
from bough_server.runtime.dispatcher import dispatch_root
from bough_server.runtime.execution import Execution
from bough_server.store.ports import RunRecord

_log = structlog.get_logger(__name__)

FIRST_FOLLOWER_SECONDS: Final = 30.0
"""How long a new run waits for its first follower, whatever its disconnect grace."""

Bound = tuple[float, event_pb2.CancelReason.ValueType]
"""Seconds after which a run ends by itself, and why."""


class LiveRun:
    """A run while it goes; `on_end` is told when it is let go."""

    def __init__(self, record: RunRecord, execution: Execution, *, on_end: Callable[[str], None]) -> None:
        self.record = record
        self.execution = execution
        self.task: asyncio.Task[None] | None = None
        self._policy = execution.facts.started.run_started.policy
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self.grace: asyncio.TimerHandle | None = None
        """Runs out when nobody has followed for the policy's grace; None while somebody does."""
        self._followers = 0
        self._needs_followers = self._policy.on_disconnect == policy_pb2.ON_DISCONNECT_CANCEL

    @property
    def run_id(self) -> str:
        """The run."""
        return self.record.run.run_id

    def launch(self, bounds: Iterable[Bound]) -> None:
        """Begins; the run ends by itself at the first of its bounds."""
        loop = asyncio.get_running_loop()
        self.task = loop.create_task(self._supervise(), name=f"run:{self.run_id}")
        for seconds, reason in bounds:
            self._timers.append(loop.call_later(max(0.0, seconds), self.end_soon, reason))
        self._await_follower(max(self._grace_seconds(), FIRST_FOLLOWER_SECONDS))

    def joined(self) -> None:
        """Somebody follows."""
        self._followers += 1
        self._stop_waiting()

    def left(self) -> None:
        """Somebody follows no more."""
        self._followers -= 1
        if self._followers == 0:
            self._await_follower(self._grace_seconds())

    def keep_going(self) -> None:
        """From now on nobody following is no reason to end: the server stops, or the run is over."""
        self._needs_followers = False
        self._stop_waiting()

    def end_soon(self, reason: event_pb2.CancelReason.ValueType) -> None:
        """Records the wish to end now, and leaves the rest to a task of the run's."""
        root = self.execution.facts.started.invocation_id
        if self._ending is None and self.execution.wish("", caller=root, reason=reason):
            error, below = why_ended(reason)
            self._ending = asyncio.get_running_loop().create_task(self.execution.end("", error, below))

    async def end(self, reason: event_pb2.CancelReason.ValueType) -> bool:
        """Asks the run to end; gives whether that is on disk: it is not where the run stopped unrecorded, and is over.

        Raises Fenced and ServerStopping.
        """
        self.end_soon(reason)
        try:
            await self.execution.committed()
        except StorageFailed:
            assert self.task is not None, "a run that is found has begun"
            await asyncio.wait({self.task})
            return False
        return True

    def _grace_seconds(self) -> float:
        return self._policy.disconnect_grace.ToTimedelta().total_seconds()

    def _await_follower(self, seconds: float) -> None:
        if self._needs_followers:
            loop = asyncio.get_running_loop()
            self.grace = loop.call_later(seconds, self.end_soon, event_pb2.CANCEL_REASON_DISCONNECTED)

    def _stop_waiting(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    async def _supervise(self) -> None:
        """Runs a run to its end, whatever it is, and lets go of it."""
        try:
            await self._execute()
        except (StorageFailed, Fenced, ServerStopping) as error:
            _log.error("run stopped unrecorded", run_id=self.run_id, error=error.message)
        except Exception as error:
            _log.error("run ended by a defect", run_id=self.run_id, exc_info=error)
            await self._end_broken()
        finally:
            self._let_go()

    async def _execute(self) -> None:
        """Runs a run to its end; who ends it from outside is waited for. Raises what stopped the run unrecorded."""
        try:
            await self.execution.finish(dispatch_root(self.execution))
        except BaseException:
            if self._ending is not None:
                await asyncio.gather(self._ending, return_exceptions=True)
            raise
        if self._ending is not None:
            await self._ending

    async def _end_broken(self) -> None:
        """Ends a run that a defect of the server's stopped, so that its log is whole."""
        error = RunError(
            "The server failed at this run; its own log says how.", reason=error_pb2.ERROR_REASON_INTERNAL
        ).to_agent_error()
        try:
            self.execution.close("", error, error)
            await self.execution.committed()
        except Exception as failed:
            _log.error("run stopped unrecorded", run_id=self.run_id, exc_info=failed)

    def _let_go(self) -> None:
        self.keep_going()
        for timer in self._timers:
            timer.cancel()
        self.execution.end_spans()
        self._on_end(self.run_id)
