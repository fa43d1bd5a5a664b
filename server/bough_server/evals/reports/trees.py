"""The trees of a trial, expected and actual, as nodes that each report renders in its own way."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, usage_pb2
from bough_server.evals.metrics.tool_names import is_named
from bough_server.evals.reports.expectations import (
    agent_words,
    call_blocks,
    call_words,
    expectation_blocks,
    mode_words,
    repeat_words,
)
from bough_server.evals.reports.page import Block, Call, Note, Step, TreeNode, indent_json
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.history.visible import CALL_PREFIX
from bough_server.tools.builtin import RESERVED

_MARKS: Final = {
    eval_result_pb2.TREE_MARK_MATCHED: "matched",
    eval_result_pb2.TREE_MARK_MOVED: "moved",
    eval_result_pb2.TREE_MARK_UNEXPECTED: "unexpected",
    eval_result_pb2.TREE_MARK_ALLOWED: "allowed",
    eval_result_pb2.TREE_MARK_VIOLATED: "violated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn of a trial."""

    blocks: Sequence[Block]
    expected: Sequence[TreeNode]
    expectations: Sequence[Block]
    actual: Sequence[TreeNode]
    notes: Sequence[Note]


def iter_turn_views(trial: eval_result_pb2.CaseTrialResult, case: eval_result_pb2.CaseResult) -> Iterator[TurnView]:
    """Yield both trees of each turn, then what is expected of a conversation with a simulated user as a whole."""
    for number, turn in enumerate(trial.turns):
        yield _build_turn_view(number, turn, trial, case)
    if not trial.turns or not trial.HasField("user_finished"):
        return
    expect, ended = case.user.expect, "ended" if trial.user_finished else "did not end"
    yield TurnView(
        blocks=[Block(title="all turns", text=f"The simulated user {ended} the conversation.")],
        expected=list(_build_expected_nodes(expect.agents, "", 0, _find_expected_marks(len(trial.turns), trial))),
        expectations=list(expectation_blocks(expect)),
        actual=[],
        notes=[],
    )


def _build_turn_view(
    number: int,
    turn: eval_result_pb2.EvalTurnResult,
    trial: eval_result_pb2.CaseTrialResult,
    case: eval_result_pb2.CaseResult,
) -> TurnView:
    """Return both trees of a turn, with the calls of each agent numbered as differences number them."""
    asked = case.turns[number] if number < len(case.turns) else eval_set_pb2.EvalTurn()
    notes = [Note(text=f"run {turn.run_id}" + (f", trace {turn.trace_id}" if turn.trace_id else ""))]
    if turn.error.message:
        notes.append(Note(text=turn.error.message, style="failed"))
    if turn.truncated:
        notes.append(Note(text="Parts of the tree or of its texts were left out.", style="anomaly"))
    user = asked.user or "".join(part.text or part.data_json for part in asked.input.parts) or turn.user
    if turn.user_run_id:
        notes.append(Note(text=f"run of the simulated user {turn.user_run_id}"))
    named = f" ({asked.id})" if asked.id else ""
    return TurnView(
        blocks=[Block(title=f"turn {number + 1}{named}, user", text=user)] if user else [],
        expected=list(_build_expected_nodes(asked.expect.agents, "", 0, _find_expected_marks(number, trial))),
        expectations=list(expectation_blocks(asked.expect)),
        actual=_build_actual_nodes(turn, asked.expect),
        notes=notes,
    )


def _find_expected_marks(turn: int, trial: eval_result_pb2.CaseTrialResult) -> Mapping[tuple[str, str], str]:
    """Return the marks of expected agents, by name and the path of the caller: those that are missing or elsewhere."""
    kinds = {eval_result_pb2.DIFFERENCE_KIND_MISSING: "missing", eval_result_pb2.DIFFERENCE_KIND_MOVED: "moved"}
    return {
        (one.agent, one.expected_parent): kinds[one.kind]
        for score in trial.scores
        for comparison in score.tree_comparisons
        if comparison.turn == turn
        for one in comparison.differences
        if one.kind in kinds
    }


def _build_expected_nodes(
    agents: Sequence[eval_set_pb2.ExpectedAgent], parent: str, depth: int, marks: Mapping[tuple[str, str], str]
) -> Iterator[TreeNode]:
    for agent in agents:
        calls = [
            Call(number=index, name=call_words(tool), state="", blocks=list(call_blocks(tool)))
            for index, tool in enumerate(agent.tools, start=1)
        ]
        yield TreeNode(
            name=agent.name,
            depth=depth,
            mark=marks.get((agent.name, parent), ""),
            facts=list(_describe_expected_agent(agent)),
            steps=[Step(calls=calls)] if calls else [],
        )
        yield from _build_expected_nodes(
            agent.children, f"{parent}/{agent.name}" if parent else agent.name, depth + 1, marks
        )


