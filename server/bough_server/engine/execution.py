"""One run in execution: its journal, scheduler, barrier, event writer, limits, cancellation and input requests.

When a run is interrupted or stopped, its scope is closed: code that is still running in it records nothing.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec
from weakref import WeakMethod

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from bough_server import ids
from bough_server.clock import Clock
from bough_server.engine import keys
from bough_server.engine.barrier import ReplayBarrier
from bough_server.engine.cancellation import Cancellation
from bough_server.engine.concurrency import ConcurrencyLimiter
from bough_server.engine.event_writer import EventWriter
from bough_server.engine.files import SessionFiles, check_files, without_data
from bough_server.engine.input_requests import PendingInputs, build_answer_event, build_expiry_answer
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunInfo
from bough_server.engine.limits import SharedLimit
from bough_server.engine.recorder import Recorder
from bough_server.engine.scheduler import Scheduler
from bough_server.errors import NonDeterministic, RunError, ServerStopping, text_of_error
from bough_server.log.blobs import MAX_FILES_BYTES, data_size, take_data
from bough_server.messages import copy_of
from bough_server.observability.metrics import Metrics
from bough_server.observability.tracing import Traced, Tracing
from bough_server.tasks import AbandonedTasks
from bough_server.threads import run_in_thread

P = ParamSpec("P")


class Execution:
    """One run in execution. Without a recorder it is an offline replay: an event that is not in the log diverges."""

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
        abandoned: AbandonedTasks | None = None,
        files: SessionFiles | None = None,
        shared_limit: SharedLimit | None = None,
    ) -> None:
        self.facts = facts
        self.shared_limit = shared_limit
        """What it shares with other runs; None if nothing but its own limits bounds what it spends."""
        self.files = files
        """The files of the session; None in an offline replay that has none."""
        self.session = facts.session
        """The session's messages up to the run's cut; of a queued run not known before it starts."""
        begun = journal.dequeued.run_dequeued if journal.dequeued is not None else facts.started.run_started
        self.state_json = begun.state_json
        """The session's state as the run found it; of a queued run not known before it begins."""
        self.starts_with = begun.starts_with
        """The member that the root starts with, empty for its usual start; of a queued run known once it begins."""
        self.mocks = journal.forks.mocks(facts.started.run_started)
        """What answers tool calls instead of the tools; None in every run that no evaluation started."""
        self.default_deltas = default_deltas or policy_pb2.DeltaPolicy()
        self.tracing = tracing
        self.clock = clock
        self.journal = journal
        # Its parts call it back weakly: in a cycle, a run that is over would occupy memory until a full collection.
        stop = _bind_weakly(self.stop)
        self.scheduler = Scheduler(facts.run_id, _bind_weakly(self._on_quiet), abandoned)
        self.scheduler.is_replaying = not journal.is_empty
        self.concurrency = ConcurrencyLimiter(self.scheduler)
        self.writer = EventWriter(
            journal, recorder, metrics, on_divergence=stop, on_emitted=self.concurrency.release_slots
        )
        self.invocations = self.writer.invocations
        self.spans: dict[str, Traced] = {}
        self.cancellation = Cancellation(self.writer, self.scheduler, clock, self.spans)
        self.barrier = self._build_barrier()
        self.inputs = PendingInputs(self.scheduler)
        self.is_interrupted = False
        """True if the run waits for input: nothing more is recorded until a worker takes it over."""
        self._is_draining = False
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if recorder is not None:
            recorder.on_failure = stop
        # Recorded when the run was accepted; applied at once, because a run may be ended before its root starts.
        self.writer.observe(facts.started)

    def _build_barrier(self) -> ReplayBarrier:
        return ReplayBarrier(
            self.journal,
            self.scheduler,
            on_divergence=_bind_weakly(self.stop),
            on_timeout=self.cancellation.replay_timeout,
            on_timeout_end=self.cancellation.replay_timeout_end,
            on_live=_bind_weakly(self._on_live),
        )

    # What a fork takes from its origin, or changes

    @property
    def input(self) -> message_pb2.Message:
        """What the user says."""
        return self.journal.changed_input or self.facts.started.run_started.input

    @property
    def policy(self) -> policy_pb2.RunPolicy:
        """The policy in force at the end of the log that the run was launched from."""
        return self.journal.forks.policy_at(self.journal.last_sequence + 1, self.facts.started.run_started.policy)

    def message_id(self, key: str, kind: int, name: str) -> str:
        """Return the id of the message that an event of an effect records; `name` is its kind, such as "USER".

        Messages that a fork shares with its origin keep their ids; those it records itself get new ones.
        """
        facts = self.facts
        root = self.journal.forks.message_root(key, kind, key_root=facts.key_root, run_id=facts.run_id)
        return ids.message_id(root, key, name)

    def policy_of(self, scope: str) -> policy_pb2.RunPolicy:
        """Return the policy in force when an invocation's end was recorded; the current one if there is no end."""
        end = self.journal.ends.get(scope)
        if end is None:
            return self.policy
        return self.journal.forks.policy_at(end.sequence, self.facts.started.run_started.policy)

    # Events

    def emit(self, *batch: event_pb2.AgentEvent) -> None:
        """Record the events that the log does not hold yet, in one append.

        Raises CancelledError if one belongs to an invocation that has ended or to a closed scope: code that ignores its
        cancellation records nothing.
        """
        for event in batch:
            is_start = event.HasField("sub_agent_started")  # its own invocation is not open yet: check its caller
            self.check_open(event.parent_invocation_id if is_start else event.invocation_id, event.effect_key)
        self.writer.emit(*batch)

    def keep_files(self, message: message_pb2.Message) -> message_pb2.Message:
        """Return a message of operators' code that names its files by their hashes; they are stored with its event.

        Raises RunError OUTPUT_TOO_LARGE.
        """
        plain, files = without_data(message, most=self.max_files_bytes)
        self.writer.attach_files(files)
        return plain

    async def keep_parts(self, parts: Sequence[message_pb2.Part]) -> Sequence[message_pb2.Part]:
        """Return a tool's parts that name their files by their hashes; the files are stored with its event.

        Raises RunError OUTPUT_TOO_LARGE.
        """
        size = data_size(parts)
        if not size:
            return parts
        check_files(size, self.max_files_bytes)
        plain = [copy_of(part) for part in parts]  # a tool may return the same parts again
        # In a thread: hashing some megabytes would hold up all runs.
        self.writer.attach_files(await run_in_thread(take_data, plain))
        return plain

    @property
    def max_files_bytes(self) -> int:
        """The bytes that all files of one message may have."""
        return self.files.most if self.files is not None else MAX_FILES_BYTES

    async def reach_end(self, scope: str) -> None:
        """Wait, in a replay, until an invocation's end is due; in a cancelled scope that is never."""
        if self.barrier.live:
            return
        # Ends are delivered in log order, like results: which of two parallel children ended first must not depend on
        # the event loop.
        if scope in self.journal.ends:
            await self.barrier.wait_for_result(scope)
        else:
            await self.barrier.wait_until_live(scope)

    async def reach_step_end(self, key: str) -> None:
        """Park for good, in a replay, if the log says that this step was cancelled although it had all its results."""
        if not self.barrier.live and self.journal.is_step_cancelled(key):
            await self.scheduler.rest_forever()

    def check_open(self, invocation_id: str, key: str) -> None:
        """Raise CancelledError if the scope of an effect is closed, or its invocation has ended."""
        if self.is_refused(invocation_id, key):
            raise asyncio.CancelledError

    def is_refused(self, invocation_id: str, key: str) -> bool:
        """True if the scope of an effect is closed, or its invocation has ended."""
        return self.cancellation.is_closed(key) or bool(invocation_id and invocation_id not in self.invocations)

    # Answers from outside

    async def ask_outside(self, asked: event_pb2.AgentEvent) -> input_pb2.InputAnswer:
        """Return the answer to a request; `asked` is its input_requested, recorded if the log does not hold it."""
        key = asked.effect_key
        if key in self.journal.answered:
            return self.journal.answered[key]
        self.emit(asked)
        timer = None
        if asked.input_requested.request.HasField("expire_time"):
            timer = self.scheduler.spawn(f"{key}.timer", self._expire(asked))
        try:
            return await self.inputs.wait(asked, self._wait_for_request_commit)
        finally:
            if timer is not None:
                self.scheduler.cancel(timer)

    async def _wait_for_request_commit(self, asked: event_pb2.AgentEvent) -> None:
        await self.writer.wait_for_commit()
        # The scope may have been closed during the commit: then nothing must wait for the answer.
        self.check_open(asked.invocation_id, asked.effect_key)

    def waits_for(self, event: event_pb2.AgentEvent) -> bool:
        """True if an effect of this execution waits for this input_received, and its scope is not closed."""
        is_pending = self.inputs.get_request_event(event.input_received.answer.input_id) is not None
        return is_pending and not self.cancellation.is_closed(event.effect_key)

    def answer(self, event: event_pb2.AgentEvent) -> bool:
        """Record an input_received and resume the effect that waits for it; return False if none waits here."""
        waiter = self.inputs.take(event.input_received.answer.input_id) if self.waits_for(event) else None
        if waiter is None:
            return False
        self.writer.emit(event)
        waiter.resolve(event.input_received.answer)
        return True

    async def _expire(self, asked: event_pb2.AgentEvent) -> None:
        left = (asked.input_requested.request.expire_time.ToNanoseconds() - self.clock.now_ns()) / 1e9
        # await_aside(), not await_sleep(): a run that waits for input only is interrupted, whatever timers it has;
        # expiry is a stored time that any server enforces.
        await self.scheduler.await_aside(self.clock.sleep(max(0.0, left)))
        self.answer(build_answer_event(asked, build_expiry_answer(asked.input_requested.request)))

    # Ends

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the root to its end and leave no task behind. Raises what stopped the run before a recorded end."""
        root = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({root, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                self._stopped.result()
            else:
                root.result()
        finally:
            # Closed before the tasks are cancelled: their `finally` and `except` blocks must record nothing.
            self.cancellation.close_scope("")
            self.scheduler.close()
            await self.scheduler.stop("")
            self.scheduler.cancel(root)
            await asyncio.wait({root})

    def stop(self, error: BaseException) -> None:
        """Stop the run where it is, unrecorded: what is committed is consistent, and another worker may resume it."""
        self.cancellation.close_scope("")
        if not self._stopped.done():
            self._stopped.set_exception(error)
            self._stopped.exception()  # mark it as retrieved: if finish() is not awaiting it, asyncio would log it

    def conclude(self) -> None:
        """Conclude a run that was ended from outside and whose ends are recorded; its root need not wake."""
        self._end_without_error()

    def drain(self) -> None:
        """Park new effects, and stop the run as soon as those in flight have ended."""
        self._is_draining = True
        self.barrier.hold()
        self.concurrency.hold()
        self.scheduler.check_soon()

    def end_spans(self) -> None:
        """End the spans that are still open when the run is left."""
        for traced in self.spans.values():
            traced.end()
        self.spans.clear()

    def _on_quiet(self) -> None:
        try:
            self._continue()
        except Exception as error:  # raised into the event loop it would be lost, and the run parked for good
            self.stop(error)

    def _continue(self) -> None:
        if not self.barrier.live:
            self.barrier.advance()
        elif self.cancellation.is_closed(""):
            return  # the cancellation under way is about to cancel every parked task
        # Not interrupted while anything can proceed without input: effects parked by a drain or waiting for a slot,
        # and sleeps.
        elif (
            self.inputs
            and not self.barrier.has_parked
            and not self.concurrency.has_waiting
            and not self.scheduler.sleeping
        ):
            self._interrupt()
        elif self._is_draining:
            self.stop(ServerStopping("The server is stopping; another server resumes the run."))

    def _interrupt(self) -> None:
        event = self.invocations.root().event("")
        event.run_interrupted.requests.extend(self.inputs.requests())
        self.writer.append(event)
        self.is_interrupted = True
        self._end_without_error()

    def _end_without_error(self) -> None:
        self.cancellation.close_scope("")
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _find_waiting_effects(self) -> set[str]:
        """Return the effects that wait for an answer; for an approval, which has its own key, that is the call."""
        return {keys.owner(key) for key, _ in self.journal.open_requests()}

    def _on_live(self, frontier: Sequence[str]) -> None:
        """Switch to live, or end an offline replay, which must ask for nothing beyond the log."""
        self.scheduler.is_replaying = False
        if not self.writer.is_offline:
            self.writer.go_live()
            self.cancellation.close_cancelled_scopes()
        elif "" in self.journal.cancelled:
            self.writer.observe_scope("")
            self._end_without_error()
        elif self.journal.is_interrupted and set(map(keys.owner, frontier)) <= self._find_waiting_effects():
            self._end_without_error()
        else:
            self.stop(NonDeterministic(f"The log ends, but the agents asked for {', '.join(frontier) or 'nothing'}."))


def _bind_weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a function that calls a method as long as its object exists, without keeping it alive."""
    found = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (alive := found()) is not None:
            alive(*args, **kwargs)

    return call


def to_run_error(error: BaseException) -> RunError:
    """Return any exception of agent or tool code as an error that an event can carry, without its stack."""
    if isinstance(error, RunError):
        return error
    message = f"{type(error).__name__}: {text_of_error(error)}"[:2000]
    return RunError(message, reason=error_pb2.ERROR_REASON_INTERNAL, retryable=False)
