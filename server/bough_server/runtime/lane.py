"""What the effects of one lane have in common: its keys, their order, and what each of them is recorded after."""

from bough.v1 import agent_pb2, error_pb2, event_pb2
from bough_server.errors import RunError
from bough_server.history.transcript import Transcript
from bough_server.runtime import keys
from bough_server.runtime.execution import Execution
from bough_server.runtime.frame import Frame
from bough_server.runtime.in_flight import InFlight
from bough_server.runtime.state import LaneState, StateView, record_changes
from bough_server.runtime.tasks import Gate


class Lane:
    """One lane of an invocation, whose effects are sequential: that of its own code, or one that `gather` made."""

    def __init__(
        self,
        execution: Execution,
        frame: Frame,
        *,
        scope: str | None = None,
        transcript: Transcript | None = None,
        state: LaneState | None = None,
    ) -> None:
        self.execution = execution
        self.frame = frame
        self.scope = frame.scope if scope is None else scope
        self.transcript = transcript or frame.transcript
        self.lane_state = state or frame.state
        self.state = StateView(self.lane_state)
        """The session's values; what is written is recorded with the next effect, or the agent's end."""
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

    async def replayed(self, key: str, digest: str) -> event_pb2.AgentEvent | None:
        """Return the recorded result of an effect in its turn; None if the log holds none, then it has to `go_live`.

        Stops the run if the log holds another effect under this key.
        """
        gate = self.expected(key, digest)
        return await self.received(key, gate) if gate is not None else None

    def expected(self, key: str, digest: str) -> Gate[event_pb2.AgentEvent] | None:
        """Check an effect against the log and return the gate of its recorded result, or None if there is none.

        `replayed` in two halves, for effects that begin together: each has to be expected before one is received.
        """
        self.execution.check(key, digest)
        return self.execution.pump.expect(key) if key in self.execution.journal.results else None

    async def received(self, key: str, gate: Gate[event_pb2.AgentEvent]) -> event_pb2.AgentEvent:
        """Wait for a recorded result that is expected, and apply what the log holds of its effect."""
        recorded = await gate.wait()
        self.execution.observe_recorded(key)
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
        if self.wake_ns and self.scope not in self.execution.journal.ends and not self.execution.chronicle.is_offline:
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
            await record_changes(self, key, changes)
            self.lane_state.take(changes)

    def effect(self, key: str) -> InFlight:
        """Holds the lane while one of its effects is in flight; what was written before it is recorded first.

        Entering raises RunError CONCURRENT_EFFECTS.
        """
        return InFlight(self, key)

    def check_task(self) -> None:
        """Refuses an effect of a task that the code made: it could begin at any time. Raises CONCURRENT_EFFECTS."""
        if not self.execution.tasks.is_own() and not self.execution.is_refused(self.frame.invocation_id, self.scope):
            raise RunError(
                f"An effect of {self.frame.name!r} began in a task or a thread that its code made. Await effects in "
                "the agent's own coroutine; run them at once with ctx.gather(lambda lane: lane.dispatch(...), ...). "
                "Instead of asyncio.wait_for give ctx.ask `expires`, and links and tools limits of their own.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )
