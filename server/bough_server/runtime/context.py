"""What an agent's code has of the world: its effects, each recorded and answered from the log when it is replayed.

Effects of one lane are sequential; concurrency goes through `gather` and `tools`. Agents build no events.
"""

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from bough.v1 import agent_pb2, event_pb2, message_pb2, step_pb2
from bough_server import ids
from bough_server.engine import keys
from bough_server.engine.execution import as_run_error
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.runtime.agent import NO_DEFAULT, Answered, Context, Outcome
from bough_server.runtime.child_events import end_effect, end_others
from bough_server.runtime.compaction import fitted
from bough_server.runtime.dispatch import Dispatch
from bough_server.runtime.dispatcher import dispatch
from bough_server.runtime.effects import Value, record_value
from bough_server.runtime.lane import Lane, WaitingCalls
from bough_server.runtime.model_call import ModelEffect, ask
from bough_server.runtime.questions import question
from bough_server.runtime.tool_calls import StepCalls
from bough_server.runtime.visible_history import is_transfer

T = TypeVar("T")


class LaneContext(Lane):
    """The effects of one lane of an invocation: the `Context` that its code is given."""

    async def run_agent(self, input: message_pb2.Message) -> Outcome:
        """Run the code of this lane's agent. Raises what that raises."""
        return await self.frame.agent.run(self, input)

    # What an agent may know

    def history(self) -> list[message_pb2.Message]:
        """What this agent sees of the session and the run so far, its own input and steps included."""
        return self.sight.messages()

    def offers(self) -> list[ToolSpec]:
        """The tools and linked agents that may still be called."""
        budget, name = self.frame.budget, self.frame.name
        return [
            offer.spec
            for offer in self.frame.toolset.offers.values()
            if offer.max_calls is None or budget.calls_made(name, offer.spec.name) < offer.max_calls
        ]

    # Effects

    async def model(
        self, request: ModelRequest | Callable[[], ModelRequest], *, model: str = ""
    ) -> step_pb2.LlmResponse:
        """Asks a model; the answer's calls, if any, are for `tools`. An empty `model` is the agent's own.

        A request that is a function is made only if it is sent, and not while a log is handed back; where what it makes
        of `history` is more than the agent's history policy allows, it is made again of less.

        Raises RunError: the limit of model calls is reached, or the model's retries are used up.
        """
        self.check_task()
        index = self.steps.take()
        key = keys.below(self.scope, f"s{index}.m")
        async with self.effect(key):
            await self._end_open_calls()
            await self.execution.reach_step_end(self.step_key("m"))
            self.complete_steps()
            self.step_index, self.waiting = index, WaitingCalls(())
            if callable(request):
                request = await fitted(self, index, request, name=model or self.frame.model_name)
            response = await ask(self, ModelEffect(key=key, index=index), request, model or self.frame.model_name)
        calls = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
        self.frame.call_ids.update(call.call_id for call in calls)
        if calls:
            self.waiting = WaitingCalls(calls)
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
        self.check_task()
        async with self.effect(self.step_key("t")):
            taken = self.waiting.take(calls)
            try:
                answers = await StepCalls(self, index=self.step_index, calls=taken).run(parallel=parallel)
            finally:
                self.lane_state.join()
        # A transfer comes last: the agent that goes on sees what is before it.
        answered = sorted(zip(taken, answers, strict=True), key=lambda one: is_transfer(one[1].result))
        for position, answer in answered:
            if answer.child is not None:
                self.transcript.join(answer.child, by_call=True)
            self.transcript.say(self._tool_message(position, answer.result))
        if not self.waiting:
            await self.execution.reach_step_end(self.step_key("m"))
            self.complete_steps()
        return answers

    async def dispatch(self, agent: str, input: str | message_pb2.Message, *, key: str = "") -> message_pb2.Message:
        """Runs a linked agent and gives its answer.

        Raises RunError: it is not linked (NOT_LINKED), a limit is reached, it failed (SUB_AGENT_FAILED).
        """
        told = message_pb2.Message(parts=[message_pb2.Part(text=input)]) if isinstance(input, str) else input
        link = next((one for one in self.definition.sub_agents if one.agent == agent), agent_pb2.AgentLink(agent=agent))
        effect = self.next_key(key)
        async with self.effect(effect):
            work = Dispatch(key=effect, agent=agent, link=link, input=told)
            ended = await dispatch(
                self, work, on_failure=lambda error: end_others(self.execution, self.frame, effect, error)
            )
        if ended.transcript is not None:
            self.transcript.join(ended.transcript, by_call=False)
        if ended.outcome is None:
            raise RunError.of(ended.result.error)
        return ended.outcome.output

    async def gather(self, *lanes: Callable[[Context], Awaitable[T]]) -> list[T]:
        """Runs lanes at once, each with a context of its own, and waits for all; results in lane order.

        Raises what the first lane in order raised, after all have ended.
        """
        if not lanes:
            return []
        group = self.next_key("")
        async with self.effect(group):
            return await self._gathered(group, lanes)

    async def _gathered(self, group: str, codes: Sequence[Callable[[Context], Awaitable[T]]]) -> list[T]:
        execution, frame = self.execution, self.frame
        numbers = self.steps.split(len(codes))
        lanes = [
            self.beside(self.lane_state.fork(f"{group}.", place), scope=f"{group}.{place}", steps=own)
            for place, own in enumerate(numbers)
        ]
        pairs = zip(lanes, codes, strict=True)
        tasks = [execution.tasks.spawn(lane.scope, _in_lane(lane, code)) for lane, code in pairs]
        frame.lanes.update({task: lane.scope for task, lane in zip(tasks, lanes, strict=True)})
        await execution.tasks.join(*tasks)
        for task in tasks:
            frame.lanes.pop(task, None)
        self._join(lanes)
        failures = [task.exception() for task in tasks if not task.cancelled()]
        if frame.abort is not None:
            raise frame.abort
        if first := next(filter(None, failures), None):
            raise first
        return [task.result() for task in tasks]

    def _join(self, lanes: "Sequence[LaneContext]") -> None:
        """Take in what lanes of its code saw, said and wrote, after their ends."""
        self.steps.pass_over([lane.steps for lane in lanes])
        self.wake_ns = max([self.wake_ns, *(lane.wake_ns for lane in lanes)])
        for lane in lanes:
            self.transcript.entries.extend(lane.transcript.entries)
        self.lane_state.join()

    async def now(self) -> datetime:
        """The time, the same on a replay."""

        async def read() -> str:
            return json.dumps(str(self.execution.clock.now_ns()))

        value = await self._value(Value(self.next_key(""), event_pb2.VALUE_KIND_NOW, "now"), read)
        return datetime.fromtimestamp(int(json.loads(value)) / 1e9, UTC)

    async def sleep(self, seconds: float) -> None:
        """Waits; after a crash only for what is left of it. A replay of a finished run does not wait."""
        key = self.next_key("")

        async def wake() -> str:
            return json.dumps(str(self.execution.clock.now_ns() + int(seconds * 1e9)))

        async with self.effect(key):
            value = await record_value(self, Value(key, event_pb2.VALUE_KIND_SLEEP, "sleep"), wake)
            self.wake_ns = max(self.wake_ns, int(json.loads(value)))
            if self.execution.pump.live:
                await self.sleep_on()

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
        effect = self.next_key(key)
        async with self.effect(effect):
            value = await question(self, effect, prompt, schema=schema, within=expires, default=default)
        return json.loads(value)

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Does any other work on the world once, and gives its value: something that JSON can hold.

        Until its value is recorded it may run again. Raises RunError TOOL_FAILED where the work raises.
        """

        async def do() -> str:
            return json.dumps(await work())

        return json.loads(await self._value(Value(self.next_key(key), event_pb2.VALUE_KIND_STEP, name), do))

    def new_id(self) -> str:
        """A new UUID, the same on a replay."""
        return ids.derived_id(self.execution.facts.key_root, self.next_key(""))

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on a replay; each reading begins a new row of them."""
        return random.Random(ids.derived_id(self.execution.facts.key_root, self.next_key("")))

    # Their common rules

    async def _value(self, value: Value, work: Callable[[], Awaitable[str]]) -> str:
        async with self.effect(value.key):
            return await record_value(self, value, work)

    async def _end_open_calls(self) -> None:
        """Ends the calls of the step before that its code no longer waits for."""
        calls = self.step_key("t")
        for key in [key for key in self.frame.opened.effects if key.startswith(calls)]:
            await end_effect(self.execution, self.frame, key)

    def _tool_message(self, position: int, result: message_pb2.ToolResult) -> message_pb2.Message:
        key = self.step_key(f"t{position}")
        return message_pb2.Message(
            message_id=ids.message_id(self.execution.facts.key_root, key, "TOOL"),
            role=message_pb2.ROLE_TOOL,
            kind=message_pb2.MESSAGE_KIND_TOOL,
            author=self.frame.name,
            invocation_id=self.frame.invocation_id,
            parts=[message_pb2.Part(tool_result=result)],
        )


async def _in_lane(lane: LaneContext, code: Callable[[Context], Awaitable[T]]) -> T:
    """Run one lane of an agent's code to its end, with the state that it wrote."""
    try:
        result = await code(lane)
        await lane.record_state()
        return result
    except SystemExit as error:  # it would end the server's event loop
        raise as_run_error(error) from error
