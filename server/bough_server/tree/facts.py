"""State of a run's tree while its events are folded: invocations, tool calls, steps, sums.

Only copies of what the record needs are kept of an event.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, invocation_pb2, message_pb2, step_pb2
from bough_server.log import events
from bough_server.log.session_state_fold import CONCERNED, Conflicts
from bough_server.log.usage import ONE_TOOL_CALL, Sums
from bough_server.messages import copy_of
from bough_server.tree.bounds import Bounds
from bough_server.tree.nodes import End, Node
from bough_server.tree.run import Run
from bough_server.tree.tools import ToolCalls


class TreeState:
    """Invocations, tool calls and steps of a run, and the state of the run itself."""

    def __init__(self, bounds: Bounds, *, run_id: str, session_id: str) -> None:
        self._include_steps = bounds.include_steps
        self.run_id, self.session_id = run_id, session_id
        self.run = Run()
        self.nodes: dict[str, Node] = {}
        """In order of first appearance."""
        self.tools = ToolCalls(bounds)
        self.conflicts = Conflicts()
        self.steps: list[tuple[str, step_pb2.AgentStep]] = []
        """Each with its invocation's id; empty unless the bounds include steps."""
        self.first_time: timestamp_pb2.Timestamp | None = None
        self.sequence = 0
        """The highest so far."""
        self.not_rising = 0
        """Number of events whose sequence is not above all before it."""
        self._charged = Sums()
        """Usage of all model and tool calls so far."""

    def apply_envelope(self, event: event_pb2.AgentEvent) -> None:
        """Apply the sequence and the ids of an event from any source."""
        sequence = event.sequence
        if sequence > self.sequence:
            self.sequence = sequence
        elif sequence:  # events without a sequence are in the order of arrival
            self.not_rising += 1
        run_id = event.run_id
        if run_id and run_id != self.run_id:
            if self.run_id:
                self.run.note(invocation_pb2.ANOMALY_KIND_SEVERAL_RUNS, "The events are of more than one run.")
            else:
                self.run_id = run_id
        if not self.session_id:
            self.session_id = event.session_id

    def apply(self, kind: int, event: event_pb2.AgentEvent, sequence: int) -> None:
        """Apply an event; an unknown kind still shows that its invocation exists."""
        if self.first_time is None:
            self.first_time = events.time_of(event)
        invocation_id = event.invocation_id or event.run_started.invocation_id
        if not invocation_id:
            self._apply_without_invocation(event, kind)
            return
        node = self.nodes.get(invocation_id)
        if node is None:
            node = self.nodes[invocation_id] = Node(invocation_id)
        if not node.is_known:
            node.apply_envelope(event)
        if kind in CONCERNED:
            self.conflicts.apply(event, kind)
        reader = _READERS.get(kind)
        if reader is not None:
            reader(self, node, event, kind, sequence)

    def _apply_without_invocation(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """Apply an event that names no invocation, if it is one of the run itself."""
        if kind in events.TERMINAL_KINDS:
            end = self._end_of(event, kind)
            root = self.nodes.get(self.run.root)
            if root is not None:
                root.apply_end(end)
            self.run.apply_end(end, "")
        elif kind in _PROGRESS:
            self._apply_progress(event, kind)

    def _apply_run_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.apply_start(event, generation=self.run.generation)
        self.run.apply_start(event, node.invocation_id)

    def _apply_run_progress(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        self._apply_progress(event, kind)

    def _apply_progress(self, event: event_pb2.AgentEvent, kind: int) -> None:
        if kind == events.RUN_FORKED:
            self.run.apply_fork(event, self._charged)
            for node in self.nodes.values():
                if node.end is None:
                    node.fork_time = events.time_of(event)
            if event.run_forked.HasField("mocks"):
                self._forget_mocks()
        self.run.progress.apply(event)

    def _forget_mocks(self) -> None:
        """Clear the numbers of the mocks that have answered: a fork that brings mocks counts its own."""
        for node in self.nodes.values():
            if node.start is not None and node.start.HasField("sub_agent_started"):
                node.start.sub_agent_started.ClearField("mock_index")
        for call in self.tools.in_order():
            call.ClearField("mock_index")

    def _apply_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.apply_start(event, generation=self.run.generation)

    def _apply_run_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        end = self._end_of(event, kind)
        node.apply_end(end)
        self.run.apply_end(end, node.invocation_id)

    def _apply_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.apply_end(self._end_of(event, kind))

    def _end_of(self, event: event_pb2.AgentEvent, kind: int) -> End:
        return End.of(event, kind, generation=self.run.generation)

    def _apply_llm_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        call = event.effect_key or event.step_id
        if not events.is_summarizing(event):
            # A later attempt of an open call belongs to the same step.
            node.step_count += event.attempt <= 1 or call not in node.open_calls
            started = event.llm_started
            node.settings = copy_of(started.settings) if started.HasField("settings") else None
        node.open_calls.add(call)
        node.error = None

    def _apply_llm_retry(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        node.count_fault(event.llm_retrying)
        if not event.llm_retrying.not_sent:
            self._charge(node, Sums.of_attempt(event.llm_retrying.lost_usage))

    def _apply_llm_completion(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        response = event.llm_completed.response
        node.open_calls.discard(event.effect_key or event.step_id)
        self._charge(node, Sums.of_attempt(response.usage))
        if not node.parent and (text := _text_beside_calls(response.message)) is not None:
            node.intermediate_responses.append(text)

    def _apply_llm_failure(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        failed = event.llm_failed
        node.count_fault(failed)
        call = event.effect_key or event.step_id
        # A refused call never started and reports no usage: it went to no provider and is not counted.
        if call in node.open_calls or failed.HasField("lost_usage"):
            node.open_calls.discard(call)
            if not failed.not_sent:
                self._charge(node, Sums.of_attempt(failed.lost_usage))
        node.error = copy_of(failed.error)

    def _charge(self, node: Node, used: Sums) -> None:
        node.running.add(used)
        self._charged.add(used)

    def _apply_tool_start(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        call_id = event.tool_started.call.call_id
        if call_id not in node.open_tools:  # a further attempt is not a further call
            node.open_tools.add(call_id)
            self._charge(node, ONE_TOOL_CALL)
        self._apply_call(node, is_new=self.tools.start(event, sequence))

    def _apply_call(self, node: Node, *, is_new: bool) -> None:
        if not is_new:
            message = "One of its call ids stands for more than one call."
            node.note(invocation_pb2.ANOMALY_KIND_CALL_ID_REUSED, message)

    def _apply_tool_output(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        self.tools.output(event, sequence)

    def _apply_tool_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        call_id = self.tools.end(event, sequence)
        node.open_tools.discard(call_id)
        if self.run.progress.requests:  # most runs have no open request
            self.run.progress.apply(event)

    def _apply_step_end(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        is_completed = kind == events.STEP_COMPLETED
        if not is_completed:
            node.error = copy_of(event.step_failed.error)
        if self._include_steps:
            step = event.step_completed.step if is_completed else event.step_failed.step
            self.steps.append((node.invocation_id, copy_of(step)))

    def _apply_request(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        request = event.input_requested.request
        if request.call_id:
            self._apply_call(node, is_new=self.tools.ask(event, sequence))
        self.run.progress.apply(event)

    def _apply_answer(self, node: Node, event: event_pb2.AgentEvent, kind: int, sequence: int) -> None:
        self.run.progress.apply(event)


_Reader: TypeAlias = Callable[[TreeState, Node, event_pb2.AgentEvent, int, int], None]

_PROGRESS: Final = frozenset(
    {events.RUN_QUEUED, events.RUN_DEQUEUED, events.RUN_RESUMED, events.RUN_FORKED, events.RUN_INTERRUPTED}
)
"""Events of a run between its start and its end."""

_READERS: Final[Mapping[int, _Reader]] = {
    events.RUN_STARTED: TreeState._apply_run_start,
    **dict.fromkeys(_PROGRESS, TreeState._apply_run_progress),
    events.RUN_COMPLETED: TreeState._apply_run_end,
    events.RUN_FAILED: TreeState._apply_run_end,
    events.RUN_CANCELLED: TreeState._apply_run_end,
    events.SUB_AGENT_STARTED: TreeState._apply_start,
    events.SUB_AGENT_COMPLETED: TreeState._apply_end,
    events.SUB_AGENT_FAILED: TreeState._apply_end,
    events.LLM_STARTED: TreeState._apply_llm_start,
    events.LLM_RETRYING: TreeState._apply_llm_retry,
    events.LLM_COMPLETED: TreeState._apply_llm_completion,
    events.LLM_FAILED: TreeState._apply_llm_failure,
    events.TOOL_STARTED: TreeState._apply_tool_start,
    events.TOOL_OUTPUT: TreeState._apply_tool_output,
    events.TOOL_COMPLETED: TreeState._apply_tool_end,
    events.TOOL_FAILED: TreeState._apply_tool_end,
    events.STEP_COMPLETED: TreeState._apply_step_end,
    events.STEP_FAILED: TreeState._apply_step_end,
    events.INPUT_REQUESTED: TreeState._apply_request,
    events.INPUT_RECEIVED: TreeState._apply_answer,
}


def _text_beside_calls(message: message_pb2.Message) -> message_pb2.Message | None:
    """Return the texts of a message that also has tool calls; None if it has no text or no call."""
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
        metadata_json=message.metadata_json,
    )
