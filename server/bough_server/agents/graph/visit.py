"""One visit of a graph's node, or of one item of it: its start, its work, and its end as the log records it."""

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from bough.v1 import agent_pb2, error_pb2, event_pb2
from bough_server.agents.graph.channels import check_updates
from bough_server.agents.graph.types import GraphTypes
from bough_server.agents.graph.values import MISSING, check_type, copy_value, parse_inner_path, to_text, walk
from bough_server.agents.graph.work import (
    Result,
    ask,
    call_node_model,
    call_tool,
    run_agent,
    run_function,
    run_tools,
    to_agent_input,
)
from bough_server.engine import keys
from bough_server.engine.cancellation import set_visit
from bough_server.engine.open_invocations import to_duration
from bough_server.engine.scheduler import Waiter
from bough_server.errors import RunError
from bough_server.functions import Handler, NodeFunction, Snapshot, Update
from bough_server.log import events
from bough_server.observability.tracing import Traced
from bough_server.runtime.child_call import Abort
from bough_server.runtime.children import LaneGroup
from bough_server.runtime.lane import Lane
from bough_server.truncation import size_of, truncate_text

_MAX_INPUT_BYTES: Final = 64 * 1024
"""The most bytes of an input in node_started."""


class VisitedGraph(Protocol):
    """What a visit needs of the graph that it is in."""

    types: GraphTypes

    def snapshot(self, visit: "Visit") -> Snapshot:
        """Return what a handler or a router of a visit sees."""
        ...

    def route(self, visit: "Visit", value: Any) -> list[str]:
        """Return the targets of an output. Raises RunError NO_ROUTE, and what a router raises."""
        ...

    def build_update(self, channel: str, value: Any) -> event_pb2.ChannelUpdate:
        """Return a write to a channel. Raises RunError."""
        ...


