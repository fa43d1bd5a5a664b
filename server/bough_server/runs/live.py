"""A run that this process executes: its task, its time bounds, its followers and its end."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Final

import structlog

from bough.v1 import agent_pb2, event_pb2, execution_pb2, policy_pb2
from bough_server.clock import loop_time
from bough_server.engine.execution import Execution
from bough_server.errors import Fenced, NonDeterministic, ServerStopping, StorageFailed
from bough_server.history.session import SessionHistory
from bough_server.observability.metrics import Metrics
from bough_server.runs.close import Bound, build_end_errors, wall_owner
from bough_server.runtime.agent import Resolver
from bough_server.runtime.context import LaneContext
from bough_server.runtime.dispatcher import dispatch_root
from bough_server.store.ports.runs import RunRow
from bough_server.store.ports.sessions import SessionPosition

_log = structlog.get_logger(__name__)

FIRST_FOLLOWER_SECONDS: Final = 30.0
"""Seconds that a new run waits at least for its first follower, even if its disconnect grace is shorter."""

REMOTE_FOLLOWER_SECONDS: Final = 15.0
"""How long a follower at another server counts after its last report."""


class LiveRun:
    """A live run. `on_end` is called when its task ends, with the exception that stopped the run, if any."""

    def __init__(
        self,
        run_row: RunRow,
        execution: Execution,
        resolver: Resolver,
        *,
        is_queued: bool,
        on_end: "Callable[[LiveRun, BaseException | None], None]",
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics
        self.run_row = run_row
        self.has_waited = is_queued
        """True if it had to wait for its session."""
        self.execution = execution
        self._resolver = resolver
        self.task: asyncio.Task[None] | None = None
        self._policy = execution.policy
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self._is_cancel_recorded = False
        self._may_start = asyncio.Event()
        self._wall: Sequence[Bound] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self.grace: asyncio.TimerHandle | None = None
        """Ends the run once it has had no follower for the policy's grace; None while it is followed."""
        self._followers = 0
        self._followed_until = 0.0
        """The time, by the event loop's clock, at which followers at other servers count as gone."""
        self._needs_followers = self._policy.on_disconnect == policy_pb2.DISCONNECT_POLICY_CANCEL

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.run_row.run.run_id

    @property
    def session_key(self) -> tuple[str, str]:
        """Ids of its tenant and its session."""
        return self.run_row.principal.tenant_id, self.run_row.run.session_id

    @property
    def is_waiting(self) -> bool:
        """True while it waits for its session."""
        return not self._may_start.is_set()

    @property
    def is_over(self) -> bool:
        """True if no effect starts in it any more: it is ending, waits for input, or has stopped."""
        return self.execution.cancellation.is_closed("")

    async def wait_for_end(self) -> None:
        """Wait until its task has ended."""
        assert self.task is not None, "a registered run has been launched"
        await asyncio.wait({self.task})  # unlike await, raises no exception of the task

    def launch(self, deadline: Iterable[Bound], wall: Sequence[Bound]) -> None:
        """Start the run's task, which waits for the session if the run is queued.

        The run is cancelled at its deadline, and when its wall_duration, counted from when it leaves the queue, is up.
        """
        self._wall = wall
        self._start_timers(deadline)
        if not self.has_waited:
            self._start_timers(wall)
            self._may_start.set()
        self.task = asyncio.get_running_loop().create_task(self._supervise(), name=f"run:{self.run_id}")
        if not self._followers:
            self._start_grace(max(self._grace_seconds(), FIRST_FOLLOWER_SECONDS))

    def _start_timers(self, bounds: Iterable[Bound]) -> None:
        loop = asyncio.get_running_loop()
        for seconds, reason in bounds:
            request = event_pb2.CancelRequested(reason=reason)
            self._timers.append(loop.call_later(max(0.0, seconds), self.end_soon, request))

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """Definition of its root agent."""
        return self._resolver.agents[self.execution.facts.started.run_started.agent].definition

    def begin(self, position: SessionPosition, session: SessionHistory, *, starts_with: str) -> None:
        """Start a queued run, which holds its session now, with the session's messages and state.

        `starts_with` is the member that its root starts with, empty for the usual start.
        """
        if self.is_waiting and self._ending is None:
            event = self.execution.invocations.root().event("")
            event.run_dequeued.session_cut, event.run_dequeued.state_json = position.position, position.state_json
            event.run_dequeued.starts_with = starts_with
            self.execution.writer.append(event)
            self.execution.session, self.execution.state_json = session, position.state_json
            self.execution.starts_with = starts_with
            self._start_timers(self._wall)
            self._may_start.set()

    def set_followers(self, followers: int) -> None:
        """Set the number of streams that follow the run."""
        had, self._followers = self._followers, followers
        if followers:
            self._cancel_grace()
        elif had:
            self._start_grace(self._grace_seconds())

    def count_remote_follower(self) -> None:
        """Count a follower at another server, which repeats its notification as long as it follows."""
        self._followed_until = loop_time() + REMOTE_FOLLOWER_SECONDS
        if not self._followers:
            self._cancel_grace()
            self._start_grace(self._grace_seconds())

    def ignore_disconnects(self) -> None:
        """Disable the disconnect policy: the server stops, or the run is over."""
        self._needs_followers = False
        self._cancel_grace()

    def drain(self) -> None:
        """Start no more effects: stop a queued run at once, any other when its effects in flight have ended."""
        self.ignore_disconnects()
        if self.is_waiting:
            self.stop(ServerStopping("The server is stopping; another one will continue the run."))
        else:
            self.execution.drain()

    def stop(self, error: BaseException) -> None:
        """Stop the run where it is, without recording an end; a queued run stops waiting for its session."""
        self.execution.stop(error)
        self._may_start.set()

    def end_soon(self, request: event_pb2.CancelRequested) -> None:
        """Record a cancel request and end the run in a task; during replay, the request is recorded once it is over."""
        if self._ending is not None or self.execution.is_interrupted:
            return
        is_recorded = self.execution.barrier.live and self._request_cancel(request)
        if is_recorded or not self.execution.barrier.live:
            self.execution.barrier.hold()
            self._ending = asyncio.get_running_loop().create_task(self._end(request, is_recorded=is_recorded))
            self._may_start.set()  # a queued run must stop waiting for its session to be ended

    async def end(self, request: event_pb2.CancelRequested) -> bool:
        """Cancel the run and wait until the request is on disk; return False if the run stopped without recording it.

        Raises Fenced.
        """
        self.end_soon(request)
        assert self.task is not None, "a registered run has been launched"
        if not self.execution.barrier.live:
            await self.wait_for_replay()
            await asyncio.sleep(0)  # lets _end, which waits for the same event, record the request first
        try:
            await self.execution.writer.wait_for_commit()
        except (StorageFailed, ServerStopping):
            await asyncio.wait({self.task})
            return False
        return self._is_cancel_recorded

    async def wait_for_replay(self) -> None:
        """Wait until replay is over, or the run is."""
        assert self.task is not None, "a registered run has been launched"
        lived = asyncio.ensure_future(self.execution.barrier.lived.wait())
        await asyncio.wait({self.task, lived}, return_when=asyncio.FIRST_COMPLETED)
        lived.cancel()

    def _request_cancel(self, request: event_pb2.CancelRequested) -> bool:
        root = self.execution.facts.started.invocation_id
        self._is_cancel_recorded = (
            self.execution.cancellation.request_cancel(request, caller=root) or self._is_cancel_recorded
        )
        return self._is_cancel_recorded

    async def _end(self, request: event_pb2.CancelRequested, *, is_recorded: bool) -> None:
        if not is_recorded:
            await self.execution.barrier.lived.wait()
            is_recorded = self._request_cancel(request)
        if is_recorded:
            started = self.execution.facts.started.run_started
            owner = wall_owner(self._policy.limits, self._resolver.agents[started.agent].definition)
            await self.execution.cancellation.end("", *build_end_errors(request.reason, owner))
            self.execution.conclude()

    def _grace_seconds(self) -> float:
        return self._policy.disconnect_grace.ToTimedelta().total_seconds()

    def _start_grace(self, seconds: float) -> None:
        if self._needs_followers:
            loop = asyncio.get_running_loop()
            request = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_DISCONNECTED)
            self.grace = loop.call_at(max(loop_time(), self._followed_until) + seconds, self.end_soon, request)

    def _cancel_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    async def _supervise(self) -> None:
        """Execute the run, and clean up however it ends."""
        stopped: BaseException | None = None
        try:
            await self._may_start.wait()
            with self._metrics.run_active() if self._metrics is not None else nullcontext():
                await self._execute()
        except ServerStopping as error:
            stopped = error
        except (StorageFailed, Fenced) as error:
            _log.warning("run stopped unrecorded", run_id=self.run_id, error=error.message)
            stopped = error
        except NonDeterministic as error:
            _log.error("run cannot be replayed", run_id=self.run_id, error=error.message)
            stopped = error
        except Exception as error:
            _log.error("run stopped by a defect of the server", run_id=self.run_id, exc_info=error)
            stopped = error
        finally:
            self._clean_up(stopped)

    async def _execute(self) -> None:
        """Run the root agent to its end, and wait for a task that ends the run from outside.

        Raises the error that stopped the run, if it was not recorded.
        """
        try:
            await self.execution.finish(dispatch_root(self.execution, self._resolver, LaneContext))
            await self.execution.writer.wait_for_commit()
        except ServerStopping:
            await self.execution.writer.wait_for_commit()  # followers must see all events recorded until now
            raise
        finally:
            if self._ending is not None:
                if not self.execution.barrier.live:
                    self._ending.cancel()  # it waits for the end of a replay that stopped
                await asyncio.gather(self._ending, return_exceptions=True)

    def _clean_up(self, stopped: BaseException | None) -> None:
        self.ignore_disconnects()
        for timer in self._timers:
            timer.cancel()
        self.execution.end_spans()
        self._on_end(self, stopped)
