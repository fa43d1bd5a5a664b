"""A run that this process executes: its task, its bounds in time, its followers, its end; not which runs there are."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Final

import structlog

from bough.v1 import event_pb2, execution_pb2, policy_pb2
from bough_server.engine.execution import Execution
from bough_server.errors import Fenced, NonDeterministic, ServerStopping, StorageFailed
from bough_server.metrics import Metrics
from bough_server.runs.close import Bound, wall_owner, why_ended
from bough_server.runtime.agent import Resolver
from bough_server.runtime.context import LaneContext
from bough_server.runtime.dispatcher import dispatch_root
from bough_server.store.ports import RunRecord, SessionCut, StoredMessage

_log = structlog.get_logger(__name__)

FIRST_FOLLOWER_SECONDS: Final = 30.0
"""How long a new run waits for its first follower, whatever its disconnect grace."""


class LiveRun:
    """A run while it goes; `on_end` is told when it is let go, and what stopped it, if it has not ended itself."""

    def __init__(
        self,
        record: RunRecord,
        execution: Execution,
        resolver: Resolver,
        *,
        is_queued: bool,
        on_end: "Callable[[LiveRun, BaseException | None], None]",
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics
        self.record = record
        self.has_waited = is_queued
        """Whether it had to wait for its session."""
        self.execution = execution
        self._resolver = resolver
        self.task: asyncio.Task[None] | None = None
        self._policy = execution.policy
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self._is_wished = False
        self._turn = asyncio.Event()
        self._wall: Sequence[Bound] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self.grace: asyncio.TimerHandle | None = None
        """Runs out when nobody has followed for the policy's grace; None while somebody does."""
        self._followers = 0
        self._needs_followers = self._policy.on_disconnect == policy_pb2.DISCONNECT_POLICY_CANCEL

    @property
    def run_id(self) -> str:
        """The run."""
        return self.record.run.run_id

    @property
    def session_key(self) -> tuple[str, str]:
        """Its tenant and session."""
        return self.record.principal.tenant_id, self.record.run.session_id

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its session."""
        return not self._turn.is_set()

    @property
    def is_over(self) -> bool:
        """Whether nothing begins in it any more: it is ending, waits for input, or has stopped."""
        return self.execution.cancelling.is_sealed("")

    async def over(self) -> None:
        """Waits until it is let go."""
        assert self.task is not None, "a run that is found has begun"
        await asyncio.wait({self.task})

    def launch(self, deadline: Iterable[Bound], wall: Sequence[Bound]) -> None:
        """Begins, or waits for its turn; ends by itself at its deadline, or when its time on the wall is up."""
        self._wall = wall
        self._bound(deadline)
        if not self.has_waited:
            self._bound(wall)
            self._turn.set()
        self.task = asyncio.get_running_loop().create_task(self._supervise(), name=f"run:{self.run_id}")
        if not self._followers:
            self._await_follower(max(self._grace_seconds(), FIRST_FOLLOWER_SECONDS))

    def _bound(self, bounds: Iterable[Bound]) -> None:
        loop = asyncio.get_running_loop()
        for seconds, reason in bounds:
            request = event_pb2.CancelRequested(reason=reason)
            self._timers.append(loop.call_later(max(0.0, seconds), self.end_soon, request))

    def begin(self, cut: SessionCut, session: "Iterable[StoredMessage]") -> None:
        """The run's turn: the session is its own now, with what was said and kept before."""
        if self.is_waiting and self._ending is None:
            event = self.execution.invocations.root().event("")
            event.run_dequeued.session_cut, event.run_dequeued.state_json = cut.position, cut.state_json
            self.execution.writer.append(event)
            self.execution.session, self.execution.state_json = tuple(session), cut.state_json
            self._bound(self._wall)
            self._turn.set()

    def followed_by(self, followers: int) -> None:
        """So many streams follow the run now."""
        had, self._followers = self._followers, followers
        if followers:
            self._stop_waiting()
        elif had:
            self._await_follower(self._grace_seconds())

    def keep_going(self) -> None:
        """From now on nobody following is no reason to end: the server stops, or the run is over."""
        self._needs_followers = False
        self._stop_waiting()

    def drain(self) -> None:
        """Begins nothing new: what waits for its turn stops at once, what goes on when its effects have ended."""
        self.keep_going()
        if self.is_waiting:
            self.execution.stop(ServerStopping("The server stops; the run waits on where it is taken up."))
            self._turn.set()
        else:
            self.execution.drain()

    def end_soon(self, request: event_pb2.CancelRequested) -> None:
        """Records the wish to end now, or as soon as the log is handed back, and leaves the rest to a task."""
        if self._ending is not None or self.execution.is_interrupted:
            return
        is_wished = self.execution.pump.live and self._wish(request)
        if is_wished or not self.execution.pump.live:
            self.execution.pump.hold()
            self._ending = asyncio.get_running_loop().create_task(self._end(request, is_wished=is_wished))
            self._turn.set()

    async def end(self, request: event_pb2.CancelRequested) -> bool:
        """Asks the run to end; gives whether that is on disk: it is not where the run stopped without it, and is over.

        Raises Fenced.
        """
        self.end_soon(request)
        assert self.task is not None, "a run that is found has begun"
        if not self.execution.pump.live:
            await self.lived()
            await asyncio.sleep(0)  # the wish follows as soon as the log is handed back
        try:
            await self.execution.writer.committed()
        except (StorageFailed, ServerStopping):
            await asyncio.wait({self.task})
            return False
        return self._is_wished

    async def lived(self) -> None:
        """Waits until the log is handed back, or the run is over."""
        assert self.task is not None, "a run that is found has begun"
        lived = asyncio.ensure_future(self.execution.pump.lived.wait())
        await asyncio.wait({self.task, lived}, return_when=asyncio.FIRST_COMPLETED)
        lived.cancel()

    def _wish(self, request: event_pb2.CancelRequested) -> bool:
        root = self.execution.facts.started.invocation_id
        self._is_wished = self.execution.cancelling.wish(request, caller=root) or self._is_wished
        return self._is_wished

    async def _end(self, request: event_pb2.CancelRequested, *, is_wished: bool) -> None:
        if not is_wished:
            await self.execution.pump.lived.wait()
            is_wished = self._wish(request)
        if is_wished:
            started = self.execution.facts.started.run_started
            owner = wall_owner(self._policy.limits, self._resolver.agent(started.agent).definition)
            await self.execution.cancelling.end("", *why_ended(request.reason, owner))
            self.execution.ended()

    def _grace_seconds(self) -> float:
        return self._policy.disconnect_grace.ToTimedelta().total_seconds()

    def _await_follower(self, seconds: float) -> None:
        if self._needs_followers:
            loop = asyncio.get_running_loop()
            request = event_pb2.CancelRequested(reason=execution_pb2.CANCEL_REASON_DISCONNECTED)
            self.grace = loop.call_later(seconds, self.end_soon, request)

    def _stop_waiting(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    async def _supervise(self) -> None:
        """Runs a run to its end, whatever it is, and lets go of it."""
        stopped: BaseException | None = None
        try:
            await self._turn.wait()
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
            _log.error("run ended by a defect", run_id=self.run_id, exc_info=error)
            stopped = error
        finally:
            self._let_go(stopped)

    async def _execute(self) -> None:
        """Runs a run to its end; who ends it from outside is waited for. Raises what stopped the run unrecorded."""
        try:
            await self.execution.finish(dispatch_root(self.execution, self._resolver, LaneContext))
            await self.execution.writer.committed()
        except ServerStopping:
            await self.execution.writer.committed()  # whoever follows is to see what was recorded until now
            raise
        finally:
            if self._ending is not None:
                if not self.execution.pump.live:
                    self._ending.cancel()
                await asyncio.gather(self._ending, return_exceptions=True)

    def _let_go(self, stopped: BaseException | None) -> None:
        self.keep_going()
        for timer in self._timers:
            timer.cancel()
        self.execution.end_spans()
        self._on_end(self, stopped)
