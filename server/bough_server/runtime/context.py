"""Implementation of the Context protocol for one lane."""

import json
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from bough.v1 import agent_pb2, error_pb2, event_pb2, message_pb2, step_pb2
from bough_server import ids
from bough_server.engine.execution import to_run_error
from bough_server.errors import RunError
from bough_server.log import events
from bough_server.messages import calls_of, copy_of, text_of
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.runtime.agent import NO_DEFAULT, CallResult, Context, Work, value_of
from bough_server.runtime.child_call import Dispatch
from bough_server.runtime.code_calls import call_from_code
from bough_server.runtime.compaction import fit_request
from bough_server.runtime.dispatcher import cancel_effect, cancel_others, dispatch
from bough_server.runtime.effects import Value, record_value
from bough_server.runtime.failure_log import log_failure
from bough_server.runtime.lane import Lane, PendingCalls
from bough_server.runtime.model_call import ModelCallSpec, call_model
from bough_server.runtime.questions import ask_question
from bough_server.runtime.tool_calls import ParallelToolCalls
from bough_server.runtime.visible_history import is_transfer

Item = TypeVar("Item")
T = TypeVar("T")


class LaneContext:
    """The `Context` of one lane of an invocation. Agents' code sees these names and nothing of the lane itself."""

    __slots__ = ("_lane",)

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    # What an agent may know

    @property
    def run_id(self) -> str:
        """The run."""
        return self._lane.execution.facts.run_id

    @property
    def session_id(self) -> str:
        """The session."""
        return self._lane.execution.facts.session_id

    @property
    def tenant_id(self) -> str:
        """The tenant of the run's user."""
        return self._lane.execution.facts.tenant_id

    @property
    def user_id(self) -> str:
        """The run's user."""
        return self._lane.execution.facts.user_id

    @property
    def invocation_id(self) -> str:
        """This execution of this agent."""
        return self._lane.running.invocation_id

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """A copy of the definition that the agent runs under."""
        # The definition itself is shared by all runs: what code changes must not reach them.
        return copy_of(self._lane.running.agent.definition)

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The session's values; what is written is recorded with the next effect, or the agent's end."""
        return self._lane.state

    @property
    def step_index(self) -> int:
        """The number of this context's last step, from 0; -1 before the first."""
        return self._lane.step_index

    def history(self) -> list[message_pb2.Message]:
        """Return what this agent sees of the session and the run so far."""
        # Copies: the messages are shared by the runs of the session, and code may change what it is given.
        return [copy_of(message) for message in self._lane.visible_history.messages()]

    def offers(self) -> list[ToolSpec]:
        """Return the tools and linked agents that may still be called."""
        running = self._lane.running
        budget, name = running.budget, running.name
        return [
            offer.spec
            for offer in running.toolset.offers.values()
            if offer.max_calls is None or budget.count_calls(name, offer.spec.name) < offer.max_calls
        ]

    # Effects

    async def model(
        self, request: ModelRequest | Callable[[], ModelRequest], *, model: str = ""
    ) -> step_pb2.LlmResponse:
        """Ask a model, after ending what the step before left open."""
        lane = self._lane
        lane.check_task()
        index = lane.step_index + 1
        key = lane.key(f"s{index}.m")
        async with lane.guard_effect(key):
            await _end_open_calls(lane)
            await lane.execution.reach_step_end(lane.step_key("m"))
            lane.complete_steps()
            lane.step_index, lane.waiting = index, PendingCalls(())
            if callable(request):
                request = await fit_request(lane, index, request, name=model or lane.running.model_name)
            response = await call_model(
                lane, ModelCallSpec(key=key, index=index), request, model or lane.running.model_name
            )
        calls = calls_of(response.message)
        lane.running.call_ids.update(call.call_id for call in calls)
        if calls:
            lane.waiting = PendingCalls(calls)
            lane.transcript.add_message(response.message)
        return response

    async def tools(self, calls: Sequence[message_pb2.ToolCall], *, parallel: bool = True) -> list[CallResult]:
        """Run calls of the last model answer, and end the step when all of them have results."""
        if not calls:
            return []
        lane = self._lane
        lane.check_task()
        async with lane.guard_effect(lane.step_key("t")):
            taken = lane.waiting.take(calls)
            try:
                answers = await ParallelToolCalls(lane, index=lane.step_index, calls=taken).run(parallel=parallel)
            finally:
                lane.lane_state.join()
        # A transfer comes last: the agent that goes on sees what is before it.
        answered = sorted(zip(taken, answers, strict=True), key=lambda one: is_transfer(one[1].result))
        for position, answer in answered:
            if answer.child is not None:
                lane.transcript.join(answer.child, by_call=True)
            lane.transcript.add_message(_tool_message(lane, position, answer.result))
        if not lane.waiting:
            await lane.execution.reach_step_end(lane.step_key("m"))
            lane.complete_steps()
        return answers

    async def dispatch(self, agent: str, input: str | message_pb2.Message, *, key: str = "") -> message_pb2.Message:
        """Run a linked agent and return its answer."""
        lane = self._lane
        told = message_pb2.Message(parts=[message_pb2.Part(text=input)]) if isinstance(input, str) else input
        links = lane.running.agent.definition.sub_agents
        link = next((each for each in links if each.agent == agent), agent_pb2.AgentLink(agent=agent))
        effect = lane.next_key(key)
        async with lane.guard_effect(effect):
            # Not by run_child: each of its children sees who has spoken before it, those of code do not.
            ended = await dispatch(
                lane,
                Dispatch(key=effect, link=link, input=told),
                on_failure=lambda error: cancel_others(lane.execution, lane.running, effect, error),
            )
        if ended.transcript is not None:
            lane.transcript.join(ended.transcript, by_call=False)
        if ended.outcome is None:
            raise RunError.of(ended.result.error)
        return ended.outcome.output

    async def call_tool(self, name: str, /, **arguments: object) -> Any:
        """Call one of the agent's own tools; return its JSON value, else its text."""
        lane = self._lane
        key = lane.next_key("")
        async with lane.guard_effect(key):
            result = await call_from_code(lane, key, name, arguments)
        if result.HasField("error"):
            raise RunError.of(result.error)
        output = message_pb2.Message(parts=result.parts)
        try:
            return json.loads(value_of(output))
        except (ValueError, RecursionError):  # a tool made its own parts, and no JSON in them
            return text_of(output)

    async def gather(self, *work: Work[T]) -> list[T]:
        """Run coroutine functions at once and return their results in the order given, after all have ended."""
        return await self._run_parallel([_bind_arguments(*one) if isinstance(one, tuple) else one for one in work])

    async def map(self, fn: Callable[[Context, Item], Awaitable[T]], items: Iterable[Item]) -> list[T]:
        """Run a coroutine function of every item at once; results in the order of the items."""
        return await self._run_parallel([_bind_arguments(fn, item) for item in items])

    async def _run_parallel(self, codes: Sequence[Callable[[Context], Awaitable[T]]]) -> list[T]:
        if not codes:
            return []
        group = self._lane.next_key("")
        async with self._lane.guard_effect(group):
            return await _run_lanes(self._lane, group, codes, self._build_context)

    def _build_context(self, lane: Lane) -> Context:
        """Return the context of code that runs in a lane below this one's."""
        return LaneContext(lane)

    async def now(self) -> datetime:
        """Return the current time; a replay returns the recorded one."""

        async def read_clock() -> str:
            return json.dumps(str(self._lane.execution.clock.now_ns()))

        value = await self._record_value(Value(self._lane.next_key(""), event_pb2.VALUE_KIND_NOW, "now"), read_clock)
        return datetime.fromtimestamp(int(json.loads(value)) / 1e9, UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait; after a crash only for what is left of it."""
        lane = self._lane
        key = lane.next_key("")

        async def read_wake_time() -> str:
            return json.dumps(str(lane.execution.clock.now_ns() + int(seconds * 1e9)))

        async with lane.guard_effect(key):
            value = await record_value(lane, Value(key, event_pb2.VALUE_KIND_SLEEP, "sleep"), read_wake_time)
            lane.wake_ns = max(lane.wake_ns, int(json.loads(value)))
            if lane.execution.barrier.live:
                await lane.finish_sleep()

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
        lane = self._lane
        effect = lane.next_key(key)
        async with lane.guard_effect(effect):
            value = await ask_question(lane, effect, prompt, schema=schema, within=expires, default=default)
        return json.loads(value)

    async def step(self, name: str, work: Callable[[], Awaitable[Any]], *, key: str = "") -> Any:
        """Run other work with side effects and return its value."""

        async def run_work() -> str:
            return json.dumps(await work(), allow_nan=False)

        return json.loads(
            await self._record_value(Value(self._lane.next_key(key), event_pb2.VALUE_KIND_STEP, name), run_work)
        )

    async def read_file(self, blob: message_pb2.Blob) -> bytes:
        """Return the bytes of a file."""
        files = self._lane.execution.files
        if files is None:
            raise RunError("This replay cannot read files.", reason=error_pb2.ERROR_REASON_INTERNAL)
        return await files.read(blob)

    def new_id(self) -> str:
        """Return a new UUID, the same on a replay."""
        return self._derive_id()

    @property
    def random(self) -> random.Random:
        """Random numbers that are the same on a replay."""
        return random.Random(self._derive_id())

    # Their common rules

    async def _record_value(self, value: Value, work: Callable[[], Awaitable[str]]) -> str:
        async with self._lane.guard_effect(value.key):
            return await record_value(self._lane, value, work)

    def _derive_id(self) -> str:
        return ids.derive_id(self._lane.execution.facts.key_root, self._lane.next_key(""))


def lane_of(ctx: Context) -> Lane:
    """Return the lane behind a context, for agents that the runtime knows. Raises TypeError if there is none."""
    if not isinstance(ctx, LaneContext):
        raise TypeError(f"Expected a context created by this server, got {type(ctx).__name__}.")
    return ctx._lane


async def _end_open_calls(lane: Lane) -> None:
    """End the calls of the step before that its code no longer waits for."""
    calls = lane.step_key("t")
    for key in [key for key in lane.running.open_invocation.effects if key.startswith(calls)]:
        await cancel_effect(lane.execution, lane.running, key)


def _tool_message(lane: Lane, position: int, result: message_pb2.ToolResult) -> message_pb2.Message:
    key = lane.step_key(f"t{position}")
    recorded_by = events.TOOL_FAILED if result.HasField("error") else events.TOOL_COMPLETED
    message = message_pb2.Message(
        message_id=lane.execution.message_id(key, recorded_by, "TOOL"),
        role=message_pb2.ROLE_TOOL,
        kind=message_pb2.MESSAGE_KIND_TOOL,
        author=lane.running.name,
        invocation_id=lane.running.invocation_id,
    )
    message.parts.add().tool_result.CopyFrom(result)  # a part that is passed to Message() is copied twice
    return message


def _bind_arguments(fn: Callable[..., Awaitable[T]], *arguments: object) -> Callable[[Context], Awaitable[T]]:
    """A function of a context alone."""
    return lambda ctx: fn(ctx, *arguments)


async def _run_lanes(
    lane: Lane,
    group: str,
    codes: Sequence[Callable[[Context], Awaitable[T]]],
    build_context: Callable[[Lane], Context],
) -> list[T]:
    """Run code in lanes of one group, and return the results when all have ended."""
    execution, running = lane.execution, lane.running
    lanes = [
        lane.fork_lane(lane.lane_state.fork(f"{group}.", place), scope=f"{group}.{place}")
        for place in range(len(codes))
    ]
    pairs = zip(lanes, codes, strict=True)
    tasks = [
        execution.scheduler.spawn(below.scope, _run_lane(below, code, build_context(below))) for below, code in pairs
    ]
    running.lanes.update({task: below.scope for task, below in zip(tasks, lanes, strict=True)})
    await execution.scheduler.join(*tasks)
    for task in tasks:
        running.lanes.pop(task, None)
    _join(lane, lanes)
    failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if execution.barrier.live:
        for error in failures[1:]:  # only the first one is raised
            log_failure("parallel path failed", error)
    if running.abort is not None:
        raise running.abort
    if failures:
        raise failures[0]
    return [task.result() for task in tasks]


async def _run_lane(lane: Lane, code: Callable[[Context], Awaitable[T]], ctx: Context) -> T:
    """Run one lane of an agent's code to its end, and record what it left of the state."""
    try:
        result = await code(ctx)
        await lane.record_state()
        return result
    except (KeyboardInterrupt, SystemExit) as error:  # they would end the server's event loop
        raise to_run_error(error) from error


def _join(lane: Lane, lanes: Sequence[Lane]) -> None:
    """Apply what lanes of an agent's code saw, said and wrote, after their ends."""
    lane.wake_ns = max([lane.wake_ns, *(below.wake_ns for below in lanes)])
    for below in lanes:
        lane.transcript.entries.extend(below.transcript.entries)
    lane.lane_state.join()
