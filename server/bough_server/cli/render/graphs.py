"""Graphs for people: a definition as a Mermaid diagram, with the path of a run, and the visits of a run as lines."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from bough.v1 import agent_pb2, event_pb2
from bough_server.cli.render.format import duration_text
from bough_server.plain_text import one_line

AgentEvent = event_pb2.AgentEvent

GRAPH_EVENTS: Final = ("agent.graph.node_started", "agent.graph.node_completed", "agent.graph.node_failed")


def place_text(event: event_pb2.NodeStarted | event_pb2.NodeCompleted | event_pb2.NodeFailed) -> str:
    """Return a node with its superstep and item, such as `2 draft[3]`."""
    item = f"[{event.item}]" if event.HasField("item") else ""
    superstep = f"{event.superstep} " if event.HasField("superstep") else ""
    return f"{superstep}{event.node}{item}"


def visit_lines(log: Iterable[AgentEvent]) -> list[str]:
    """Return the visits of each graph of a run, in the order of their ends; those that have not ended come last."""
    lines: dict[str, list[str]] = {}
    open_visits: dict[str, tuple[str, str]] = {}
    names: dict[str, str] = {}
    for event in log:
        names.setdefault(event.invocation_id, event.branch)
        of_graph = lines.setdefault(event.invocation_id, [])
        if event.HasField("node_started"):
            started = event.node_started
            came = f" from {', '.join(started.triggered_by)}" if started.triggered_by else ""
            open_visits[event.effect_key] = (event.invocation_id, f"{place_text(started)}{came}")
        elif event.HasField("node_completed"):
            completed = event.node_completed
            _, place = open_visits.pop(event.effect_key, ("", place_text(completed)))
            went = f" -> {', '.join(completed.targets)}" if completed.targets else ""
            of_graph.append(f"{event.sequence:>5} ✓ {place}{went}  {duration_text(completed.duration)}")
        elif event.HasField("node_failed"):
            failed = event.node_failed
            _, place = open_visits.pop(event.effect_key, ("", place_text(failed)))
            went = f" -> {failed.error_target}" if failed.error_target else ""
            message = one_line(failed.error.message)
            of_graph.append(f"{event.sequence:>5} ✗ {place}{went}  {duration_text(failed.duration)}  {message}")
    for invocation, place in open_visits.values():
        lines[invocation].append(f"      … {place}")
    return [line for invocation, own in lines.items() if own for line in (f"nodes of {names[invocation]}", *own)]


class GraphPath:
    """The path of a run through one graph: how often each node was visited, and which ways were taken."""

    def __init__(self, log: Iterable[AgentEvent], agent: str) -> None:
        self.visits: Counter[str] = Counter()
        self.ways: Counter[tuple[str, str]] = Counter()
        for event in log:
            if event.agent != agent:
                continue
            if event.HasField("node_started") and not event.node_started.HasField("item"):
                self.visits[event.node_started.node] += 1
                self.ways.update((sender, event.node_started.node) for sender in event.node_started.triggered_by)
            elif "END" in event.node_completed.targets:
                self.ways[event.node_completed.node, "END"] += 1


def mermaid_lines(definition: agent_pb2.AgentDefinition, path: GraphPath | None = None) -> Iterator[str]:
    """Yield a graph as a Mermaid flowchart; the ways and nodes of a run's path are thick, with their counts."""
    graph = definition.graph
    ids = {"START": "START", "END": "END", **{node.name: f"n{index}" for index, node in enumerate(graph.nodes)}}
    path = path or GraphPath((), "")
    yield "flowchart TD"
    yield "  START([START])"
    for node in graph.nodes:
        count = f" x{path.visits[node.name]}" if path.visits[node.name] else ""
        yield f'  {ids[node.name]}["{node.name}{count}<br/>{_describe_kind(node)}"]'
    yield "  END([END])"
    for source, target, label in _links(graph):
        is_taken = (source, target) in path.ways
        arrow = "==>" if is_taken else "-.->" if label == "error" else "-->"
        text = f"|{_quote(label)}|" if label else ""
        yield f"  {ids.get(source, source)} {arrow}{text} {ids.get(target, target)}"
    if visited := [ids[name] for name in path.visits if name in ids]:
        yield "  classDef visited stroke-width:3px"
        yield f"  class {','.join(visited)} visited"


def _describe_kind(node: agent_pb2.GraphNode) -> str:
    kind = node.WhichOneof("kind") or "node"
    named = {"agent": node.agent, "tool": node.tool.name, "function": node.function}.get(kind, "")
    return f"{'map of ' if node.map else ''}{kind} {named}".rstrip()


def _links(graph: agent_pb2.GraphAgent) -> list[tuple[str, str, str]]:
    links = [(edge.source, edge.target, "") for edge in graph.edges]
    for branch in graph.branches:
        links += [
            (branch.source, case.target, f"{branch.path or 'output'} = {case.value_json}") for case in branch.cases
        ]
        links += [(branch.source, branch.otherwise, "otherwise")] if branch.otherwise else []
        links += [(branch.source, target, branch.function) for target in branch.targets]
    links += [(node.name, node.error_target, "error") for node in graph.nodes if node.error_target]
    return links


def _quote(text: str) -> str:
    escaped = text.replace('"', "#quot;")
    return f'"{escaped}"'


def targets_text(targets: Sequence[str]) -> str:
    """Return the targets of an output."""
    return f"-> {', '.join(targets)}" if targets else ""
