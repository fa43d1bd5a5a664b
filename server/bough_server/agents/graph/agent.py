"""The graph agent: visits the nodes of its graph, and routes their outputs, until END has a value."""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bough.v1 import agent_pb2, error_pb2, event_pb2, execution_pb2, message_pb2
from bough_server.agents.definition import revision
from bough_server.agents.graph.channels import Channels
from bough_server.agents.graph.inputs import Sources, read_start
from bough_server.agents.graph.routing import route
from bough_server.agents.graph.structure import tool_places
from bough_server.agents.graph.topology import END, START, Topology, build_topology
from bough_server.agents.graph.types import GraphTypes, Names
from bough_server.agents.graph.values import check_type, find_whole_source, merge, to_text
from bough_server.agents.graph.visit import Visit
from bough_server.agents.graph.visit_queue import VisitQueue
from bough_server.agents.graph.work import NodeFailure, Result
from bough_server.errors import RunError
from bough_server.functions import Function, NodeFunction, Snapshot
from bough_server.runtime.agent import Context, Outcome, Resolver
from bough_server.runtime.child_input import snapshot_of
from bough_server.runtime.children import LaneGroup
from bough_server.runtime.context import lane_of
from bough_server.runtime.lane import Lane
from bough_server.tools.builtin import SPECS

DEFAULT_CONCURRENCY: Final = 16
"""How many visits run at a time if the definition does not say."""


