"""A lane runs effects one at a time, assigns their keys and, during a replay, resolves them from the log."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final

from bough.v1 import error_pb2, event_pb2, message_pb2, session_pb2
from bough_server.engine import keys
from bough_server.engine.execution import Execution
from bough_server.engine.scheduler import Waiter
from bough_server.errors import NonDeterministic, RunError
from bough_server.history.overflow import Compaction
from bough_server.history.transcript import Transcript
from bough_server.messages import copy_of
from bough_server.runtime.agent import Context, Outcome
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.state import LaneState, StateView
from bough_server.runtime.visible_history import VisibleHistory

MOST_REFUSALS: Final = 100
"""How often code that was cancelled may try to start an effect and get CancelledError; after that it never returns."""


class PendingCalls:
    """The calls of a model's answer that were not run yet; each may be taken once.

    They are copies, because code that receives the answer may change it.
    """

    def __init__(self, calls: Sequence[message_pb2.ToolCall]) -> None:
        self._waiting = {call.call_id: (position, copy_of(call)) for position, call in enumerate(calls)}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, calls: Sequence[message_pb2.ToolCall]) -> Mapping[int, message_pb2.ToolCall]:
        """Remove calls and return them, without provider_json, by their positions in the answer, in the order given.

        Raises RunError BAD_ARGUMENTS, removing none, if one is not pending or differs from what the model asked for.
        """
        taken: dict[int, message_pb2.ToolCall] = {}
        for call in calls:
            position, made = self._waiting.get(call.call_id, (-1, None))
            if made is None or made != call or position in taken:
                raise RunError(
                    f"The call {call.call_id!r} of {call.name!r} is not one that waits for its result. Pass ctx.tools "
                    "calls of the last answer of ctx.model in the same context, each once and as the model made it. "
                    "What code decides by itself goes through ctx.call_tool, ctx.dispatch or ctx.step.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )
            taken[position] = _without_provider_data(made)
        for call in calls:
            del self._waiting[call.call_id]
        return taken


def _without_provider_data(call: message_pb2.ToolCall) -> message_pb2.ToolCall:
    # Signatures have kilobytes. They are sent back with the model's message, which keeps them; events need none.
    if call.provider_json:
        call.ClearField("provider_json")
        call.ClearField("model")
    return call


class Lane:
    """One lane of an invocation, whose effects are sequential: that of the agent's code, or one that `gather` made."""

    def __init__(
        self,
        execution: Execution,
        running: RunningAgent,
        context: "Callable[[Lane], Context]",
        *,
        scope: str | None = None,
        transcript: Transcript | None = None,
        state: LaneState | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.execution = execution
        self.running = running
        self._context = context
        self.scope = running.scope if scope is None else scope
        self.transcript = transcript or running.transcript
        self.lane_state = state or running.state
        self.state = StateView(self.lane_state)
        """The session state; writes are recorded with the next effect, or at the agent's end."""
        self.visible_history = VisibleHistory(execution, running, self.transcript, compaction)
        """The history that its model calls see."""
        self.step_index = -1
        """The number of the lane's last step, counted in this lane from 0; -1 before the first."""
        self.waiting = PendingCalls(())
        """The calls of that step that were not run yet."""
        self._effects = 0
        self.in_flight = ""
        """The key of the effect in flight; empty if there is none."""
        self._keys: set[str] = set()
        self.refusals = 0
        """How often an effect was refused because its code had been cancelled."""
        self.wake_ns = 0
        """End of the last sleep that was replayed, in nanoseconds since the Unix epoch; 0 if there is none."""
        self.path = running.run_path
        """The agents that have spoken in this lane so far."""
        self.node = ""
        """The node of a graph that the lane executes; empty if it executes none."""
        self.traced = running.traced
        """The span above those of its effects."""

    async def run_agent(self, input: message_pb2.Message) -> Outcome:
        """Run the code of this lane's agent. Raises what that raises."""
        return await self.running.agent.run(self._context(self), input)

    def child(self, running: RunningAgent) -> "Lane":
        """Return the first lane of another invocation."""
        return Lane(self.execution, running, self._context)

    def fork_lane(self, state: LaneState, *, scope: str | None = None) -> "Lane":
        """Return a lane of the same invocation that begins now and runs beside others."""
        lane = Lane(
            self.execution,
            self.running,
            self._context,
            scope=scope,
            transcript=self.transcript.lane(),
            state=state,
            compaction=self.visible_history.compaction,
        )
        lane.path, lane.node, lane.traced = self.path, self.node, self.traced
        return lane

    async def replay_result(self, key: str, digest: str) -> event_pb2.AgentEvent | None:
        """Wait for the recorded result of an effect and return it; None if there is none and it has to `go_live`.

        Raises CancelledError and stops the run if the log holds another effect under this key.
        """
        waiter = self.expect_result(key, digest)
        return await self.await_result(key, waiter) if waiter is not None else None

    def expect_result(self, key: str, digest: str) -> Waiter[event_pb2.AgentEvent] | None:
        """Check an effect against the log and return the waiter of its recorded result, or None if there is none.

        Together with `await_result` this is `replay_result` in two halves, for effects that start together: all have to
        be expected before the first is received, as results are delivered in log order.
        """
        self.execution.writer.check(key, digest)
        return self.execution.barrier.expect(key) if key in self.execution.journal.results else None

    async def await_result(self, key: str, waiter: Waiter[event_pb2.AgentEvent]) -> event_pb2.AgentEvent:
        """Wait for an expected result and apply the recorded events of its effect."""
        recorded = await waiter.wait()
        self.execution.writer.observe_effect(key)
        return recorded

    async def go_live(self, key: str) -> None:
        """Wait until an effect may touch the world. Raises CancelledError if its scope was cancelled meanwhile."""
        await self.wait_until_live(key)
        self.execution.cancellation.raise_if_cancelled(key)

    async def wait_until_live(self, key: str) -> None:
        """Wait until the run is live and a replayed sleep of this lane is over."""
        await self.execution.barrier.wait_until_live(key)
        if self.wake_ns:
            await self.finish_sleep()

    async def settle(self) -> None:
        """Prepare the end of the agent: record its writes, and wait for a sleep that a crash cut short."""
        await self.record_state()
        if self.wake_ns and self.scope not in self.execution.journal.ends and not self.execution.writer.is_offline:
            await self.wait_until_live(self.scope)

    async def finish_sleep(self) -> None:
        """Wait for the rest of a replayed sleep."""
        left, self.wake_ns = self.wake_ns - self.execution.clock.now_ns(), 0
        if left > 0:
            await self.execution.scheduler.await_sleep(self.execution.clock.sleep(left / 1e9))

    def next_key(self, explicit: str) -> str:
        """Return the key of the next effect of code: its number in the lane, or an explicit name.

        Raises RunError BAD_ARGUMENTS if the name cannot be a key, INTERNAL if it was used before.
        """
        self.check_task()
        name = explicit
        if not name:
            name = f"e{self._effects}"
            self._effects += 1
        elif not keys.is_free(name):
            raise RunError(
                f"The key {name!r} cannot name an effect. Use 1 to 64 letters, digits, '_' or '-'; e, g or s followed "
                "by a number only is reserved for effects without a key.",
                reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
            )
        key = self.key(name)
        if key in self._keys:
            raise RunError(
                f"The key {name!r} was used before in this scope. Keys of effects must be unique.",
                reason=error_pb2.ERROR_REASON_INTERNAL,
            )
        self._keys.add(key)
        return key

    async def record_state(self) -> None:
        """Record the pending writes to the session state."""
        if changes := self.state.take_changes():
            key = self.next_key("")
            await self._record_changes(key, changes)
            self.lane_state.apply(changes)

    async def _record_changes(self, key: str, changes: Sequence[session_pb2.SessionStateChange]) -> None:
        parts = [part for one in changes for part in (one.key, str(one.HasField("value_json")), one.value_json)]
        digest = keys.digest("state", *parts)
        if await self.replay_result(key, digest) is not None:
            return
        await self.go_live(key)
        changed = self.running.event(key)
        changed.effect_digest = digest
        changed.session_state_changed.state_changes.extend(changes)
        self.execution.emit(changed)

    def key(self, name: str) -> str:
        """Return the key of an effect or a child that its caller names."""
        return keys.below(self.scope, name)

    def step_key(self, name: str) -> str:
        """Return the key of an effect of the lane's last step."""
        return self.key(f"s{self.step_index}.{name}")

    def complete_steps(self) -> None:
        """End the step of the lane's last model call, if it is open; it has all the results that its code asked for."""
        opened, execution = self.running.open_invocation, self.execution
        step = opened.steps.get(self.step_key("m"))
        if step is not None:
            execution.check_open(self.running.invocation_id, step.key)
            if not execution.writer.replay_step_end(step):
                execution.emit(execution.invocations.build_step_end(opened, step, execution.clock.now_ns()))

    def guard_effect(self, key: str) -> "EffectGuard":
        """Return a guard that holds the lane while an effect is in flight, after recording pending state writes.

        Entering it raises RunError CONCURRENT_EFFECTS if another effect of the lane is in flight.
        """
        return EffectGuard(self, key)

    def check_task(self) -> None:
        """Raise RunError CONCURRENT_EFFECTS if an effect starts in a task or thread that agent code created."""
        # Such a task is not counted by the scheduler: the run could look quiet, and be interrupted, while it runs.
        if not self.execution.scheduler.is_own() and not self.execution.is_refused(
            self.running.invocation_id, self.scope
        ):
            raise RunError(
                f"An effect of {self.running.name!r} was started in a task or thread that its code created. Await "
                "effects in the agent's own coroutine; to run several at once use `await ctx.gather((fn, arg), ...)`. "
                "Instead of asyncio.wait_for, pass `expires` to ctx.ask, and set limits on links and tools.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )


class EffectGuard:
    """Context manager that holds a lane while an effect is in flight."""

    __slots__ = ("_key", "_lane")

    def __init__(self, lane: "Lane", key: str) -> None:
        self._lane = lane
        self._key = key

    async def __aenter__(self) -> None:
        lane, execution = self._lane, self._lane.execution
        if execution.is_refused(lane.running.invocation_id, self._key):
            await self._refuse()
        if lane.in_flight:
            raise RunError(
                f"The effect {self._key} was started while {lane.in_flight} of the same context was in flight. Await "
                "effects one after another; to run several at once use `await ctx.gather((fn, arg), ...)`, which "
                "passes each `fn` a context for itself.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )
        lane.in_flight = self._key
        try:
            await lane.record_state()
        except BaseException:
            lane.in_flight = ""
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._lane.in_flight = ""
        # A timeout of agent code is not in the log: a replay could not repeat it, so the run must not continue.
        if kind is asyncio.CancelledError and self._lane.execution.scheduler.is_cancelled_by_code():
            self._lane.execution.stop(
                NonDeterministic(
                    f"The code of {self._lane.running.name!r} cancelled its effect {self._key} while it was in flight, "
                    "as asyncio.timeout does; a replay could not repeat that. Pass `expires` to ctx.ask, and set "
                    "limits on links and tools; a step may use a timeout within its own work."
                )
            )

    async def _refuse(self) -> None:
        """Raise CancelledError to code that starts an effect after it was cancelled; `except Exception` lets it pass.

        Code that catches it and tries again in a loop would block the event loop, so after MOST_REFUSALS attempts this
        never returns.
        """
        self._lane.refusals += 1
        if self._lane.refusals <= MOST_REFUSALS:
            await asyncio.sleep(0)  # yield, so that such a loop does not starve other coroutines
            raise asyncio.CancelledError
        await self._lane.execution.scheduler.block_forever()
