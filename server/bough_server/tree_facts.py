"""What a run's events say, gathered event by event; how it looks as a record is not decided here."""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, message_pb2, step_pb2
from bough_server import events, tree_usage
from bough_server.tree_limits import Bounds
from bough_server.tree_nodes import End, Node
from bough_server.tree_tools import ToolCalls


class Facts:
    """The invocations, tool calls and steps of a run, and what its own events say of it."""

    def __init__(self, bounds: Bounds, *, run_id: str, session_id: str) -> None:
        self._include_steps = bounds.include_steps
        self.run_id, self.session_id = run_id, session_id
        self.nodes: dict[str, Node] = {}
        """By first appearance."""
        self.tools = ToolCalls(bounds)
        self.steps: list[tuple[str, step_pb2.AgentStep]] = []
        """Each with its invocation's id, where steps are wanted."""
        self.start: event_pb2.RunStarted | None = None
        self.end: End | None = None
        self.start_time: timestamp_pb2.Timestamp | None = None
        """When the run began, where its start says so."""
        self.first_time: timestamp_pb2.Timestamp | None = None
        self.sequence = 0
        """The highest so far."""
        self.not_rising = 0
        """How many events came with a sequence that is not above all before it."""
        self._root_of_start = ""
        self._root_of_end = ""
        self._anomalies: dict[str, None] = {}

    @property
    def main_root(self) -> str:
        """The run's root: where it starts, else where it ends; empty where its own events name none."""
        return self._root_of_start or self._root_of_end

    @property
    def anomalies(self) -> tuple[str, ...]:
        """What does not add up in the run's own events."""
        return tuple(self._anomalies)

    def take_envelope(self, event: event_pb2.AgentEvent) -> None:
        """Takes in where an event of anybody's stands."""
        sequence = event.sequence
        if sequence > self.sequence:
            self.sequence = sequence
        elif sequence:  # an event that says no sequence breaks no order
            self.not_rising += 1
        run_id = event.run_id
        if run_id and run_id != self.run_id:
            if self.run_id:
                self._anomalies["The events are of more than one run."] = None
            else:
                self.run_id = run_id
        if not self.session_id:
            self.session_id = event.session_id

    def take(self, kind: int, event: event_pb2.AgentEvent, sequence: int) -> None:
        """Takes in what an event says; a kind that is not known still counts for its invocation."""
        if self.first_time is None and event.HasField("time"):
            self.first_time = event.time
        invocation_id = event.invocation_id or event.run_started.invocation_id
        if not invocation_id:
            if kind in events.TERMINAL_KINDS:
                self._take_run_end(self.nodes.get(self.main_root), event, kind, sequence)
            return
        node = self.nodes.get(invocation_id)
        if node is None:
            node = self.nodes[invocation_id] = Node(invocation_id)
        if not node.is_known:
            node.look(event)
        reader = _READERS.get(kind)
        if reader is not None:
            reader(self, node, event, kind, sequence)

    def _take_run_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.begin(event)
        if self.start is None:
            self.start, self._root_of_start = event.run_started, node.invocation_id
            self.start_time = event.time if event.HasField("time") else None
        else:
            self._anomalies["The run began more than once."] = None

    def _take_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.begin(event)

    def _take_run_end(self, node: Node | None, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        end = End.of(event, kind)
        if node is not None:
            node.finish(end)
        if self.end is None:
            self.end, self._root_of_end = end, event.invocation_id
        else:
            self._anomalies["The run ended more than once."] = None

    def _take_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.finish(End.of(event, kind))

    def _take_llm_started(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.step_count += 1
        node.open_calls.add(event.effect_key or event.step_id)
        node.error = None

    def _take_llm_retrying(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        tree_usage.add_attempt(node.running, event.llm_retrying.lost_usage)

    def _take_llm_completed(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        response = event.llm_completed.response
        node.open_calls.discard(event.effect_key or event.step_id)
        tree_usage.add_attempt(node.running, response.usage)
        if not node.parent and (said := _said_beside_calls(response.message)) is not None:
            node.said.append(said)

    def _take_llm_failed(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        failed = event.llm_failed
        call = event.effect_key or event.step_id
        # A call that was refused never went to a provider, so it is not counted.
        if call in node.open_calls or failed.HasField("lost_usage"):
            node.open_calls.discard(call)
            tree_usage.add_attempt(node.running, failed.lost_usage)
        node.error = failed.error

    def _take_tool_started(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.running["tool_calls"] = node.running.get("tool_calls", 0) + 1
        if not self.tools.start(event, sequence):
            node.note("One of its call ids stands for more than one call.")

    def _take_tool_output(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        self.tools.output(event, sequence)

    def _take_tool_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        self.tools.end(event, kind, sequence)

    def _take_step_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        is_completed = kind == events.STEP_COMPLETED
        if not is_completed:
            node.error = event.step_failed.error
        if self._include_steps:
            step = event.step_completed.step if is_completed else event.step_failed.step
            self.steps.append((node.invocation_id, step))


_Reader: TypeAlias = Callable[[Facts, Node, event_pb2.AgentEvent, int, int], None]

_READERS: Final[Mapping[int, _Reader]] = {
    events.RUN_STARTED: Facts._take_run_start,
    events.RUN_COMPLETED: Facts._take_run_end,
    events.RUN_FAILED: Facts._take_run_end,
    events.RUN_CANCELLED: Facts._take_run_end,
    events.SUB_AGENT_STARTED: Facts._take_start,
    events.SUB_AGENT_COMPLETED: Facts._take_end,
    events.SUB_AGENT_FAILED: Facts._take_end,
    events.LLM_STARTED: Facts._take_llm_started,
    events.LLM_RETRYING: Facts._take_llm_retrying,
    events.LLM_COMPLETED: Facts._take_llm_completed,
    events.LLM_FAILED: Facts._take_llm_failed,
    events.TOOL_STARTED: Facts._take_tool_started,
    events.TOOL_OUTPUT: Facts._take_tool_output,
    events.TOOL_COMPLETED: Facts._take_tool_end,
    events.TOOL_FAILED: Facts._take_tool_end,
    events.STEP_COMPLETED: Facts._take_step_end,
    events.STEP_FAILED: Facts._take_step_end,
}


def _said_beside_calls(message: message_pb2.Message) -> message_pb2.Message | None:
    """The texts of a message that holds tool calls as well; None where it has no text or no call."""
    texts = [part for part in message.parts if part.text]
    if not texts or not any(part.HasField("tool_call") for part in message.parts):
        return None
    return message_pb2.Message(
        message_id=message.message_id,
        role=message.role,
        kind=message.kind,
        author=message.author,
        parts=texts,
        invocation_id=message.invocation_id,
        create_time=message.create_time if message.HasField("create_time") else None,
        position=message.position,
    )
