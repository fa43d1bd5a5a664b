"""Build the record of a run from its tree state: agents in preorder, with sums, within bounds.

Nothing here recurses: the depth of a tree is not bounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import execution_pb2, invocation_pb2, step_pb2
from bough.v1.invocation_pb2 import ANOMALY_KIND_MISSING_PARENT as MISSING_PARENT
from bough.v1.invocation_pb2 import ANOMALY_KIND_PARENT_CYCLE as PARENT_CYCLE
from bough_server.log.usage import Sums
from bough_server.messages import copy_of
from bough_server.tree.bounds import Bounds, fit
from bough_server.tree.facts import TreeState
from bough_server.tree.nodes import anomaly
from bough_server.tree.run import Run

_MAX_CONFLICTS: Final = 16
"""The most conflicting values that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Ids in preorder, and the links that the order follows."""

    order: tuple[str, ...]
    depths: Mapping[str, int]
    parents: Mapping[str, str]
    """Parent by child, of the links that are followed: none to a parent that is missing, and none of a cycle."""
    missing: frozenset[str]
    """Ids whose parent is named and missing; they are roots."""
    cyclic: frozenset[str]
    """Ids whose chain of parents leads back to them; they are roots too, after all others."""

    def child_counts(self) -> Mapping[str, int]:
        """Return the number of children of each id that has any."""
        counts: dict[str, int] = {}
        for parent in self.parents.values():
            counts[parent] = counts.get(parent, 0) + 1
        return counts


def arrange(parents: Mapping[str, str], *, first: str = "") -> Forest:
    """Arrange ids, in order of first appearance and each with its parent or an empty string, as a forest.

    `first` comes first if it is a root; otherwise roots, and children, keep the order of first appearance. Every id is
    in the order exactly once, whatever the links are.
    """
    missing = frozenset(one for one, parent in parents.items() if parent and parent not in parents)
    cyclic = _cyclic(parents)
    followed = {one: parent for one, parent in parents.items() if parent and one not in missing and one not in cyclic}
    children: dict[str, list[str]] = {}
    for one, parent in followed.items():
        children.setdefault(parent, []).append(one)
    roots = [one for one in parents if one not in followed and one not in cyclic]
    roots.sort(key=lambda one: one != first)
    roots.extend(one for one in parents if one in cyclic)
    depths = _depths_in_preorder(roots, children)
    return Forest(order=tuple(depths), depths=depths, parents=followed, missing=missing, cyclic=cyclic)


def _depths_in_preorder(roots: list[str], children: Mapping[str, list[str]]) -> dict[str, int]:
    depths: dict[str, int] = {}
    ahead = [(one, 0) for one in reversed(roots)]
    while ahead:
        one, depth = ahead.pop()
        depths[one] = depth
        ahead.extend((child, depth + 1) for child in reversed(children.get(one, ())))
    return depths


def _cyclic(parents: Mapping[str, str]) -> frozenset[str]:
    """Return the ids on cycles, in linear time: an id has at most one parent, so a walk up meets at most one cycle."""
    walk_of: dict[str, int] = {}
    found: set[str] = set()
    for number, start in enumerate(parents):
        one = start
        while one in parents and one not in walk_of:
            walk_of[one] = number
            one = parents[one]
        if walk_of.get(one) == number:
            member = one
            while member not in found:
                found.add(member)
                member = parents[member]
    return frozenset(found)


def build_invocation(tree: TreeState, bounds: Bounds) -> invocation_pb2.Invocation:
    """Build the record of a tree state, which is not changed."""
    forest = arrange({one: node.parent for one, node in tree.nodes.items()}, first=tree.run.root)
    main = tree.run.root or (forest.order[0] if forest.order else "")
    built = _describe_run(tree, main)
    sums = _sums_below(tree, forest)
    whole = Sums()
    for one in forest.order:
        if one not in forest.parents:
            whole.add(sums[one])
    built.tree_usage.CopyFrom(whole.usage())
    built.agents_total, built.tools_total = len(forest.order), tree.tools.total
    built.agents.extend(_agents(tree, forest, sums, bounds.max_agents))
    _add_tools(built, tree)
    built.steps.extend(_steps(tree))
    built.anomalies.extend(_anomalies(tree, forest, built))
    fit(built, bounds.max_bytes)
    return built


def _describe_run(tree: TreeState, main: str) -> invocation_pb2.Invocation:
    run, progress = tree.run, tree.run.progress
    root = tree.nodes.get(main)
    built = invocation_pb2.Invocation(
        invocation_id=main,
        run_id=tree.run_id,
        session_id=tree.session_id,
        agent=root.name if root is not None else "",
        labels=run.labels,
        user_content=run.input,
        intermediate_responses=root.intermediate_responses if root is not None else (),
        start_time=progress.start_time if progress.was_queued else progress.start_time or tree.first_time,
        as_of_sequence=tree.sequence,
        complete=run.end is not None,
        forked_from=run.forked_from,
        inherited_usage=run.inherited.usage() if run.forked_from is not None else None,
    )
    if run.end is not None:
        end = run.end
        built.MergeFrom(
            invocation_pb2.Invocation(state=end.state, error=end.error, final_response=end.output, end_time=end.time)
        )
    elif progress.state or tree.sequence or tree.nodes:
        built.state = progress.state or execution_pb2.EXECUTION_STATE_RUNNING
    return built


def _sums_below(tree: TreeState, forest: Forest) -> Mapping[str, Sums]:
    """Return the usage of each invocation and all below it; each invocation counts once in each of its ancestors."""
    sums = {one: tree.nodes[one].usage.copy() for one in forest.order}
    # In reverse preorder children come before their parents.
    for one in reversed(forest.order):
        if one in forest.parents:
            sums[forest.parents[one]].add(sums[one])
    return sums


def _agents(
    tree: TreeState, forest: Forest, sums: Mapping[str, Sums], limit: int
) -> Iterator[invocation_pb2.AgentInvocation]:
    run = tree.run
    counts, waiting = forest.child_counts(), run.progress.requests.invocations()
    for one in forest.order[:limit]:
        node = tree.nodes[one]
        agent = node.describe(_open_state(run, is_waiting=one in waiting))
        agent.depth = forest.depths[one]
        agent.child_count = counts.get(one, 0)
        agent.revision = run.revision(node)
        agent.tree_usage.CopyFrom(sums[one].usage())
        if one == run.root:
            _describe_root(agent, run)
        if one in forest.missing:
            agent.anomalies.append(anomaly(MISSING_PARENT, "Its parent is not among the events.", one))
        if one in forest.cyclic:
            agent.anomalies.append(anomaly(PARENT_CYCLE, "Its chain of parents leads back to itself.", one))
        yield agent


def _open_state(run: Run, *, is_waiting: bool) -> execution_pb2.ExecutionState.ValueType | None:
    """Return the state of an invocation without an end; None if the run has ended."""
    if run.end is not None:
        return None
    state = run.progress.state
    if state == execution_pb2.EXECUTION_STATE_PENDING or (
        state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED and is_waiting
    ):
        return state
    return execution_pb2.EXECUTION_STATE_RUNNING


def _describe_root(agent: invocation_pb2.AgentInvocation, run: Run) -> None:
    """Set what the root's start event does not have: the start time of a queued run, the input of a fork."""
    agent.trigger = agent.trigger or execution_pb2.INVOCATION_TRIGGER_ROOT
    if run.forked_from is not None and run.input is not None:
        agent.input.CopyFrom(run.input)
    if run.progress.was_queued:
        agent.ClearField("start_time")
        agent.MergeFrom(invocation_pb2.AgentInvocation(start_time=run.progress.start_time))


