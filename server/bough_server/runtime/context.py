"""What an agent's code has of the world: its effects, each recorded and answered from the log when it is replayed.

Effects of one lane are sequential; concurrency goes through `gather` and `tools`. Agents build no events.
"""

import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, step_pb2
from bough_server import ids
from bough_server.errors import RunError
from bough_server.history.build import build
from bough_server.history.transcript import Said, Transcript
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.runtime import keys
from bough_server.runtime.agent import llm_of
from bough_server.runtime.asking import ask
from bough_server.runtime.calls import Answered, StepCalls
from bough_server.runtime.dispatcher import dispatch
from bough_server.runtime.dispatches import Dispatch
from bough_server.runtime.ends import end_effect, end_others
from bough_server.runtime.execution import Execution, as_run_error
from bough_server.runtime.frame import Frame
from bough_server.runtime.questions import NO_DEFAULT, question
from bough_server.runtime.steps import StepNumbers, WaitingCalls
from bough_server.runtime.transfers import is_transfer, skip_transfers, without_transfers
from bough_server.runtime.values import Value, record_value
from bough_server.store.ports import StoredMessage

T = TypeVar("T")


class Context:
    """The effects of one lane of an invocation; the lane of its own code, or one that `gather` made."""

    def __init__(
        self,
        execution: Execution,
        frame: Frame,
        *,
        scope: str | None = None,
        steps: StepNumbers | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.execution = execution
        self.frame = frame
        self.scope = frame.scope if scope is None else scope
        self.transcript = transcript or frame.transcript
        self._steps = steps or StepNumbers()
        self._effects = 0
        self._step = -1
        self._waiting = WaitingCalls(())
        self._in_flight = ""
        self._keys: set[str] = set()
        self._wake_ns = 0
        self.path = frame.run_path
        """Who has spoken in this lane so far."""

    # What an agent may know

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

    @property
    def step_index(self) -> int:
        """The number of the lane's last step; -1 before the first."""
        return self._step

    def history(self) -> list[message_pb2.Message]:
        """What this agent sees of the session and the run so far, its own input and steps included."""
        session = (Said(one.message, one.agent, one.chain) for one in self.execution.session if not _is_relayed(one))
        if not llm_of(self.definition).skip_transfer_messages:
            return build(self.transcript, session, scope=self.frame.history)
        return without_transfers(build(self.transcript, session, scope=self.frame.history, rewrite=skip_transfers))

    def offers(self) -> list[ToolSpec]:
        """The tools and linked agents that may still be called."""
        made, name = self.execution.calls_made, self.frame.name
        return [
            offer.spec
            for offer in self.frame.toolset.offers.values()
            if offer.max_calls is None or made[name, offer.spec.name] < offer.max_calls
        ]

    # Effects

    async def model(
        self, request: ModelRequest | Callable[[], ModelRequest], *, model: str = ""
    ) -> step_pb2.LlmResponse:
        """Asks a model; the answer's calls, if any, are for `tools`. An empty `model` is the agent's own.

        A request that is a function is made only if it is sent, and not while a log is handed back.

        Raises RunError: the limit of model calls is reached, or the model's retries are used up.
        """
        index = self._steps.take()
        key = keys.below(self.scope, f"s{index}.m")
        with self.effect(key):
            await self._end_open_calls()
            await self.execution.reach_step_end(keys.below(self.scope, f"s{self._step}.m"))
            self.complete_steps()
            self._step, self._waiting = index, WaitingCalls(())
            response = await ask(self, key, index, request, model or self.frame.model_name)
        calls = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
        self.frame.call_ids.update(call.call_id for call in calls)
        if calls:
            self._waiting = WaitingCalls(calls)
            self.transcript.say(response.message)
        return response

    async def tools(self, calls: Sequence[message_pb2.ToolCall], *, parallel: bool = True) -> list[Answered]:
        """Runs calls of the last model answer, all or some, linked agents among them; results in the order given.

        The step ends when all have results, or with the next model call. Nothing that goes wrong in a call raises: the
        model is to see it. Raises RunError: BAD_ARGUMENTS where the last answer has no such call or it was run before,
        SUB_AGENT_FAILED where a sub-agent's failure aborts this agent.
        """
        if not calls:
            return []
        with self.effect(keys.below(self.scope, f"s{self._step}.t")):
            taken = self._waiting.take(calls)
            answers = await StepCalls(self, index=self._step, calls=taken).run(parallel=parallel)
        # A transfer comes last: the agent that goes on sees what is before it.
        answered = sorted(zip(taken, answers, strict=True), key=lambda one: is_transfer(one[1].result))
        for position, answer in answered:
            if answer.child is not None:
                self.transcript.join(answer.child, by_call=True)
            self.transcript.say(self._tool_message(position, answer.result))
        if not self._waiting:
            await self.execution.reach_step_end(keys.below(self.scope, f"s{self._step}.m"))
            self.complete_steps()
        return answers

    async def dispatch(self, agent: str, input: str | message_pb2.Message, *, key: str = "") -> message_pb2.Message:
        """Runs a linked agent and gives its answer.

        Raises RunError: it is not linked (NOT_LINKED), a limit is reached, it failed (SUB_AGENT_FAILED).
        """
        told = message_pb2.Message(parts=[message_pb2.Part(text=input)]) if isinstance(input, str) else input
        link = next((one for one in self.definition.sub_agents if one.agent == agent), agent_pb2.AgentLink(agent=agent))
        effect = self._key(key)
        with self.effect(effect):
            work = Dispatch(key=effect, agent=agent, link=link, input=told)
            ended = await dispatch(self, work, on_failure=lambda _: end_others(self.execution, self.frame, effect))
        if ended.transcript is not None:
            self.transcript.join(ended.transcript, by_call=False)
        if ended.outcome is None:
            error = ended.result.error
            raise RunError(error.message, reason=error.reason, retryable=error.retryable)
        return ended.outcome.output

    async def gather(self, *lanes: "Callable[[Context], Awaitable[T]]") -> list[T]:
        """Runs lanes at once, each with a context of its own, and waits for all; results in lane order.

        Raises what the first lane in order raised, after all have ended.
        """
        if not lanes:
            return []
        group = self._key("")
        with self.effect(group):
            numbers = self._steps.split(len(lanes))
            contexts = [
                Context(
                    self.execution, self.frame, scope=f"{group}.{lane}", steps=own, transcript=self.transcript.lane()
                )
                for lane, own in enumerate(numbers)
            ]

            async def run(ctx: Context, lane: "Callable[[Context], Awaitable[T]]") -> T:
                try:
                    return await lane(ctx)
                except SystemExit as error:  # it would end the server's event loop
                    raise as_run_error(error) from error

            pairs = zip(contexts, lanes, strict=True)
            tasks = [self.execution.tasks.spawn(ctx.scope, run(ctx, lane)) for ctx, lane in pairs]
            self.frame.lanes.update({task: ctx.scope for task, ctx in zip(tasks, contexts, strict=True)})
            await self.execution.tasks.join(*tasks)
            for task in tasks:
                self.frame.lanes.pop(task, None)
            self._steps.pass_over(numbers)
            self._wake_ns = max([self._wake_ns, *(ctx._wake_ns for ctx in contexts)])
            for ctx in contexts:
                self.transcript.entries.extend(ctx.transcript.entries)
        failures = [task.exception() for task in tasks if not task.cancelled()]
        if self.frame.abort is not None:
            raise self.frame.abort
        if first := next(filter(None, failures), None):
            raise first
        return [task.result() for task in tasks]

    async def now(self) -> datetime:
        """The time, the same on a replay."""

        async def read() -> str:
            return json.dumps(str(self.execution.clock.now_ns()))

        value = await self._value(Value(self._key(""), event_pb2.VALUE_KIND_NOW, "now"), read)
        return datetime.fromtimestamp(int(json.loads(value)) / 1e9, UTC)

    async def sleep(self, seconds: float) -> None:
        """Waits; after a crash only for what is left of it. A replay of a finished run does not wait."""
        key = self._key("")

        async def wake() -> str:
            return json.dumps(str(self.execution.clock.now_ns() + int(seconds * 1e9)))

        with self.effect(key):
            value = await record_value(self, Value(key, event_pb2.VALUE_KIND_SLEEP, "sleep"), wake)
            self._wake_ns = max(self._wake_ns, int(json.loads(value)))
            if self.execution.pump.live:
                await self._sleep_on()

    async def ask(
        self,
        prompt: str,
        *,
        schema: Mapping[str, Any] | None = None,
        expires: float | None = None,
        default: object = NO_DEFAULT,
        key: str = "",
    ) -> Any:
        """Asks whoever follows the run, and gives the answer: a JSON value that fits the schema, if one is given.

        The run waits for as long as it takes, over restarts, or for `expires` seconds; then the default is the answer.
        Raises RunError: INPUT_EXPIRED without a default, BAD_ARGUMENTS where the default does not fit.
        """
        effect = self._key(key)
        with self.effect(effect):
            value = await question(self, effect, prompt, schema=schema, within=expires, default=default)
        return json.loads(value)

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Does any other work on the world once, and gives its value: something that JSON can hold.

        Until its value is recorded it may run again. Raises RunError TOOL_FAILED where the work raises.
        """

        async def do() -> str:
            return json.dumps(await work())

        return json.loads(await self._value(Value(self._key(key), event_pb2.VALUE_KIND_STEP, name), do))

    def new_id(self) -> str:
        """A new UUID, the same on a replay."""
        return ids.derived_id(self.execution.facts.key_root, self._key(""))

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on a replay; each reading begins a new row of them."""
        return random.Random(ids.derived_id(self.execution.facts.key_root, self._key("")))

    # Their common rules

    async def _value(self, value: Value, work: Callable[[], Awaitable[str]]) -> str:
        with self.effect(value.key):
            return await record_value(self, value, work)

    async def until_live(self, key: str) -> None:
        """Waits until an effect of this lane may go to the world: all that is recorded is handed back, sleeps over."""
        await self.execution.pump.until_live(key)
        await self._sleep_on()

    async def settle(self) -> None:
        """Waits, before its agent ends, for the rest of a sleep that a crash cut short."""
        if self._wake_ns and self.scope not in self.execution.journal.ends and not self.execution.chronicle.is_offline:
            await self.until_live(self.scope)

    async def _sleep_on(self) -> None:
        left, self._wake_ns = self._wake_ns - self.execution.clock.now_ns(), 0
        if left > 0:
            await self.execution.tasks.asleep(self.execution.clock.sleep(left / 1e9))

    def _key(self, explicit: str) -> str:
        """The key of the next effect of code: its number in the lane, or a name that the code gives it."""
        name = explicit
        if not name:
            name = f"e{self._effects}"
            self._effects += 1
        elif not keys.is_free(name):
            raise RunError(
                f"The key {name!r} cannot name an effect. Give 1 to 64 letters, digits, '_' or '-', and no letter e or "
                "s with a number alone: those are the effects without a key.",
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

    async def _end_open_calls(self) -> None:
        """Ends the calls of the step before that its code no longer waits for."""
        calls = keys.below(self.scope, f"s{self._step}.t")
        for key in [key for key in self.frame.opened.effects if key.startswith(calls)]:
            await end_effect(self.execution, self.frame, key)

    @contextmanager
    def effect(self, key: str) -> Iterator[None]:
        """Holds the lane while one of its effects is in flight. Raises RunError CONCURRENT_EFFECTS."""
        self.execution.refuse(self.frame.invocation_id, key)
        if self._in_flight:
            raise RunError(
                f"The effect {key} began while {self._in_flight} was in flight. Run effects one after another, or at "
                "once with ctx.gather(lambda lane: lane.dispatch(...), ...), using each lane's own context.",
                reason=error_pb2.ERROR_REASON_CONCURRENT_EFFECTS,
            )
        self._in_flight = key
        try:
            yield
        finally:
            self._in_flight = ""

    def complete_steps(self) -> None:
        """Ends the step that the lane's last model call began: it has all its results, or nobody asked for them."""
        key = keys.below(self.scope, f"s{self._step}.m")
        opened = self.frame.opened
        if key in opened.steps:
            only = opened.steps[key]
            made = self.execution.invocations.completing_steps(opened, self.execution.clock.now_ns())
            self.execution.emit(*[event for event in made if event.effect_key == only.key])

    def _tool_message(self, position: int, result: message_pb2.ToolResult) -> message_pb2.Message:
        key = keys.below(self.scope, f"s{self._step}.t{position}")
        return message_pb2.Message(
            message_id=ids.message_id(self.execution.facts.key_root, key, "TOOL"),
            role=message_pb2.ROLE_TOOL,
            kind=message_pb2.MESSAGE_KIND_TOOL,
            author=self.frame.name,
            invocation_id=self.frame.invocation_id,
            parts=[message_pb2.Part(tool_result=result)],
        )


def _is_relayed(stored: StoredMessage) -> bool:
    """Whether an agent only handed a message on: it is in the session as its author's, too."""
    message = stored.message
    return message.role == message_pb2.ROLE_ASSISTANT and message.author != stored.agent
