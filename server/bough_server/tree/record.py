"""Build the record of a run from its facts: the forest in preorder with its sums, within bounds. Never recurses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import execution_pb2, invocation_pb2, step_pb2
from bough.v1.invocation_pb2 import ANOMALY_KIND_MISSING_PARENT as MISSING_PARENT
from bough.v1.invocation_pb2 import ANOMALY_KIND_PARENT_CYCLE as PARENT_CYCLE
from bough_server.tree.bounds import Bounds, fit
from bough_server.tree.facts import TreeState
from bough_server.tree.nodes import anomaly
from bough_server.tree.run import Run
from bough_server.usage import Sums

_MAX_CONFLICTS: Final = 16
"""How many values are named that several wrote at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Ids in preorder, with the links that the order follows."""

    order: tuple[str, ...]
    depths: Mapping[str, int]
    parents: Mapping[str, str]
    """Child to parent, of the links that are followed: not to a parent that is not there, and not around a cycle."""
    missing: frozenset[str]
    """Ids whose parent is named and not there; they are roots."""
    cyclic: frozenset[str]
    """Ids whose chain of parents leads back to them; they are roots as well, and the last ones."""

    def child_counts(self) -> Mapping[str, int]:
        """How many children each id has that has any."""
        counts: dict[str, int] = {}
        for parent in self.parents.values():
            counts[parent] = counts.get(parent, 0) + 1
        return counts


def arrange(parents: Mapping[str, str], *, first: str = "") -> Forest:
    """The forest of ids, given by first appearance, each with its parent or an empty text.

    Roots are `first`, where it is one, then by first appearance; children are by first appearance. Every id is in the
    order exactly once, whatever the links are.
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
    """The ids on cycles, in linear time: each id has one parent at most, so each walk up meets one cycle at most."""
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


def record(facts: TreeState, bounds: Bounds) -> invocation_pb2.Invocation:
    """The record of the facts so far, which stay as they are."""
    forest = arrange({one: node.parent for one, node in facts.nodes.items()}, first=facts.run.root)
    main = facts.run.root or (forest.order[0] if forest.order else "")
    made = _described_run(facts, main)
    sums = _sums_below(facts, forest)
    whole = Sums()
    for one in forest.order:
        if one not in forest.parents:
            whole.add(sums[one])
    made.tree_usage.CopyFrom(whole.usage())
    made.agents_total, made.tools_total = len(forest.order), facts.tools.total
    made.agents.extend(_agents(facts, forest, sums, bounds.max_agents))
    _add_tools(made, facts)
    made.steps.extend(_steps(facts))
    made.anomalies.extend(_anomalies(facts, forest, made))
    fit(made, bounds.max_bytes)
    return made


def _described_run(facts: TreeState, main: str) -> invocation_pb2.Invocation:
    run = facts.run
    root = facts.nodes.get(main)
    made = invocation_pb2.Invocation(
        invocation_id=main,
        run_id=facts.run_id,
        session_id=facts.session_id,
        agent=root.name if root is not None else "",
        labels=run.labels,
        user_content=run.input,
        intermediate_responses=root.said if root is not None else (),
        start_time=run.start_time if run.was_queued else run.start_time or facts.first_time,
        as_of_sequence=facts.sequence,
        complete=run.end is not None,
        forked_from=run.forked_from,
        inherited_usage=run.inherited.usage() if run.forked_from is not None else None,
    )
    if run.end is not None:
        end = run.end
        made.MergeFrom(
            invocation_pb2.Invocation(state=end.state, error=end.error, final_response=end.output, end_time=end.time)
        )
    elif run.state or facts.sequence or facts.nodes:
        made.state = run.state or execution_pb2.EXECUTION_STATE_RUNNING
    return made


def _sums_below(facts: TreeState, forest: Forest) -> Mapping[str, Sums]:
    """What each invocation and everything below it used, from the leaves up: each is counted once in each ancestor."""
    sums = {one: facts.nodes[one].usage.copy() for one in forest.order}
    for one in reversed(forest.order):
        if one in forest.parents:
            sums[forest.parents[one]].add(sums[one])
    return sums