class GraphAgent:
    """An agent whose work is a graph of typed nodes."""

    kind = execution_pb2.AGENT_KIND_GRAPH

    def __init__(self, definition: agent_pb2.AgentDefinition, functions: Mapping[str, Function]) -> None:
        """`functions` are the operator's, of whose nodes' functions the agent has the tools."""
        self.definition = definition
        self.revision = revision(definition)
        self._functions = functions
        self._topology = build_topology(definition.graph)

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """The tools of all nodes and of their functions, each once."""
        links = {link.name: link for link, _ in tool_places(self.definition.graph)}
        for node in self.definition.graph.nodes:
            function = self._functions.get(node.function) if node.HasField("function") else None
            for name in function.tools if isinstance(function, NodeFunction) else ():
                links.setdefault(name, agent_pb2.ToolLink(name=name))
        return list(links.values())

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Visit nodes until END has a value, and return that.

        Raises RunError: NO_ROUTE, LIMIT_EXCEEDED, CHANNEL_CONFLICT, TYPE_MISMATCH, or the failure of a visit that no
        node handles, beginning with the node's name.
        """
        lane = lane_of(ctx)
        names = names_of_run(lane.running.resolver)
        types = GraphTypes(self.definition, self._topology, names, trusts_agents=False)
        graph = _Dag if self._topology.is_dag else _Supersteps
        return await graph(lane, self.definition, self._topology, types).run(input)


def names_of_run(resolver: Resolver) -> Names:
    """Return what the names of nodes stand for in a run."""

    def find_tool(name: str) -> str | None:
        if name in SPECS:
            return SPECS[name].input_schema_json
        return resolver.tools[name].input_schema_json if name in resolver.tools else None

    def find_function(name: str) -> NodeFunction | None:
        function = resolver.functions.get(name)
        return function if isinstance(function, NodeFunction) else None

    return Names(
        agent=lambda name: resolver.agents[name].definition if name in resolver.agents else None,
        tool_schema=find_tool,
        function=find_function,
    )


class _Graph(ABC):
    """One invocation of a graph: what was delivered, the outputs, and the visits that run."""

    def __init__(
        self, lane: Lane, definition: agent_pb2.AgentDefinition, topology: Topology, types: GraphTypes
    ) -> None:
        self._lane, self._definition, self._topology, self.types = lane, definition, topology, types
        graph = definition.graph
        self._graph, self._functions = graph, lane.running.resolver.functions
        self._channels = Channels(graph.channels, self._functions)
        self._outputs: dict[str, Any] = {}
        """The last output of each node."""
        self._results: dict[str, Result] = {}
        """How the last visit of each node ended that gave its output."""
        self._delivered: dict[str, dict[str, Any]] = {}
        """What has reached each node since its last visit, by sender."""
        self._visits: Counter[str] = Counter()
        self._queue = VisitQueue(
            lane, most=graph.max_concurrency if graph.HasField("max_concurrency") else DEFAULT_CONCURRENCY
        )
        self._fails_fast = graph.on_failure == agent_pb2.PARALLEL_FAILURE_POLICY_FAIL_FAST
        self._sources: Sources
        self._last: Sequence[str] = (START,)

    async def run(self, input: message_pb2.Message) -> Outcome:
        value = read_start(self._definition, input)
        self._sources = Sources(self._lane, start=value, outputs=self._outputs, channels=lambda: self._channels.values)
        self._deliver(START, value, self._route_start(value))
        return await self._run()

    @abstractmethod
    async def _run(self) -> Outcome: ...

    def _route_start(self, value: Any) -> Sequence[str]:
        try:
            return route(
                self._topology, START, value, functions=self._functions, snapshot=lambda: snapshot_of(self._lane)
            )
        except RunError as error:
            raise NodeFailure(f"{START}: {error.message}", reason=error.reason) from error

    # What visits need

    def snapshot(self, visit: Visit) -> Snapshot:
        """Return what a handler or a router of a visit sees."""
        most = self._graph.max_supersteps if self._graph.HasField("max_supersteps") else None
        left = most - 1 - visit.superstep if most is not None and visit.superstep is not None else None
        return replace(
            snapshot_of(visit.lane),
            node=visit.name,
            visit=visit.number,
            superstep=visit.superstep,
            remaining_supersteps=left,
            channels=self._channels.values,
        )

    def route(self, visit: Visit, value: Any) -> list[str]:
        """Return the targets of a visit's output. Raises RunError."""
        return route(
            self._topology, visit.name, value, functions=self._functions, snapshot=lambda: self.snapshot(visit)
        )

    def build_update(self, channel: str, value: Any) -> event_pb2.ChannelUpdate:
        """Return a write to a channel. Raises RunError."""
        return self._channels.build_update(channel, value)

    # Visits and their ends

    def _make_visit(self, name: str, group: LaneGroup, superstep: int | None) -> Visit:
        """Return a visit of a node with its input, made of what has reached it since its last."""
        node, place = self._topology.nodes[name], self._topology.place
        lane = group.fork(place[name], is_scope=True)
        lane.node = name
        delivered = self._delivered.pop(name)
        # In a DAG ends come at any time: what merges must not depend on it.
        senders = sorted(delivered, key=place.__getitem__) if self._topology.is_dag else list(delivered)
        visit = Visit(self, lane, node, number=self._visits[name], superstep=superstep, senders=senders)
        self._visits[name] += 1
        try:
            mapped = self._sources.build(node.input) if node.input else None
            value = mapped if node.input else merge([(sender, delivered[sender]) for sender in senders], name)
        except RunError as error:
            visit.problem = error
        else:
            visit.prepare(value)
        return visit

    def _deliver(self, sender: str, value: Any, targets: Sequence[str]) -> None:
        for target in targets:
            reached = self._delivered.setdefault(target, {})
            reached.pop(sender, None)  # the last counts, at its place
            reached[sender] = value

    def _apply_end(self, visit: Visit) -> None:
        """Keep a visit's output, and deliver it, or its error."""
        if visit.result is not None:
            self._outputs[visit.name], self._results[visit.name] = visit.value, visit.result
            self._deliver(visit.name, visit.value, visit.targets)
        elif visit.error is not None and visit.is_handled:
            self._deliver(visit.name, _describe_error(visit.name, visit.error), [visit.node.error_target])

    async def _next_end(self, failed: list[Visit], acting: list[Visit]) -> Visit:
        """Return the next visit that has ended; after one that fails or ends the graph no other begins.

        Raises the error of one that fails if that ends the graph at once.
        """
        visit = await self._queue.next_end()
        if visit.error is not None and not visit.is_handled:
            failed.append(visit)
            self._queue.drop_waiting()
            if self._fails_fast:
                raise self._build_failure(failed)
        elif visit.result is not None and visit.result.action is not None:
            acting.append(visit)
            self._queue.drop_waiting()
        return visit

    def _build_failure(self, failed: Sequence[Visit]) -> RunError:
        """Return the error of the graph: the first in merge order."""
        visit = min(failed, key=lambda visit: self._topology.place[visit.name])
        error = visit.error
        assert error is not None, "a failed visit has an error"
        mark = "/" if isinstance(error, NodeFailure) else ": "
        return NodeFailure(
            f"{visit.name}{mark}{error.message}",
            reason=error.reason,
            retryable=error.retryable,
            details_json=error.details_json,
        )

    # The end of the graph

    def _end_by_action(self, acting: Sequence[Visit]) -> Outcome:
        """Return the outcome of the first node in merge order whose agent exits or breaks a loop."""
        visit = min(acting, key=lambda visit: self._topology.place[visit.name])
        result = visit.result
        assert result is not None, "it has ended"
        assert result.action is not None, "it acts"
        item = next((each.result for each in visit.items if each.result and each.result.action), result)
        is_exit = result.action.HasField("exit")
        return Outcome(
            output=item.message or message_pb2.Message(),
            end_reason=execution_pb2.END_REASON_EXITED if is_exit else execution_pb2.END_REASON_BROKE_LOOP,
            action=result.action,
            author=item.author,
            is_in_transcript=True,
        )

    def _end(self) -> Outcome:
        """Return the outcome of a graph whose END has a value. Raises RunError TYPE_MISMATCH and BAD_ARGUMENTS."""
        place, delivered = self._topology.place, self._delivered[END]
        senders = sorted(delivered, key=place.__getitem__) if self._topology.is_dag else list(delivered)
        try:
            if self._graph.output:
                value = self._sources.build(self._graph.output)
                source = find_whole_source(self._graph.output)
            else:
                value = merge([(sender, delivered[sender]) for sender in senders], END)
                source = senders[0] if len(senders) == 1 else ""
            if not self.types.is_proved(END, senders):
                for kind in self.types.inputs_of(END):
                    check_type(value, kind, f"{', '.join(senders)} -> {END}")
            text = to_text(value, f"The answer of {self._definition.name!r}")
        except RunError as error:
            raise NodeFailure(f"{END}: {error.message}", reason=error.reason) from error
        result = self._results.get(source)
        if result is not None and result.message is not None and result.value is value:
            return Outcome(output=result.message, author=result.author, is_in_transcript=True)
        part = message_pb2.Part(text=value) if isinstance(value, str) else message_pb2.Part(data_json=text)
        return Outcome(output=message_pb2.Message(parts=[part]))

    def _build_no_route(self) -> RunError:
        return RunError(
            f"{' and '.join(self._last)} ended, and nothing leads on to END: no edge or branch delivered a value.",
            reason=error_pb2.ERROR_REASON_NO_ROUTE,
        )