def _add_tools(built: invocation_pb2.Invocation, tree: TreeState) -> None:
    called = {(node.parent, node.call_id): node.invocation_id for node in tree.nodes.values() if node.call_id}
    names: dict[str, str] = {}
    built.tools.extend(tree.tools.in_order())
    for tool in built.tools:
        call = (tool.invocation_id, tool.call_id)
        if tool.invocation_id not in names:
            names[tool.invocation_id] = tree.nodes[tool.invocation_id].name
        tool.agent = names[tool.invocation_id]
        if not tool.child_invocation_id:
            tool.child_invocation_id = called.get(call, "")
        if tool.state != execution_pb2.EXECUTION_STATE_RUNNING:
            continue
        if tree.run.end is not None:
            tool.state = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        elif call in tree.run.progress.requests.calls:
            tool.state = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED


def _steps(tree: TreeState) -> Iterator[step_pb2.AgentStep]:
    """Yield copies of the steps, with the tools' own results if a step has only truncated ones."""
    for invocation_id, recorded in tree.steps:
        step = copy_of(recorded)
        step.invocation_id = step.invocation_id or invocation_id
        if step.llm_response.raw_json:
            step.llm_response.ClearField("raw_json")
        if step.llm_response.raw_events_json:
            step.llm_response.ClearField("raw_events_json")
        for result in step.tool_results:
            whole = tree.tools.whole(invocation_id, result.call.call_id) if result.truncated else None
            if whole is not None:
                result.CopyFrom(whole)
        yield step


def _anomalies(tree: TreeState, forest: Forest, built: invocation_pb2.Invocation) -> Iterator[invocation_pb2.Anomaly]:
    yield from tree.run.anomalies
    yield from _conflicts(tree.conflicts.names())
    if tree.not_rising:
        yield anomaly(
            invocation_pb2.ANOMALY_KIND_SEQUENCE_NOT_RISING, f"Sequences that do not rise: {tree.not_rising}."
        )
    if forest.cyclic:
        message = f"Invocations whose chain of parents leads back to themselves: {len(forest.cyclic)}."
        yield anomaly(PARENT_CYCLE, message)
    if forest.missing:
        yield anomaly(MISSING_PARENT, f"Invocations whose parent is not among the events: {len(forest.missing)}.")
    open_tools = sum(1 for tool in built.tools if not tool.state)
    if open_tools:
        message = f"Tool calls without an end in a run that has ended: {open_tools}."
        yield anomaly(invocation_pb2.ANOMALY_KIND_NO_END, message)


def _conflicts(names: Sequence[str]) -> Iterator[invocation_pb2.Anomaly]:
    kind = invocation_pb2.ANOMALY_KIND_STATE_CONFLICT
    for name in names[:_MAX_CONFLICTS]:
        message = f"The value {name!r} of session state was set by several parallel paths; the last in order wins."
        yield anomaly(kind, message)
    if len(names) > _MAX_CONFLICTS:
        yield anomaly(kind, f"So were {len(names) - _MAX_CONFLICTS} more.")