def _agents(
    facts: TreeState, forest: Forest, sums: Mapping[str, Sums], limit: int
) -> Iterator[invocation_pb2.AgentInvocation]:
    run = facts.run
    counts, waiting = forest.child_counts(), facts.requests.invocations()
    for one in forest.order[:limit]:
        node = facts.nodes[one]
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
    """The state of an invocation that has no end; None where the run has ended."""
    if run.end is not None:
        return None
    if run.state == execution_pb2.EXECUTION_STATE_PENDING or (
        run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED and is_waiting
    ):
        return run.state
    return execution_pb2.EXECUTION_STATE_RUNNING


def _describe_root(agent: invocation_pb2.AgentInvocation, run: Run) -> None:
    """What a run says of its root beyond the start: it was queued, or forked and told something else."""
    agent.trigger = agent.trigger or execution_pb2.INVOCATION_TRIGGER_ROOT
    if run.forked_from is not None and run.input is not None:
        agent.input.CopyFrom(run.input)
    if run.was_queued:
        agent.ClearField("start_time")
        if run.start_time is not None:
            agent.start_time.CopyFrom(run.start_time)


def _add_tools(made: invocation_pb2.Invocation, facts: TreeState) -> None:
    called = {(node.parent, node.call_id): node.invocation_id for node in facts.nodes.values() if node.call_id}
    names: dict[str, str] = {}
    made.tools.extend(facts.tools.in_order())
    for tool in made.tools:
        call = (tool.invocation_id, tool.call_id)
        if tool.invocation_id not in names:
            names[tool.invocation_id] = facts.nodes[tool.invocation_id].name
        tool.agent = names[tool.invocation_id]
        if not tool.child_invocation_id:
            tool.child_invocation_id = called.get(call, "")
        if tool.state != execution_pb2.EXECUTION_STATE_RUNNING:
            continue
        if facts.run.end is not None:
            tool.state = execution_pb2.EXECUTION_STATE_UNSPECIFIED
        elif call in facts.requests.calls:
            tool.state = execution_pb2.EXECUTION_STATE_INPUT_REQUIRED


def _steps(facts: TreeState) -> Iterator[step_pb2.AgentStep]:
    """The steps, with the tools' own results where a step has only a part of them."""
    for invocation_id, recorded in facts.steps:
        step = step_pb2.AgentStep()
        step.CopyFrom(recorded)
        step.invocation_id = step.invocation_id or invocation_id
        if step.llm_response.raw_json:
            step.llm_response.ClearField("raw_json")
        if step.llm_response.raw_events_json:
            step.llm_response.ClearField("raw_events_json")
        for result in step.tool_results:
            whole = facts.tools.whole(invocation_id, result.call.call_id) if result.truncated else None
            if whole is not None:
                result.CopyFrom(whole)
        yield step


def _anomalies(facts: TreeState, forest: Forest, made: invocation_pb2.Invocation) -> Iterator[invocation_pb2.Anomaly]:
    yield from facts.run.anomalies
    yield from _conflicts(facts.conflicts.names())
    if facts.not_rising:
        yield anomaly(
            invocation_pb2.ANOMALY_KIND_SEQUENCE_NOT_RISING, f"Sequences that do not rise: {facts.not_rising}."
        )
    if forest.cyclic:
        message = f"Invocations whose chain of parents leads back to themselves: {len(forest.cyclic)}."
        yield anomaly(PARENT_CYCLE, message)
    if forest.missing:
        yield anomaly(MISSING_PARENT, f"Invocations whose parent is not among the events: {len(forest.missing)}.")
    open_tools = sum(1 for tool in made.tools if not tool.state)
    if open_tools:
        message = f"Tool calls without an end in a run that has ended: {open_tools}."
        yield anomaly(invocation_pb2.ANOMALY_KIND_NO_END, message)


def _conflicts(names: Sequence[str]) -> Iterator[invocation_pb2.Anomaly]:
    kind = invocation_pb2.ANOMALY_KIND_STATE_CONFLICT
    for name in names[:_MAX_CONFLICTS]:
        message = f"The value {name!r} of the state was written by several at once; the last of them in order counts."
        yield anomaly(kind, message)
    if len(names) > _MAX_CONFLICTS:
        yield anomaly(kind, f"So were {len(names) - _MAX_CONFLICTS} more.")