class Visit:
    """One visit of a node, or one item of a visit that runs once for each."""

    def __init__(
        self,
        graph: VisitedGraph,
        lane: Lane,
        node: agent_pb2.GraphNode,
        *,
        number: int,
        superstep: int | None,
        senders: Sequence[str] = (),
        item: int | None = None,
    ) -> None:
        self._graph, self.lane, self.node = graph, lane, node
        self.key = lane.scope
        self._execution, self._running = lane.execution, lane.running
        self.number, self.superstep, self.senders, self.item = number, superstep, senders, item
        self.value: Any = None
        """Its input; once it has ended, its output."""
        self._text = ""
        """Its input as JSON text."""
        self.problem: RunError | None = None
        """Why it has no input."""
        self.items: list[Visit] = []
        self.items_left = 0
        self._items_group: LaneGroup | None = None
        self.updates: list[event_pb2.ChannelUpdate] = []
        self.targets: Sequence[str] = ()
        self.result: Result | None = None
        """What its work gave; None until it has ended, and of one that failed."""
        self.error: RunError | None = None
        self.is_handled = False
        """True if it failed and its `error_target` gets the error."""
        self._started: event_pb2.AgentEvent | None = None
        self._ended: event_pb2.AgentEvent | None = None
        self._waiter: Waiter[event_pb2.AgentEvent] | None = None

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def is_mapped(self) -> bool:
        """True if it is a whole visit whose items are its work."""
        return self.node.map and self.item is None

    def prepare(self, value: Any) -> None:
        """Set its input, after the handler `before` and the checks of its type; what they raise is its problem."""
        self.value = value
        try:
            if self.item is None and self.node.before:
                self.value = self._handle(self.node.before, value)
            self._text = to_text(self.value, f"The input of {self.name!r}")
            self._check_input()
        except RunError as error:
            self.problem = error

    def _handle(self, name: str, value: Any) -> Any:
        handler = self._running.resolver.functions[name]
        assert isinstance(handler, Handler)  # checked when the run started
        update: Update = handler.handle(copy_value(value), self._graph.snapshot(self))
        writes = [self._graph.build_update(channel, each) for channel, each in update.channels.items()]
        made = json.loads(to_text(update.value, f"What the handler {name!r} returned"))
        self.updates += writes
        check_updates(self.updates)
        return made

    def _check_input(self) -> None:
        types, name = self._graph.types, self.name
        what = " -> ".join([", ".join(self.senders) or "input", name])
        if self.is_mapped:
            _check_items(self.value, what)
        if self.item is None and types.is_proved(name, self.senders):
            return
        for kind in types.inputs_of(name):
            for index, each in enumerate(self.value if self.is_mapped else [self.value]):
                check_type(each, kind, f"{what}[{index}]" if self.is_mapped else what)

    # The start

    async def run(self) -> None:
        """Do its work and record its end. Raises Abort, which is recorded too."""
        traced = self._open_span()
        if self._started is None:
            self._expect()
        if self.problem is not None:
            edited = self._edited
            await self._finish(self.problem if edited is None else Result(value=json.loads(edited)))
            return
        with traced.attach():
            try:
                result: Result | RunError = await self._work()
            except Abort as abort:
                await self._finish(abort)
                raise
            except RunError as error:
                result = error
        await self._finish(result)

    def _open_span(self) -> Traced:
        execution, key = self._execution, self.key
        if key not in execution.spans:
            execution.spans[key] = execution.tracing.graph_node(
                node=self.name,
                agent=self._running.name,
                visit=self.number,
                superstep=self.superstep,
                parent=self.lane.traced.below,
                is_over=key in execution.journal.results,
            )
            self.lane.traced = execution.spans[key]
        return execution.spans[key]

    async def start(self) -> None:
        """Record the start of a visit whose items are its work."""
        self._open_span()
        self._expect()
        await self._record_start()

    def _expect(self) -> None:
        """Check it against the log, and expect its end if the log holds one."""
        text = "" if self.problem is not None else self._text
        digest = keys.digest("node", self.name, self.node.WhichOneof("kind") or "", text)
        self._execution.writer.check(self.key, digest)
        if self.key in self._execution.journal.results:
            self._waiter = self._execution.barrier.expect(self.key)
        event = self._event()
        event.effect_digest = digest
        started = event.node_started
        started.node, started.visit = self.name, self.number
        if self.superstep is not None:
            started.superstep = self.superstep
        if self.item is not None:
            started.item = self.item
        if self.is_mapped and self.problem is None:
            started.item_count = len(self.value)
        started.triggered_by.extend(self.senders)
        started.input_truncated = size_of(text) > _MAX_INPUT_BYTES
        started.input_json = truncate_text(text, _MAX_INPUT_BYTES) if started.input_truncated else text
        self._started = event

    def _event(self) -> event_pb2.AgentEvent:
        return self._running.event(self.key, traced=self._execution.spans.get(self.key))

    @property
    def _is_start_recorded(self) -> bool:
        return self._execution.journal.holds(self.key, events.NODE_STARTED)

    async def _record_start(self) -> None:
        assert self._started is not None, "it was checked against the log"
        if not self._is_start_recorded:
            await self.lane.go_live(self.key)
        if not self._is_start_emitted():
            self._execution.emit(self._started)

    # The work

    def open_items(self, group: LaneGroup) -> None:
        """Make its items, each in a lane of a group."""
        self._items_group = group
        for index, value in enumerate(self.value):
            lane = group.fork(index, is_scope=True)
            item = Visit(
                self._graph, lane, self.node, number=self.number, superstep=self.superstep, senders=(), item=index
            )
            item.prepare(value)
            self.items.append(item)

    @property
    def _edited(self) -> str | None:
        """The output, as JSON text, that a fork replaces its own with."""
        return self._execution.journal.node_outputs.get(self.key) if self.item is None else None

    @property
    def is_replaced(self) -> bool:
        """True if a fork replaces its output, and the log holds nothing of its work: it is not done at all."""
        if self._edited is None:
            return False
        effects = self._execution.journal.of_effect
        return not any(key != self.key and keys.covers(self.key, key) for key in effects)

    async def _work(self) -> Result:
        edited = self._edited
        if edited is None:
            return await self._do_work()
        if self.is_replaced:
            await self._record_start()
        else:
            try:
                await self._do_work()
            except Abort:
                raise
            except RunError:
                pass  # its failure is replaced too
        return Result(value=json.loads(edited))

    async def _do_work(self) -> Result:
        node, kind = self.node, self.node.WhichOneof("kind")
        if self.is_mapped:
            if self._items_group is not None:
                self._items_group.join_state()
                self._items_group.join()
            return self._collect_items()
        if kind is None:
            if self._is_start_recorded:
                await self._record_start()
            if self._waiter is None:
                await self._execution.writer.wait_if_full()  # nothing else would slow down a cycle of such nodes
            return Result(value=self.value)
        if kind == "agent":
            return await self._run_agent()
        await self._record_start()
        lane, value = self.lane, copy_value(self.value)
        match kind:
            case "tool":
                return await call_tool(lane, node.tool.name, value)
            case "model":
                return await call_node_model(lane, node, value)
            case "tools":
                return await run_tools(lane, node, value)
            case "ask":
                return await ask(lane, node, value)
        return await self._run_function(value)

    async def _run_agent(self) -> Result:
        assert self._started is not None, "it was checked against the log"
        if self._is_start_recorded:
            await self._record_start()
        links = self._running.agent.definition.sub_agents
        link = next(each for each in links if each.agent == self.node.agent)
        started = [] if self._is_start_recorded else [self._started]
        message = to_agent_input(self.lane, self.value, is_first=not self.number)
        return await run_agent(self.lane, link, message, started=started, on_end=self._end_beside)

    async def _run_function(self, value: Any) -> Result:
        function = self._running.resolver.functions[self.node.function]
        assert isinstance(function, NodeFunction)  # checked when the run started
        if not function.takes_context:
            if self._waiter is not None:
                return Result(value=None)  # its end is recorded: it is not executed again
            # It has no other start event: what led to it must be on disk before it touches the world.
            await self._execution.writer.wait_for_commit()
        result = await run_function(self.lane, self.node, function, value)
        if self.lane.wake_ns and self._waiter is None and not self._execution.writer.is_offline:
            await self.lane.wait_until_live(self.key)
        return result

    def _collect_items(self) -> Result:
        failed = next((each.error for each in self.items if each.error is not None), None)
        if failed is not None:
            raise failed
        action = next((each.result.action for each in self.items if each.result and each.result.action), None)
        return Result(value=[each.value for each in self.items], action=action)

    # The end

    def _end_beside(self, result: Result | RunError, abort: Abort | None) -> Sequence[event_pb2.AgentEvent]:
        """Return its end for the append of its agent's; nothing if the log may hold other results before it."""
        if not (self._execution.barrier.live or self.key in self._execution.journal.results):
            return ()
        if self._edited is not None and abort is None:
            result = Result(value=json.loads(self._edited))
        self._ended = self._build_end(abort or result)
        return [self._ended]

    async def _finish(self, result: Result | RunError) -> None:
        """Record its end, in a replay when the log delivers it."""
        if self._waiter is not None:
            recorded = await self.lane.await_result(self.key, self._waiter)
            if self._is_taken_as_recorded():
                self._take(recorded)
                return
        elif self._ended is None and not self._execution.barrier.live:
            await self.lane.go_live(self.key)
        else:  # a drain parks what is about to begin, but lets this end
            self._execution.cancellation.raise_if_cancelled(self.key)
        if self._ended is None:
            self._ended = self._build_end(result)
            is_new_start = self._started is not None and self.problem is None and not self._is_start_emitted()
            self._execution.emit(*([self._started] if is_new_start and self._started is not None else []), self._ended)
        self._close_span()

    def _is_start_emitted(self) -> bool:
        return self.key in self._running.open_invocation.effects

    def _is_taken_as_recorded(self) -> bool:
        """Return whether its work was not executed, because it is a function whose end is recorded."""
        if self.node.WhichOneof("kind") != "function" or self.is_mapped or self.problem is not None:
            return False
        if self._edited is not None:
            return False
        function = self._running.resolver.functions[self.node.function]
        return isinstance(function, NodeFunction) and not function.takes_context

    def _take(self, recorded: event_pb2.AgentEvent) -> None:
        """Take its end from the log."""
        self._ended = recorded
        if recorded.HasField("node_completed"):
            completed = recorded.node_completed
            self.value = json.loads(completed.output_json)
            self.result = Result(value=self.value)
            self.updates, self.targets = list(completed.updates), list(completed.targets)
        else:
            self._fail(RunError.of(recorded.node_failed.error), bool(recorded.node_failed.error_target))
        self._close_span()

    def _build_end(self, result: Result | RunError) -> event_pb2.AgentEvent:
        """Return the event of its end, after the handler `after`, the check of its type, its writes and its routing."""
        event = self._event()
        if self.problem is not None and self._started is not None:
            event.effect_digest = self._started.effect_digest
        written = len(self.updates)
        try:
            if isinstance(result, RunError):
                raise result
            self._complete(event, result)
        except RunError as error:
            del self.updates[written:]
            self._fail(error, self._is_handled(error))
            event.ClearField("payload")
            self._set_place(event.node_failed)
            event.node_failed.error.CopyFrom(self._running.error_of(error))
            if self.is_handled:
                event.node_failed.error_target = self.node.error_target
                event.node_failed.updates.extend(self.updates)
        end = event.node_completed if event.HasField("node_completed") else event.node_failed
        end.duration.CopyFrom(to_duration(self._execution.clock.now_ns() - self._start_ns()))
        return event

    def _is_handled(self, error: RunError) -> bool:
        is_caught = not isinstance(error, Abort) and error.reason != error_pb2.ERROR_REASON_CANCELLED
        return bool(self.node.error_target) and is_caught and self.item is None

    def _fail(self, error: RunError, is_handled: bool) -> None:
        self.error, self.is_handled, self.result = error, is_handled, None
        if not is_handled:
            self.updates = []

    def _complete(self, event: event_pb2.AgentEvent, result: Result) -> None:
        value, completed = result.value, event.node_completed
        self._set_place(completed)
        if self.item is None and result.action is None:
            if self.node.after:
                value = self._handle(self.node.after, value)
            self._check_output(value)
            self._write(value)
        elif result.action is None and not self.node.after:
            self._check_output(value)
        completed.output_json = to_text(value, f"The output of {self.name!r}")
        if self.item is None and result.action is None:
            self.targets = self._graph.route(self, value)
        completed.updates.extend(self.updates)
        completed.targets.extend(self.targets)
        self.value = value
        self.result = result if value is result.value else Result(value=value)

    def _check_output(self, value: Any) -> None:
        node, types = self.node, self._graph.types
        if not types.needs_output_check(node) or (self.is_mapped and not node.after):
            return
        what = f"The output of {self.name!r} does not fit its type"
        check_type(value, node.output_schema_json, what)

    def _write(self, value: Any) -> None:
        for write in self.node.writes:
            path = parse_inner_path(write.path)
            found = walk(value, path.names)
            if found is not MISSING:
                self.updates.append(self._graph.build_update(write.channel, found))
                check_updates(self.updates)
            elif not path.is_optional:
                raise RunError(
                    f"There is nothing at {write.path} of the output of {self.name!r} to write to the channel "
                    f"{write.channel!r}. Write {write.path}? if it may be missing.",
                    reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS,
                )

    def _set_place(self, end: event_pb2.NodeCompleted | event_pb2.NodeFailed) -> None:
        assert self._started is not None, "it was checked against the log"
        set_visit(end, self._started.node_started)

    def _start_ns(self) -> int:
        assert self._started is not None, "it was checked against the log"
        recorded = self._started.record_time.ToNanoseconds()
        return recorded or self._execution.clock.now_ns()

    def _close_span(self) -> None:
        traced = self._execution.spans.pop(self.key, None)
        if traced is not None:
            traced.end(error=self.error.to_agent_error() if self.error is not None else None)


def _check_items(value: Any, what: str) -> None:
    if not isinstance(value, list):
        raise RunError(f"{what} takes a list, and runs once for each item: {str(value)[:80]}.", reason="TYPE_MISMATCH")
    if len(value) > MAX_ITEMS:
        raise RunError(
            f"{what} runs once for each of at most {MAX_ITEMS:,} items, and got {len(value):,}.",
            reason="LIMIT_EXCEEDED",
        )


MAX_ITEMS: Final = 1000
"""The most items that a node runs for."""
