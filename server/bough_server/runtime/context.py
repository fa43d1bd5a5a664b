"""The effects of one lane, as the code of an agent is given them; what each promises is said in agent.Context."""

import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from bough.v1 import agent_pb2, event_pb2, message_pb2, step_pb2
from bough_server import events, ids
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
from bough_server.runtime.lane import Lane, PendingCalls
from bough_server.runtime.model_call import ModelCallSpec, ask
from bough_server.runtime.questions import question
from bough_server.runtime.tool_calls import ParallelToolCalls
from bough_server.runtime.visible_history import is_transfer

T = TypeVar("T")


class LaneContext(Lane):
    """The effects of one lane of an invocation: the `Context` that its code is given."""

    async def run_agent(self, input: message_pb2.Message) -> Outcome:
        """Run the code of this lane's agent. Raises what that raises."""
        return await self.frame.agent.run(self, input)

    # What an agent may know

    def history(self) -> list[message_pb2.Message]:
        """Return what this agent sees of the session and the run so far."""
        return self.sight.messages()

    def offers(self) -> list[ToolSpec]:
        """Return the tools and linked agents that may still be called."""
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
        """Ask a model, after ending what the step before left open."""
        self.check_task()
        index = self.steps.take()
        key = keys.below(self.scope, f"s{index}.m")
        async with self.effect(key):
            await self._end_open_calls()
            await self.execution.reach_step_end(self.step_key("m"))
            self.complete_steps()
            self.step_index, self.waiting = index, PendingCalls(())
            if callable(request):
                request = await fitted(self, index, request, name=model or self.frame.model_name)
            response = await ask(self, ModelCallSpec(key=key, index=index), request, model or self.frame.model_name)
        calls = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
        self.frame.call_ids.update(call.call_id for call in calls)
        if calls:
            self.waiting = PendingCalls(calls)
            self.transcript.say(response.message)
        return response

    async def tools(self, calls: Sequence[message_pb2.ToolCall], *, parallel: bool = True) -> list[Answered]:
        """Run calls of the last model answer, and end the step when all of them have results."""
        if not calls:
            return []
        self.check_task()
        async with self.effect(self.step_key("t")):
            taken = self.waiting.take(calls)
            try:
                answers = await ParallelToolCalls(self, index=self.step_index, calls=taken).run(parallel=parallel)
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
        """Run a linked agent and return its answer."""
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
        """Run lanes at once and return their results in lane order, after all have ended."""
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
        """Return the time, the same on a replay."""

        async def read() -> str:
            return json.dumps(str(self.execution.clock.now_ns()))

        value = await self._value(Value(self.next_key(""), event_pb2.VALUE_KIND_NOW, "now"), read)
        return datetime.fromtimestamp(int(json.loads(value)) / 1e9, UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait; after a crash only for what is left of it."""
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
        """Ask the user, and return the answer: a JSON value."""
        effect = self.next_key(key)
        async with self.effect(effect):
            value = await question(self, effect, prompt, schema=schema, within=expires, default=default)
        return json.loads(value)

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Do other work on the world once, and return its value."""

        async def do() -> str:
            return json.dumps(await work())

        return json.loads(await self._value(Value(self.next_key(key), event_pb2.VALUE_KIND_STEP, name), do))

    def new_id(self) -> str:
        """Return a new UUID, the same on a replay."""
        return ids.derived_id(self.execution.facts.key_root, self.next_key(""))

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on a replay."""
        return random.Random(ids.derived_id(self.execution.facts.key_root, self.next_key("")))

    # Their common rules

    async def _value(self, value: Value, work: Callable[[], Awaitable[str]]) -> str:
        async with self.effect(value.key):
            return await record_value(self, value, work)

    async def _end_open_calls(self) -> None:
        """Ends the calls of the step before that its code no longer waits for."""
        calls = self.step_key("t")
        for key in [key for key in self.frame.record.effects if key.startswith(calls)]:
            await end_effect(self.execution, self.frame, key)

    def _tool_message(self, position: int, result: message_pb2.ToolResult) -> message_pb2.Message:
        key = self.step_key(f"t{position}")
        recorded_by = events.TOOL_FAILED if result.HasField("error") else events.TOOL_COMPLETED
        return message_pb2.Message(
            message_id=self.execution.message_id(key, recorded_by, "TOOL"),
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