def _describe_expected_agent(agent: eval_set_pb2.ExpectedAgent) -> Iterator[str]:
    if agent.optional:
        yield "optional"
    if agent.HasField("repeat"):
        yield repeat_words(agent.repeat)
    if agent.children and agent.children_order == eval_set_pb2.EVAL_ORDER_ORDERED:
        yield "in order"
    if agent.extra == eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW:
        yield "others allowed"
    if agent.forbidden:
        yield f"never below it: {', '.join(agent.forbidden)}"
    yield from agent_words(agent)
    if mode := mode_words(agent):
        yield mode


def _build_actual_nodes(
    turn: eval_result_pb2.EvalTurnResult, expect: eval_set_pb2.EvalExpectation
) -> Sequence[TreeNode]:
    names = {f"{CALL_PREFIX}{agent.name}" for agent in turn.agents} | RESERVED
    expected = [*expect.tools, *_iter_expected_tools(expect.agents)]
    # Only calls that count have numbers, as in tool_trajectory.
    uncounted = {name for name in names if not any(is_named(tool, name) for tool in expected)}
    return [_agent(agent, uncounted) for agent in turn.agents]


def _iter_expected_tools(agents: Iterable[eval_set_pb2.ExpectedAgent]) -> Iterator[eval_set_pb2.ExpectedTool]:
    for agent in agents:
        yield from agent.tools
        yield from _iter_expected_tools(agent.children)


def _agent(agent: eval_result_pb2.EvalAgent, uncounted: Collection[str]) -> TreeNode:
    # The id is no anchor: it is not unique among the runs of a page.
    return TreeNode(
        name=agent.name,
        depth=agent.depth,
        state=_state_text(agent.state),
        mark=_MARKS.get(agent.mark, ""),
        facts=[*([pluralize(agent.step_count, "step")] if agent.step_count else []), *usage_facts(agent.usage)],
        steps=list(_steps(agent, uncounted)),
        answer=[Block(title="answer", text=agent.answer)] if agent.answer else [],
        is_open=agent.depth == 0,
    )


def _steps(agent: eval_result_pb2.EvalAgent, uncounted: Collection[str]) -> Iterator[Step]:
    """Yield each step with its calls, then the calls outside of steps."""
    calls: dict[int | None, list[Call]] = {}
    indexes = {step.index for step in agent.steps}
    numbers = count(1)
    for call in agent.calls:
        index = call.step_index if call.HasField("step_index") and call.step_index in indexes else None
        calls.setdefault(index, []).append(_call(call, 0 if call.name in uncounted else next(numbers)))
    for step in agent.steps:
        blocks = [Block(title=f"step {step.index + 1}", text=step.text)] if step.text else []
        yield Step(blocks=blocks, calls=calls.pop(step.index, []))
    if None in calls:
        yield Step(calls=calls[None])


def _call(call: eval_result_pb2.EvalCall, number: int) -> Call:
    blocks = [
        Block(title=title, text=indent_json(text))
        for title, text in (
            ("arguments", call.arguments_json),
            ("edited arguments", call.executed_arguments_json),
            ("result", call.result_json),
        )
        if text
    ]
    notes = [Note(text=call.error.message, style="failed")] if call.error.message else []
    return Call(number=number, name=call.name, state=_state_text(call.state), blocks=blocks, notes=notes)


def usage_facts(usage: usage_pb2.Usage) -> Iterator[str]:
    """Yield the tokens and the cost, as far as they are known."""
    if usage.HasField("total_tokens"):
        yield f"{usage.total_tokens:,} tokens"
    elif usage.HasField("input_tokens") or usage.HasField("output_tokens"):
        yield f"{usage.input_tokens + usage.output_tokens:,} tokens"
    if usage.HasField("cost_nanos"):
        yield f"{usage.cost_nanos / 1e9:.4g} {usage.currency_code}"


def _state_text(state: execution_pb2.ExecutionState.ValueType) -> str:
    """Return a state in words; empty for one that a later version has."""
    if not state or state not in execution_pb2.ExecutionState.values():
        return ""
    return execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_").lower()
