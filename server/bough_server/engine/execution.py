"""One run while it goes: its log, tasks, barrier and questions as one; it knows nothing of any agent's insides.

A run that is interrupted, or stopped unrecorded, is sealed: what still runs in it writes nothing.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from bough.v1 import error_pb2, event_pb2, input_pb2, policy_pb2
from bough_server import ids
from bough_server.clock import Clock
from bough_server.engine import keys
from bough_server.engine.barrier import ReplayBarrier
from bough_server.engine.cancellation import Cancellation
from bough_server.engine.concurrency import ConcurrencyLimiter
from bough_server.engine.event_writer import EventWriter
from bough_server.engine.input_requests import PendingInputs, expired, received
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunInfo
from bough_server.engine.recorder import Recorder
from bough_server.engine.scheduler import Scheduler
from bough_server.errors import NonDeterministic, RunError, ServerStopping
from bough_server.metrics import Metrics
from bough_server.telemetry import Traced, Tracing


class Execution:
    """One run while it goes. Without a recorder it is a replay: an event that the log does not hold is a divergence."""

    def __init__(
        self,
        facts: RunInfo,
        *,
        tracing: Tracing,
        clock: Clock,
        journal: Journal,
        recorder: Recorder | None,
        default_deltas: policy_pb2.DeltaPolicy | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.facts = facts
        self.session = facts.session
        """The session that the run sees; of a queued run not known before it begins."""
        begun = journal.dequeued.run_dequeued if journal.dequeued is not None else facts.started.run_started
        self.state_json = begun.state_json
        """The session's state as the run found it; of a queued run not known before it begins."""
        self.told = journal.changed_input or facts.started.run_started.input
        """What the user says."""
        self.policy = journal.forks.policy_at(journal.last_sequence + 1, facts.started.run_started.policy)
        """The policy in force; a fork may have its own."""
        self.default_deltas = default_deltas or policy_pb2.DeltaPolicy()
        self.tracing = tracing
        self.clock = clock
        self.journal = journal
        self.tasks = Scheduler(facts.run_id, self._quiet)
        self.tasks.is_handing_back = not journal.is_empty
        self.slots = ConcurrencyLimiter(self.tasks)
        self.writer = EventWriter(journal, recorder, metrics, on_divergence=self.stop, on_emitted=self.slots.ended)
        self.invocations = self.writer.invocations
        self.spans: dict[str, Traced] = {}
        self.cancelling = Cancellation(self.writer, self.tasks, clock, self.spans)
        self.pump = ReplayBarrier(
            journal,
            self.tasks,
            on_divergence=self.stop,
            on_cut=self.cancelling.replay_cut,
            on_cut_end=self.cancelling.replay_cut_end,
            on_live=self._replayed,
        )
        self.inputs = PendingInputs(self.tasks, self._asked)
        self.is_interrupted = False
        """Whether it waits for input: nothing more is recorded until somebody takes it over."""
        self._is_draining = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if recorder is not None:
            recorder.on_failure = self.stop
        # Recorded when the run was accepted; taken in at once, because a run may be ended before it begins.
        self.writer.observe(facts.started)

    # What a fork has from its origin

    def message_id(self, key: str, kind: int, name: str) -> str:
        """The id of the message that an event of an effect records, such as its "USER" message.

        What a fork shares keeps its ids; what it records itself has other ones than its origin records there.
        """
        facts = self.facts
        root = self.journal.forks.message_root(key, kind, key_root=facts.key_root, run_id=facts.run_id)
        return ids.message_id(root, key, name)

    def policy_of(self, scope: str) -> policy_pb2.RunPolicy:
        """The policy in force when the log recorded the end of an invocation; the run's current one if it has none."""
        end = self.journal.ends.get(scope)
        if end is None:
            return self.policy
        return self.journal.forks.policy_at(end.sequence, self.facts.started.run_started.policy)

    # Events

    def emit(self, *batch: event_pb2.AgentEvent) -> None:
        """Records events in one append, those that the log does not hold yet.

        Raises CancelledError where they are of an invocation that has ended, or of a scope that is being ended: what
        still runs there, against its cancellation, writes nothing.
        """
        for event in batch:
            is_start = event.HasField("sub_agent_started")  # it begins an invocation that is in no list before
            self.refuse(event.parent_invocation_id if is_start else event.invocation_id, event.effect_key)
        self.writer.emit(*batch)

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
            await self.tasks.never()

    def refuse(self, invocation_id: str, key: str) -> None:
        """Ends a coroutine that tries an effect after its scope was cancelled, or its invocation ended."""
        if self.is_refused(invocation_id, key):
            raise asyncio.CancelledError

    def is_refused(self, invocation_id: str, key: str) -> bool:
        """Whether the scope of an effect was cancelled, or its invocation has ended."""
        return self.cancelling.is_sealed(key) or bool(invocation_id and invocation_id not in self.invocations)

    # Answers from outside

    async def ask_outside(self, asked: event_pb2.AgentEvent) -> input_pb2.InputAnswer:
        """The answer to a request; `asked` is its input_requested, recorded here if the log does not hold it."""
        key = asked.effect_key
        if key in self.journal.answered:
            return self.journal.answered[key]
        self.emit(asked)
        timer = None
        if asked.input_requested.request.HasField("expire_time"):
            timer = self.tasks.spawn(f"{key}.timer", self._expire(asked))
        try:
            return await self.inputs.wait(asked)
        finally:
            if timer is not None:
                self.tasks.cancel(timer)

    async def _asked(self, asked: event_pb2.AgentEvent) -> None:
        await self.writer.committed()
        self.refuse(asked.invocation_id, asked.effect_key)

    def waits_for(self, event: event_pb2.AgentEvent) -> bool:
        """Whether somebody here waits for an input_received, and may go on with it."""
        is_asked = self.inputs.asked(event.input_received.answer.input_id) is not None
        return is_asked and not self.cancelling.is_sealed(event.effect_key)

    def answer(self, event: event_pb2.AgentEvent) -> bool:
        """Records an input_received and lets go on who waits for it; False where nobody waits for it here."""
        gate = self.inputs.take(event.input_received.answer.input_id) if self.waits_for(event) else None
        if gate is None:
            return False
        self.writer.emit(event)
        gate.open(event.input_received.answer)
        return True

    async def _expire(self, asked: event_pb2.AgentEvent) -> None:
        left = (asked.input_requested.request.expire_time.ToNanoseconds() - self.clock.now_ns()) / 1e9
        await self.tasks.aside(self.clock.sleep(max(0.0, left)))
        self.answer(received(asked, expired(asked.input_requested.request)))

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
            self.cancelling.seal("")
            self.tasks.close()
            await self.tasks.stop("")
            self.tasks.cancel(root)
            await asyncio.wait({root})

    def stop(self, error: BaseException) -> None:
        """Stops the run where it is: nothing more is recorded, and what is on disk is whole."""
        self.cancelling.seal("")
        if not self._stopped.done():
            self._stopped.set_exception(error)
            self._stopped.exception()

    def ended(self) -> None:
        """Lets the run go: whoever ended it from outside has recorded its ends, and its root need not wake for that."""
        self._end_without_error()

    def drain(self) -> None:
        """Lets no effect begin any more, and stops the run as soon as those in flight have ended."""
        self._is_draining = True
        self.pump.hold()
        self.slots.hold()
        self.tasks.check_soon()

    def end_spans(self) -> None:
        """Ends the spans that are still open: nobody will."""
        for traced in self.spans.values():
            traced.end()
        self.spans.clear()

    def _quiet(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # nobody else would wake the run any more
            self.stop(error)

    def _go_on(self) -> None:
        if not self.pump.live:
            self.pump.advance()
        elif self.cancelling.is_sealed(""):
            return  # who ends it is about to wake them all
        elif self.inputs and not self.pump.has_parked and not self.slots.has_waiting and not self.tasks.sleeping:
            self._interrupt()
        elif self._is_draining:
            self.stop(ServerStopping("The server stops; the run goes on where it is taken up."))

    def _interrupt(self) -> None:
        event = self.invocations.root().event("")
        event.run_interrupted.requests.extend(self.inputs.requests())
        self.writer.append(event)
        self.is_interrupted = True
        self._end_without_error()

    def _end_without_error(self) -> None:
        self.cancelling.seal("")
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _waiting(self) -> set[str]:
        """The effects that wait for an answer; of an approval, which has a key of its own, that is the call."""
        return {keys.owner(key) for key, _ in self.journal.open_requests()}

    def _replayed(self, frontier: Sequence[str]) -> None:
        """Everything recorded has been handed back; a replay without a recorder must need nothing more."""
        self.tasks.is_handing_back = False
        if not self.writer.is_offline:
            self.writer.go_live()
        elif "" in self.journal.cancelled:
            self.writer.observe_scope("")
            self._end_without_error()
        elif self.journal.is_interrupted and set(map(keys.owner, frontier)) <= self._waiting():
            self._end_without_error()
        else:
            self.stop(NonDeterministic(f"The log ends, but the agents asked for {', '.join(frontier) or 'nothing'}."))


def as_run_error(error: BaseException) -> RunError:
    """Any exception of an agent's or a tool's code as an error that an event can carry; it holds no stack."""
    if isinstance(error, RunError):
        return error
    return RunError(f"{type(error).__name__}: {error}"[:2000], reason=error_pb2.ERROR_REASON_INTERNAL, retryable=False)
