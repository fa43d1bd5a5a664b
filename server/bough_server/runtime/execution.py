"""One run while it goes: its recorder, journal, limits, invocations and tasks; it knows nothing of any agent's insides.

Every coroutine of a run is a task that this module starts, and that it ends: when the run ends, when a part of it is
cancelled, and when its log can no longer be written.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog

from bough.v1 import error_pb2, event_pb2, policy_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.errors import NonDeterministic, RunError
from bough_server.runtime import keys
from bough_server.runtime.agent import Resolver
from bough_server.runtime.closing import closing
from bough_server.runtime.invocations import Invocations
from bough_server.runtime.journal import Identity, Journal, Pump, identity_of
from bough_server.runtime.recorder import Joining, Piece, Recorder
from bough_server.runtime.sameness import same_fact
from bough_server.store.ports import StoredMessage
from bough_server.telemetry import Traced, Tracing

T = TypeVar("T")

_log = structlog.get_logger(__name__)

STOP_SECONDS: Final = 1.0
"""How long cancelled tasks may take to let go; after that the run ends without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is: its ids, its first event, and the session as it was when it began."""

    run_id: str
    session_id: str
    user_id: str
    started: event_pb2.AgentEvent
    session: Sequence[StoredMessage] = ()

    @property
    def key_root(self) -> str:
        """The UUID that the run's ids are derived from."""
        return self.started.run_started.key_root


