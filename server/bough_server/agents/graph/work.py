"""The work of a visit: what a node of each kind does with its input."""

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bough.v1 import action_pb2, agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server.agents.flow import failure
from bough_server.agents.graph.inputs import fill_prompt
from bough_server.agents.graph.values import from_message, mismatch, to_message, to_text
from bough_server.agents.llm import OutputRepair
from bough_server.errors import RunError, text_of_error
from bough_server.functions import NodeFunction, Values
from bough_server.log.session_state import json_text
from bough_server.messages import calls_of, copy_of, text_of, user
from bough_server.models.model import ModelRequest, ToolSpec
from bough_server.runtime.agent import NO_DEFAULT, value_of
from bough_server.runtime.child_call import Abort, Dispatch, DispatchResult
from bough_server.runtime.children import run_child
from bough_server.runtime.code_calls import call_from_code
from bough_server.runtime.context import LaneContext
from bough_server.runtime.effects import run_code
from bough_server.runtime.lane import Lane
from bough_server.runtime.model_call import ModelCallSpec, call_model
from bough_server.runtime.questions import ask_question
from bough_server.runtime.tool_calls import ParallelToolCalls
from bough_server.templates import render
from bough_server.tools.execution import THREADS
from bough_server.truncation import truncate_results


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the work of a visit gave: its value and, of an agent whose answer it is, the message, author and action."""

    value: Any
    message: message_pb2.Message | None = None
    author: str = ""
    action: action_pb2.AgentAction | None = None


class NodeFailure(RunError):
    """The failure of a graph by one of its nodes, with whose name its message begins."""


EndEvents = Callable[[Result | RunError, Abort | None], Sequence[event_pb2.AgentEvent]]
"""Returns the events that end a visit, to append together with the end of the agent that was its work."""


async def run_agent(
    lane: Lane, link: agent_pb2.AgentLink, value: Any, *, started: Sequence[event_pb2.AgentEvent], on_end: EndEvents
) -> Result:
    """Run a linked agent with a value as its input. Raises RunError with its failure, and Abort."""
    work = Dispatch(
        key=lane.key("c0"),
        link=link,
        trigger=execution_pb2.INVOCATION_TRIGGER_GRAPH_NODE,
        input=_to_input(lane, value),
        beside_start=started,
        beside_end=lambda ended, abort: on_end(_result_of(ended), abort),
    )
    made = _result_of(await run_child(lane, work))
    if isinstance(made, RunError):
        raise made
    return made


def _to_input(lane: Lane, value: Any) -> message_pb2.Message | None:
    """Return the input of an agent; None for the graph's own input, which the history has already, with its files."""
    own = lane.running.input
    if isinstance(value, str) and value == text_of(own) and not any(part.data_json for part in own.parts):
        return None
    part = message_pb2.Part(text=value) if isinstance(value, str) else message_pb2.Part(data_json=json_text(value))
    return message_pb2.Message(parts=[part])


def _result_of(ended: DispatchResult) -> Result | RunError:
    if ended.outcome is None:
        if not isinstance(ended.error, NodeFailure):
            return failure(ended)
        # The failure of a graph names the way to the node that failed.
        reason, details = error_pb2.ERROR_REASON_SUB_AGENT_FAILED, ended.error.details_json
        return NodeFailure(ended.error.message, reason=reason, details_json=details)
    outcome = ended.outcome
    value = json.loads(value_of(outcome.output))
    return Result(value=value, message=outcome.output, author=ended.author, action=outcome.action)


async def call_tool(lane: Lane, name: str, value: Any) -> Result:
    """Call a tool with an object as its arguments. Raises RunError with the tool's failure."""
    if not isinstance(value, dict):
        raise mismatch(f"The tool {name!r} takes an object: {str(value)[:80]}.")
    key = lane.next_key("")
    async with lane.guard_effect(key):
        result = await call_from_code(lane, key, name, value)
    if result.HasField("error"):
        raise RunError.of(result.error)
    output = message_pb2.Message(parts=result.parts)
    try:
        return Result(value=json.loads(value_of(output)))
    except (ValueError, RecursionError):  # a tool made its own parts, and no JSON in them
        return Result(value=text_of(output))


async def call_node_model(lane: Lane, node: agent_pb2.GraphNode, value: Any) -> Result:
    """Call a model once, and again for an answer that does not fit. Raises RunError INVALID_OUTPUT, and the model's."""
    model, what = node.model, f"The prompt of the node {node.name!r}"
    repair = OutputRepair(f"{lane.running.name}/{node.name}", "" if model.tools else node.output_schema_json)
    messages = [_ask_for(fill_prompt(model.prompt, value, lane, what=what))] if model.prompt else _to_messages(value)
    offers = lane.running.toolset.offers
    tools = [offers[link.name].spec for link in model.tools]
    state = Values(lane.lane_state.values)
    instruction = render(model.instruction, {}, state, what=f"The instruction of the node {node.name!r}")
    while True:
        request = ModelRequest(
            messages=[*messages, *repair.repair_messages()],
            instruction=instruction,
            tools=tools,
            settings=model.settings,
            output_schema_json="" if model.tools else node.output_schema_json,
        )
        response = await _ask_model(lane, request, model.model)
        if model.tools:
            lane.complete_steps()
            return Result(value=from_message(response))
        if calls_of(response):
            raise RunError(
                f"The model of the node {node.name!r} called a tool, although it was offered none.",
                reason=error_pb2.ERROR_REASON_INVALID_OUTPUT,
            )
        if (answer := repair.accept_answer(response)) is not None:
            return Result(value=json.loads(value_of(answer)))


