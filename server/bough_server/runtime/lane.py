"""A lane runs effects one at a time, assigns their keys, and answers them from the log while it is replayed."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, session_pb2
from bough_server.engine import keys
from bough_server.engine.execution import Execution
from bough_server.engine.scheduler import Waiter
from bough_server.errors import NonDeterministic, RunError
from bough_server.history.overflow import Compaction
from bough_server.history.transcript import Transcript
from bough_server.runtime.agent import Context, Outcome
from bough_server.runtime.running_agent import RunningAgent
from bough_server.runtime.state import LaneState, StateView
from bough_server.runtime.visible_history import VisibleHistory

MOST_REFUSALS: Final = 100
"""How often code that was ended may try to begin an effect and hear of its end; then it waits for good."""


class StepNumbers:
    """Numbers of steps: of a lane every `stride`-th, so that parallel lanes never share one, in whatever order."""

    def __init__(self, first: int = 0, stride: int = 1) -> None:
        self._next = first
        self._stride = stride

    def take(self) -> int:
        """The next number."""
        taken, self._next = self._next, self._next + self._stride
        return taken

    def split(self, lanes: int) -> "list[StepNumbers]":
        """Numbers for lanes that run at once."""
        return [StepNumbers(self._next + lane * self._stride, self._stride * lanes) for lane in range(lanes)]

    def pass_over(self, lanes: "Sequence[StepNumbers]") -> None:
        """Goes on after lanes: beyond every number that any of them took."""
        self._next = max((lane._next for lane in lanes), default=self._next)


class PendingCalls:
    """The calls of a model's answer that nobody has run yet; each may be taken once.

    It has copies: code that is given the answer may change what it holds.
    """

    def __init__(self, calls: Sequence[message_pb2.ToolCall]) -> None:
        self._waiting = {call.call_id: (position, _copied(call)) for position, call in enumerate(calls)}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, calls: Sequence[message_pb2.ToolCall]) -> Mapping[int, message_pb2.ToolCall]:
        """The same calls by their positions in the answer, in the order given; they wait no longer.

        Raises RunError BAD_ARGUMENTS, and takes none, where one does not wait or is not as the model made it.
        """
        taken: dict[int, message_pb2.ToolCall] = {}
        for call in calls:
            position, made = self._waiting.get(call.call_id, (-1, None))
            if made is None or made != call or position in taken:
                raise RunError(
                    f"The call {call.call_id!r} of {call.name!r} is not one that waits for its result. Give ctx.tools "
                    "calls of the last answer of ctx.model in the same lane, each once and as the model made it. "
                    "What code decides by itself goes through ctx.call_tool, ctx.dispatch or ctx.step.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )
            taken[position] = made
        for call in calls:
            del self._waiting[call.call_id]
        return taken


def _copied(call: message_pb2.ToolCall) -> message_pb2.ToolCall:
    copy = message_pb2.ToolCall()
    copy.CopyFrom(call)
    return copy


class Lane:
    """One lane of an invocation, whose effects are sequential: that of its own code, or one that `gather` made."""

    def __init__(
        self,
        execution: Execution,
        frame: RunningAgent,
        context: "Callable[[Lane], Context]",
        *,
        scope: str | None = None,
        steps: StepNumbers | None = None,
        transcript: Transcript | None = None,
        state: LaneState | None = None,
        compaction: Compaction | None = None,
    ) -> None:
        self.execution = execution
        self.frame = frame
        self._context = context
        self.scope = frame.scope if scope is None else scope
        self.transcript = transcript or frame.transcript
        self.lane_state = state or frame.state
        self.state = StateView(self.lane_state)
        """The session's values; what is written is recorded with the next effect, or the agent's end."""
        self.sight = VisibleHistory(execution, frame, self.transcript, compaction)
        """What it sees; the window of its model calls among it."""
        self.steps = steps or StepNumbers()
        self.step_index = -1
        """The number of the lane's last step; -1 before the first."""
        self.waiting = PendingCalls(())
        """The calls of that step that nobody has run yet."""
        self._effects = 0
        self.in_flight = ""
        """The key of the effect that holds the lane; empty for none."""
        self._keys: set[str] = set()
        self.refusals = 0
        """How often an effect was refused because its code had been ended."""
        self.wake_ns = 0
        """When the last sleep ends that was handed back; 0 for none."""
        self.path = frame.run_path
        """Who has spoken in this lane so far."""

    @property
    def run_id(self) -> str:
        """The run."""
        return self.execution.facts.run_id

    @property
    def session_id(self) -> str:
        """The session."""
        return self.execution.facts.session_id

    @property
    def user_id(self) -> str:
        """The session's user."""
        return self.execution.facts.user_id

    @property
    def invocation_id(self) -> str:
        """This execution of this agent."""
        return self.frame.invocation_id

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """The agent's definition."""
        return self.frame.agent.definition

    async def run_agent(self, input: message_pb2.Message) -> Outcome:
        """Run the code of this lane's agent. Raises what that raises."""
        return await self.frame.agent.run(self._context(self), input)

    def child(self, frame: RunningAgent) -> "Lane":
        """Return the first lane of another invocation."""
        return Lane(self.execution, frame, self._context)

    def beside(self, state: LaneState, *, scope: str | None = None, steps: StepNumbers | None = None) -> "Lane":
        """Return a lane of the same invocation that begins now and runs beside others."""
        lane = Lane(
            self.execution,
            self.frame,
            self._context,
            scope=scope,
            steps=steps,
            transcript=self.transcript.lane(),
            state=state,
            compaction=self.sight.compaction,
        )
        lane.path = self.path
        return lane

    async def replayed(self, key: str, digest: str) -> event_pb2.AgentEvent | None:
        """Return the recorded result of an effect in its turn; None if the log holds none, then it has to `go_live`.

        Stops the run if the log holds another effect under this key.
        """
        gate = self.expected(key, digest)
        return await self.received(key, gate) if gate is not None else None

    def expected(self, key: str, digest: str) -> Waiter[event_pb2.AgentEvent] | None:
        """Check an effect against the log and return the gate of its recorded result, or None if there is none.

        `replayed` in two halves, for effects that begin together: each has to be expected before one is received.
        """
        self.execution.writer.check(key, digest)
        return self.execution.pump.expect(key) if key in self.execution.journal.results else None

    async def received(self, key: str, gate: Waiter[event_pb2.AgentEvent]) -> event_pb2.AgentEvent:
        """Wait for a recorded result that is expected, and apply what the log holds of its effect."""
        recorded = await gate.wait()
        self.execution.writer.observe_recorded(key)
        return recorded

    async def go_live(self, key: str) -> None:
        """Wait until an effect may touch the world. Raises CancelledError if its scope was cancelled before that."""
        await self.until_live(key)
        self.execution.cancelling.refuse_sealed(key)

    async def until_live(self, key: str) -> None:
        """Waits until an effect of this lane may go to the world: all that is recorded is handed back, sleeps over."""
        await self.execution.pump.until_live(key)
        await self.sleep_on()

    async def settle(self) -> None:
        """Does what is left before its agent ends: records its writes, and waits for a sleep that a crash cut short."""
        await self.record_state()
        if self.wake_ns and self.scope not in self.execution.journal.ends and not self.execution.writer.is_offline:
            await self.until_live(self.scope)

    async def sleep_on(self) -> None:
        """Waits for what is left of a sleep that was handed back."""
        left, self.wake_ns = self.wake_ns - self.execution.clock.now_ns(), 0
        if left > 0:
            await self.execution.tasks.asleep(self.execution.clock.sleep(left / 1e9))

    def next_key(self, explicit: str) -> str:
        """The key of the next effect of code: its number in the lane, or a name that the code gives it."""
        self.check_task()
        name = explicit
        if not name:
            name = f"e{self._effects}"
            self._effects += 1
        elif not keys.is_free(name):
            raise RunError(
                f"The key {name!r} cannot name an effect. Give 1 to 64 letters, digits, '_' or '-', and no letter e, "
                "g or s with a number alone: those are the effects without a key.",
                reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
            )
        key = keys.below(self.scope, name)
        if key in self._keys:
            raise RunError(
                f"The key {name!r} was used before in this scope. Keys of effects must be unique.",
                reason=error_pb2.ERROR_REASON_INTERNAL,
            )
        self._keys.add(key)
        return key

    async def record_state(self) -> None:
        """Records the writes to the state that wait for it."""
        if changes := self.state.taken():
            key = self.next_key("")
            await self._record_changes(key, changes)
            self.lane_state.take(changes)

    async def _record_changes(self, key: str, changes: Sequence[session_pb2.SessionStateChange]) -> None:
        asked = [part for one in changes for part in (one.key, str(one.HasField("value_json")), one.value_json)]
        digest = keys.digest("state", *asked)
        if await self.replayed(key, digest) is not None:
            return
        await self.go_live(key)
        changed = self.frame.event(key)
        changed.effect_digest = digest
        changed.session_state_changed.state_changes.extend(changes)
        self.execution.emit(changed)

    def step_key(self, name: str) -> str:
        """The key of an effect of the lane's last step."""
        return keys.below(self.scope, f"s{self.step_index}.{name}")

    def complete_steps(self) -> None:
        """End the step that the lane's last model call began: it has all its results, or nobody asked for them."""
        opened, execution = self.frame.record, self.execution
        step = opened.steps.get(self.step_key("m"))
        if step is not None:
            execution.refuse(self.frame.invocation_id, step.key)
            if not execution.writer.ends_again(step):
                execution.emit(execution.invocations.completed(opened, step, execution.clock.now_ns()))

    def effect(self, key: str) -> "EffectGuard":
        """Holds the lane while one of its effects is in flight; what was written before it is recorded first.

        Entering raises RunError CONCURRENT_EFFECTS.
        """
        return EffectGuard(self, key)

    def check_task(self) -> None:
        """Refuses an effect of a task that the code made: it could begin at any time. Raises CONCURRENT_EFFECTS."""
        if not self.execution.tasks.is_own() and not self.execution.is_refused(self.frame.invocation_id, self.scope):
            raise RunError(
                f"An effect of {self.frame.name!r} began in a task or a thread that its code made. Await effects in "
                "the agent's own coroutine; run them at once with ctx.gather(lambda lane: lane.dispatch(...), ...). "
                "Instead of asyncio.wait_for give ctx.ask `expires`, and links and tools limits of their own.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )


class EffectGuard:
    """Holds a lane while an effect is in flight."""

    __slots__ = ("_key", "_lane")

    def __init__(self, lane: "Lane", key: str) -> None:
        self._lane = lane
        self._key = key

    async def __aenter__(self) -> None:
        lane, execution = self._lane, self._lane.execution
        if execution.is_refused(lane.frame.invocation_id, self._key):
            await self._refuse()
        if lane.in_flight:
            raise RunError(
                f"The effect {self._key} began while {lane.in_flight} was in flight. Run effects one after another, or "
                "at once with ctx.gather(lambda lane: lane.dispatch(...), ...), using each lane's own context.",
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
        if kind is asyncio.CancelledError and self._lane.execution.tasks.is_cancelled_by_code():
            self._lane.execution.stop(
                NonDeterministic(
                    f"The code of {self._lane.frame.name!r} gave up its effect {self._key} while it was in flight, as "
                    "asyncio.timeout does; no log could say when. Give ctx.ask `expires`, and links and tools limits "
                    "of their own; a step may time out inside of its own work."
                )
            )

    async def _refuse(self) -> None:
        """Ends code that tries an effect after its end; `except Exception` does not catch it.

        Others get a turn first, and code that will not hear of it for ever gets no answer: it may do so in a loop.
        """
        self._lane.refusals += 1
        if self._lane.refusals <= MOST_REFUSALS:
            await asyncio.sleep(0)
            raise asyncio.CancelledError
        await self._lane.execution.tasks.abandoned()