class Execution:
    """One run while it goes. Without a recorder it is a replay: an event that the log does not hold is a divergence."""

    def __init__(
        self,
        facts: RunFacts,
        *,
        resolver: Resolver,
        tracing: Tracing,
        clock: Clock,
        journal: Journal,
        recorder: Recorder | None,
        default_delta: policy_pb2.DeltaPolicy | None = None,
    ) -> None:
        self.facts = facts
        self.default_delta = default_delta or policy_pb2.DeltaPolicy()
        self.resolver = resolver
        self.tracing = tracing
        self.clock = clock
        self.journal = journal
        self.pump = Pump(journal, on_divergence=self.stop, on_cut=self._replay_cut, on_live=self._replayed)
        self.invocations = Invocations()
        self.spans: dict[str, Traced] = {}
        self.calls_made: Counter[tuple[str, str]] = Counter()
        """How often an agent has called a tool in this run, by both names."""
        self._recorder = recorder
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._sealed: set[str] = set()
        self._observed: set[Identity] = set()
        self._cuts: dict[str, asyncio.Future[None]] = {}
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if recorder is not None:
            recorder.on_failure = self.stop
        # Recorded when the run was accepted; taken in at once, because a run may be ended before it begins.
        self._observe(facts.started)

    # Events

    def emit(self, *batch: event_pb2.AgentEvent) -> None:
        """Records events in one append, those that the log does not hold yet.

        Raises CancelledError where they are of an invocation that has ended, or of a scope that is being ended: what
        still runs there, against its cancellation, writes nothing.
        """
        for event in batch:
            self.refuse(event.parent_invocation_id if is_start(event) else event.invocation_id, event.effect_key)
        self._emit(*batch)

    def _emit(self, *batch: event_pb2.AgentEvent) -> None:
        fresh = batch if self.journal.is_empty else [event for event in batch if not self._holds(event)]
        if fresh:
            if self._recorder is None:
                error = NonDeterministic(
                    f"The replay made {events.name_of(fresh[0])} of the effect {fresh[0].effect_key!r}, "
                    "which the log does not hold."
                )
                raise self.diverged(error)
            self._recorder.record(fresh)
        for event in batch:
            self._observe(event)

    def _observe(self, event: event_pb2.AgentEvent) -> None:
        self.invocations.observe(event)
        if not self.journal.is_empty:
            self._observed.add(identity_of(event))

    def _holds(self, event: event_pb2.AgentEvent) -> bool:
        recorded = self.journal.recorded.get(identity_of(event))
        if recorded is None:
            return False
        if not same_fact(event, recorded):
            error = NonDeterministic(
                f"The replay's {events.name_of(event)} of the effect {event.effect_key!r} differs from the one at "
                f"sequence {recorded.sequence}."
            )
            raise self.diverged(error)
        event.time.CopyFrom(recorded.time)
        event.sequence = recorded.sequence
        return True

    def diverged(self, error: NonDeterministic) -> asyncio.CancelledError:
        """Stops a replay that cannot go on, and gives what its agents' code is ended with."""
        self.stop(error)
        return asyncio.CancelledError()

    def check(self, key: str, digest: str) -> None:
        """Stops the run where an effect asks for something else than the log holds under its key."""
        try:
            self.journal.check(key, digest)
        except NonDeterministic as error:
            raise self.diverged(error) from None

    async def reach_end(self, scope: str) -> None:
        """Waits, in a replay, for the turn of an invocation's end; one that was cancelled never gets there."""
        if self.pump.live:
            return
        if scope in self.journal.ends:
            await self.pump.result(scope)
        else:
            await self.pump.until_live(scope)

    async def reach_step_end(self, key: str) -> None:
        """Waits for good, in a replay, where a step was cancelled although it had all its results."""
        if not self.pump.live and self.journal.is_step_cut_off(key):
            await self.pump.never()

    def observe_recorded(self, key: str) -> None:
        """Takes in what the log holds of an effect, as if it were made now."""
        for event in self.journal.of_effect.get(key, ()):
            if identity_of(event) not in self._observed and not self.journal.is_cancelled(event):
                self._observe(event)

    def _observe_scope(self, scope: str) -> None:
        """Takes in everything that the log holds of a scope that was cancelled."""
        for identity, event in self.journal.recorded.items():
            if keys.covers(scope, event.effect_key) and identity not in self._observed:
                self._observe(event)

    async def committed(self) -> None:
        """Waits until everything emitted so far is on disk."""
        if self._recorder is not None:
            await self._recorder.committed()

    def delta(self, piece: Piece, joining: Joining, make: Callable[[], event_pb2.AgentEvent]) -> bool:
        """Takes a piece of streamed text; gives whether the producer has to wait for `room`."""
        assert self._recorder is not None, "a replay streams nothing"
        return self._recorder.delta(piece, joining, make)

    async def room(self) -> None:
        """Waits until producers of deltas may go on."""
        assert self._recorder is not None, "a replay streams nothing"
        await self._recorder.room()

    # Tasks

    def spawn(self, scope: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that ends with its scope."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.facts.run_id}:{scope}")
        self._tasks[task] = scope
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def join(self, *tasks: asyncio.Task[Any], first: bool = False) -> None:
        """Waits for tasks without owning their fate: cancelling the waiter cancels none of them, at any depth."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        open_tasks = {task for task in tasks if not task.done()}
        if not open_tasks or (first and len(open_tasks) < len(tasks)):
            return

        def done(task: asyncio.Task[Any]) -> None:
            open_tasks.discard(task)
            if (first or not open_tasks) and not waiter.done():
                waiter.set_result(None)

        for task in list(open_tasks):
            task.add_done_callback(done)
        try:
            await waiter
        finally:
            for task in tasks:
                task.remove_done_callback(done)

    def is_sealed(self, scope: str) -> bool:
        """Whether nothing may begin in a scope any more."""
        return bool(self._sealed) and any(keys.covers(sealed, scope) for sealed in self._sealed)

    def refuse_sealed(self, scope: str) -> None:
        """Ends a coroutine that tries an effect after its scope was cancelled; `except Exception` does not catch it."""
        if self.is_sealed(scope):
            raise asyncio.CancelledError

    def refuse(self, invocation_id: str, key: str) -> None:
        """Ends a coroutine that tries an effect after its scope was cancelled, or its invocation ended."""
        if self._sealed:
            self.refuse_sealed(key)
        if invocation_id not in self.invocations and invocation_id:
            raise asyncio.CancelledError

    # Ends

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the run's root to its end and leaves no task behind. Raises what stopped the run unrecorded."""
        root = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({root, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                self._stopped.result()
            else:
                root.result()
        finally:
            self._sealed.add("")
            await self._stop_tasks("")
            root.cancel()
            await asyncio.wait({root})

    def stop(self, error: BaseException) -> None:
        """Stops the run where it is: nothing more is recorded, and what is on disk is whole."""
        self._sealed.add("")
        if not self._stopped.done():
            self._stopped.set_exception(error)
            self._stopped.exception()

    async def cancel(
        self,
        scope: str,
        *,
        caller: str,
        reason: event_pb2.CancelReason.ValueType,
        error: error_pb2.AgentError,
        below: error_pb2.AgentError,
        waiter: asyncio.Task[Any] | None = None,
    ) -> None:
        """Ends everything in a scope: the wish is recorded first, then tasks stop, then every open end is, leaf first.

        `caller` is the invocation that speaks of it; it is the scope's own for the whole run. `waiter` is the task that
        waits for the scope and goes on without it.
        """
        if self.wish(scope, caller=caller, reason=reason) or self._is_ending(scope):
            await self.end(scope, error, below, waiter=waiter)

    def _is_ending(self, scope: str) -> bool:
        """Whether somebody else ends a scope at this moment: whoever needs it ended must not run ahead of that."""
        return self._recorder is not None and self.is_sealed(scope) and not self.is_sealed("")

    def wish(self, scope: str, *, caller: str, reason: event_pb2.CancelReason.ValueType) -> bool:
        """Records that a scope is to end and seals it: nothing begins in it any more. False where it has been."""
        if self.is_sealed(scope) or caller not in self.invocations:
            return False
        if self._recorder is None:
            self._sealed.add(scope)
            self._observe_scope(scope)
            return False
        self._recorder.flush_below(lambda key: keys.covers(scope, key))
        event = self.invocations[caller].event(scope)
        event.cancel_requested.scope, event.cancel_requested.reason = scope, reason
        self._emit(event)
        self._sealed.add(scope)
        return True

    async def end(
        self,
        scope: str,
        error: error_pb2.AgentError,
        below: error_pb2.AgentError,
        *,
        waiter: asyncio.Task[Any] | None = None,
    ) -> None:
        """Stops the tasks of a sealed scope, but for the one that waits for it, and records what ends there."""
        await self._stop_tasks(scope, spared=waiter)
        await self.committed()
        self.close(scope, error, below)
        await self.committed()

    def close(self, scope: str, error: error_pb2.AgentError, below: error_pb2.AgentError) -> None:
        """Records the end of everything that is open in a scope, leaf first, in one append."""
        ends = closing(self.invocations, scope, error, below, self.clock.now_ns())
        if ends:
            self._emit(*ends)
        for key in [key for key in self.spans if keys.covers(scope, key)]:
            self.spans.pop(key).end(error=error)

    def end_spans(self) -> None:
        """Ends the spans that are still open: nobody will."""
        for traced in self.spans.values():
            traced.end()
        self.spans.clear()

    def cut(self, scope: str) -> "asyncio.Future[None]":
        """Done when a scope has been ended because its own time was up, while its caller goes on."""
        return self._cuts.setdefault(scope, asyncio.get_running_loop().create_future())

    def _replay_cut(self, scope: str) -> None:
        self._sealed.add(scope)
        self._observe_scope(scope)
        self.cut(scope).set_result(None)

    def _replayed(self, frontier: Sequence[str]) -> None:
        """Everything recorded has been handed back; a replay without a recorder must need nothing more."""
        if self._recorder is not None:
            return
        if "" in self.journal.cancelled:
            self._sealed.add("")
            self._observe_scope("")
            if not self._stopped.done():
                self._stopped.set_result(None)
        else:
            asked = ", ".join(frontier) or "nothing, and never ended"
            self.stop(NonDeterministic(f"The log ends, but the agents asked for {asked}."))

    async def _stop_tasks(self, scope: str, *, spared: asyncio.Task[Any] | None = None) -> None:
        kept = (asyncio.current_task(), spared)
        doomed = [task for task, of in self._tasks.items() if task not in kept and keys.covers(scope, of)]
        for task in sorted(doomed, key=lambda task: self._tasks.get(task, "").count("/"), reverse=True):
            task.cancel()
        if doomed:
            _, late = await asyncio.wait(doomed, timeout=STOP_SECONDS)
            for task in late:
                _log.warning("task ignores its cancellation", run_id=self.facts.run_id, task=task.get_name())


def is_start(event: event_pb2.AgentEvent) -> bool:
    """Whether an event begins an invocation, which is in no list before."""
    return event.HasField("sub_agent_started") or event.HasField("run_started")


def as_run_error(error: BaseException) -> RunError:
    """Any exception of an agent's or a tool's code as an error that an event can carry; it holds no stack."""
    if isinstance(error, RunError):
        return error
    return RunError(f"{type(error).__name__}: {error}"[:2000], reason=error_pb2.ERROR_REASON_INTERNAL, retryable=False)