async def _ask_model(lane: Lane, request: ModelRequest, name: str) -> message_pb2.Message:
    """Call a model as the lane's next step; its message is a value, which no history holds."""
    index = lane.step_index + 1
    key = lane.key(f"s{index}.m")
    async with lane.guard_effect(key):
        lane.step_index = index
        spec = ModelCallSpec(key=key, index=index, is_value=True)
        response = await call_model(lane, spec, request, name or lane.running.model_name)
    return response.message


def _to_messages(value: Any) -> list[message_pb2.Message]:
    """Return a value as what a model is sent: messages as they are, anything else as a user's message."""
    values = value if isinstance(value, list) and value else [value]
    messages = [message for each in values if (message := to_message(each)) is not None]
    if len(messages) == len(values):
        return messages
    return [_ask_for(value if isinstance(value, str) else json_text(value))]


def _ask_for(text: str) -> message_pb2.Message:
    """Return a text as the message that opens a turn, which what is added to repair an answer does not."""
    message = user(text)
    message.kind = message_pb2.MESSAGE_KIND_USER
    return message


async def run_tools(lane: Lane, node: agent_pb2.GraphNode, value: Any) -> Result:
    """Run the calls of a message, and return their results as messages. Raises RunError TYPE_MISMATCH."""
    message = to_message(value)
    if message is None:
        raise mismatch(f"The node {node.name!r} takes a Message: {str(value)[:80]}.")
    named = {link.name for link in node.tools.tools}
    offers = {name: offer for name, offer in lane.running.toolset.offers.items() if name in named}
    calls = {position: _bare(call) for position, call in enumerate(calls_of(message))}
    if not calls:
        return Result(value=[])
    async with lane.guard_effect(lane.key("e0")):
        try:
            answers = await ParallelToolCalls(lane, index=None, calls=calls, offers=offers).run(parallel=True)
        finally:
            lane.lane_state.join()
    results = truncate_results([answer.result for answer in answers])
    return Result(value=[from_message(_to_tool_message(lane, result)) for result in results])


def _bare(call: message_pb2.ToolCall) -> message_pb2.ToolCall:
    bare = copy_of(call)
    bare.ClearField("provider_json")
    bare.ClearField("model")
    return bare


def _to_tool_message(lane: Lane, result: message_pb2.ToolResult) -> message_pb2.Message:
    part = message_pb2.Part(tool_result=result)
    return message_pb2.Message(role=message_pb2.ROLE_TOOL, author=lane.running.name, parts=[part])


async def ask(lane: Lane, node: agent_pb2.GraphNode, value: Any) -> Result:
    """Ask the user. Raises RunError INPUT_EXPIRED."""
    key = lane.next_key("")
    within = node.ask.expires.ToTimedelta().total_seconds() if node.ask.HasField("expires") else None
    async with lane.guard_effect(key):
        answer = await ask_question(
            lane,
            key,
            fill_prompt(node.ask.prompt, value, lane, what=f"The prompt of the node {node.name!r}"),
            schema=json.loads(node.output_schema_json) if node.output_schema_json else None,
            within=within,
            default=json.loads(node.ask.default_json) if node.ask.default_json else NO_DEFAULT,
        )
    return Result(value=json.loads(answer))


class NodeContext(LaneContext):
    """The Context of the code of a graph's node, which calls the tools that its `@node` names."""

    __slots__ = ("_tools",)

    def __init__(self, lane: Lane, tools: Sequence[str]) -> None:
        super().__init__(lane)
        self._tools = frozenset(tools)

    def offers(self) -> list[ToolSpec]:
        """Return the tools that the node's function names, and the graph's linked agents."""
        agents = {f"call_{link.agent}" for link in self.definition.sub_agents}
        return [spec for spec in super().offers() if spec.name in self._tools or spec.name in agents]

    async def call_tool(self, name: str, /, **arguments: object) -> Any:
        """Call one of the tools that the node's function names; return its JSON value, else its text."""
        if name not in self._tools:
            raise RunError(
                f"The node's function does not name the tool {name!r}: write @node(tools=[{name!r}]).",
                reason=error_pb2.ERROR_REASON_UNKNOWN_TOOL,
            )
        return await super().call_tool(name, **arguments)


async def run_function(lane: Lane, node: agent_pb2.GraphNode, function: NodeFunction, value: Any) -> Result:
    """Run an operator's function. Raises RunError: NODE_FAILED, or what the function raises of it; TYPE_MISMATCH."""
    try:
        given = function.convert(value)
    except (ValueError, TypeError) as error:
        raise mismatch(f"The function {function.name!r} cannot take its input: {text_of_error(error)}"[:1000]) from None
    made = await run_code(
        partial(_call, lane, function, given),
        what=f"The function {function.name!r}",
        reason=error_pb2.ERROR_REASON_NODE_FAILED,
        log="node failed",
        name=node.name,
    )
    if lane.running.abort is not None:  # its code may have caught the Abort, but cannot undo it
        raise lane.running.abort
    if isinstance(made, RunError):
        raise made
    if function.takes_context:
        await lane.record_state()
    try:
        result = function.to_json(made)
    except (ValueError, TypeError, RecursionError) as error:
        raise mismatch(
            f"The function {function.name!r} returned what its type does not allow: {text_of_error(error)}"[:1000]
        ) from None
    return Result(value=json.loads(to_text(result, f"What the function {function.name!r} returned")))


async def _call(lane: Lane, function: NodeFunction, value: Any) -> Any:
    try:
        if function.takes_context:
            return await function.function(NodeContext(lane, function.tools), value)
        if inspect.iscoroutinefunction(function.function):
            return await _await(function.function(value))
        return await THREADS.run(partial(function.function, value))
    except RunError as error:
        return error


async def _await(made: Awaitable[Any]) -> Any:
    return await made