class _Supersteps(_Graph):
    """A graph in PREGEL mode: visits run in supersteps, between barriers."""

    async def _run(self) -> Outcome:
        graph, superstep = self._graph, 0
        waits_for_all = graph.end_join == agent_pb2.GRAPH_JOIN_ALL
        while True:
            if END in self._delivered and not waits_for_all:
                return self._end()
            ready = self._find_ready()
            if not ready:
                if END in self._delivered:
                    return self._end()
                raise self._build_no_route()
            if graph.HasField("max_supersteps") and superstep >= graph.max_supersteps:
                raise RunError(
                    f"{graph.max_supersteps} supersteps ran without an end: max_supersteps is reached. Next were "
                    f"{', '.join(ready)}.",
                    reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                )
            if (outcome := await self._run_superstep(ready, superstep)) is not None:
                return outcome
            superstep += 1

    def _find_ready(self) -> list[str]:
        """Return the nodes that run in the next superstep, in merge order."""
        topology = self._topology
        waiting = [name for name in self._delivered if name != END and topology.is_all(name)]
        ready = [name for name in self._delivered if name != END and not topology.is_all(name)]
        active = {*waiting, *ready}
        ready += [name for name in waiting if _is_complete(topology, name, self._delivered[name], active - {name})]
        if not ready and waiting:
            return [min(waiting, key=topology.place.__getitem__)]
        return sorted(ready, key=topology.place.__getitem__)

    async def _run_superstep(self, ready: Sequence[str], superstep: int) -> Outcome | None:
        """Run the visits of a superstep and apply their ends; return the graph's outcome if it ends here."""
        group = LaneGroup(self._lane, self._lane.key(f"n{superstep}."))
        visits = [self._make_visit(name, group, superstep) for name in ready]
        failed: list[Visit] = []
        acting: list[Visit] = []
        self._queue.add(visits)
        while self._queue.is_busy:
            await self._next_end(failed, acting)
        group.join_state()
        if failed:
            raise self._build_failure(failed)
        group.join()
        if acting:
            return self._end_by_action(acting)
        self._channels.apply([(visit.name, visit.updates) for visit in visits if visit.updates])
        for visit in visits:
            self._apply_end(visit)
        self._last = ready
        return None


class _Dag(_Graph):
    """A graph in DAG mode: each node runs once, as soon as everything that can reach it has ended."""

    async def _run(self) -> Outcome:
        group = LaneGroup(self._lane, self._lane.key("n."))
        failed: list[Visit] = []
        acting: list[Visit] = []
        active: set[str] = set()
        while True:
            if not failed and not acting:
                ready = self._find_ready(active)
                active.update(ready)
                self._queue.add([self._make_visit(name, group, None) for name in ready])
            if not self._queue.is_busy:
                break
            visit = await self._next_end(failed, acting)
            active.discard(visit.name)
            self._apply_end(visit)
            self._last = [visit.name]
        group.join_state()
        if failed:
            raise self._build_failure(failed)
        group.join()
        if acting:
            return self._end_by_action(acting)
        if END not in self._delivered:
            raise self._build_no_route()
        return self._end()

    def _find_ready(self, active: set[str]) -> list[str]:
        """Return the nodes that can run now, in merge order; `active` are those that run or are about to."""
        waiting = [name for name in self._delivered if name != END and not self._visits[name]]
        others = {*active, *waiting}
        ready = [name for name in waiting if _is_complete(self._topology, name, self._delivered[name], others - {name})]
        return sorted(ready, key=self._topology.place.__getitem__)


def _is_complete(topology: Topology, name: str, delivered: Mapping[str, Any], active: set[str]) -> bool:
    """Return whether each predecessor of a node has sent a value, or cannot any more."""
    # A node that leads to itself sends itself nothing before it runs.
    missing = (before for before in topology.predecessors[name] if before not in delivered and before != name)
    return not any(topology.can_reach(active, before, without=name) for before in missing)


def _describe_error(node: str, error: RunError) -> dict[str, Any]:
    """Return a failure as the value that its handler gets."""
    return {
        "node": node,
        "reason": error.reason_name,
        "message": error.message,
        "retryable": error.retryable,
        "details": json.loads(error.details_json) if error.details_json else None,
    }
