"""Results as one HTML page: cases, gates, and the expected tree beside the actual one with the differences marked."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2
from bough_server.evals.reports.page import Block, Call, Note, Step, TreeNode, render
from bough_server.evals.reports.words import cost_text, rate_text, reasons_of, status_text

_MARKS: Final = {
    eval_result_pb2.TREE_MARK_MATCHED: "matched",
    eval_result_pb2.TREE_MARK_MOVED: "moved",
    eval_result_pb2.TREE_MARK_UNEXPECTED: "unexpected",
    eval_result_pb2.TREE_MARK_ALLOWED: "allowed",
    eval_result_pb2.TREE_MARK_VIOLATED: "violated",
}
_CHANGES: Final = {
    eval_result_pb2.CASE_CHANGE_BETTER: "better",
    eval_result_pb2.CASE_CHANGE_WORSE: "worse",
    eval_result_pb2.CASE_CHANGE_REMOVED: "gone",
    eval_result_pb2.CASE_CHANGE_ADDED: "new",
}
_PASSED: Final = eval_result_pb2.METRIC_STATUS_PASSED


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """A row of the table of gates."""

    gate: str
    verdict: str
    style: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRow:
    """A row of the table of changes."""

    case_id: str
    change: str
    differences: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn of a run."""

    blocks: Sequence[Block]
    expected: Sequence[TreeNode]
    expectations: Sequence[Block]
    actual: Sequence[TreeNode]
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run of a case."""

    number: int
    verdict: str
    style: str
    facts: Sequence[str]
    notes: Sequence[Note]
    turns: Sequence[TurnView]
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseView:
    """A case."""

    id: str
    name: str
    verdict: str
    style: str
    rate: str
    metrics: str
    facts: Sequence[str]
    notes: Sequence[Note]
    runs: Sequence[RunView]
    is_open: bool


def html_page(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return the page of a result. It loads nothing, and works from a file."""
    return render(
        "result.html.jinja",
        title=result.set_name or "evaluation",
        verdict=status_text(result.status),
        style=_style(result.status),
        head=list(_head(result, comparison)),
        gates=[_gate(gate) for gate in result.gates],
        changes=list(_changes(comparison)) if comparison is not None else [],
        cases=[_case(index, case) for index, case in enumerate(result.cases)],
    )


def _head(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None) -> Iterator[Note]:
    found = result.totals
    parts = [f"{found.cases_passed} of {found.cases} cases passed", f"{found.runs_passed} of {found.runs} runs passed"]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not judged")
    if found.HasField("pass_rate"):
        bounds = found.pass_rate_interval
        parts.append(f"pass rate {found.pass_rate:.2f} ({bounds.lower:.2f} to {bounds.upper:.2f})")
    yield Note(text=" · ".join(parts), style=_style(result.status))
    if facts := [*(f"{name} {mean:.3g}" for name, mean in sorted(found.metric_means.items())), cost_text(result)]:
        yield Note(text=" · ".join(fact for fact in facts if fact))
    if found.flaky_cases:
        yield Note(text=f"flaky: {', '.join(found.flaky_cases)}", style="anomaly")
    if result.evaluation_id:
        yield Note(text=f"evaluation {result.evaluation_id}, agent {result.pins.agent or '-'}")
    for text in comparison.pins_changed if comparison is not None else ():
        yield Note(text=text, style="anomaly")


def _gate(gate: eval_result_pb2.GateResult) -> GateRow:
    value = f"{gate.value:.4g}" if gate.HasField("value") else ""
    verdict = status_text(gate.status)
    return GateRow(gate=gate.gate, verdict=verdict, style=_style(gate.status), value=value, reason=gate.reason)


def _changes(comparison: eval_result_pb2.EvalComparison) -> Iterator[ChangeRow]:
    for case in comparison.cases:
        if case.change in _CHANGES:
            differences = "; ".join(one.message for one in case.differences)
            yield ChangeRow(case_id=case.case_id, change=_CHANGES[case.change], differences=differences)


def _case(index: int, case: eval_result_pb2.CaseResult) -> CaseView:
    metrics = ", ".join(
        f"{metric.name} {metric.mean:.3g}" if metric.HasField("mean") else f"{metric.name} -" for metric in case.metrics
    )
    rate = rate_text(case.statistics)
    flaky = " flaky" if case.statistics.flaky else ""
    return CaseView(
        id=f"case-{index}",
        name=case.case_id,
        verdict=status_text(case.status),
        style=_style(case.status),
        rate=f"{rate}{flaky}",
        metrics=metrics,
        facts=[fact for fact in (rate, metrics) if fact],
        notes=[Note(text=reason, style=_style(case.status)) for reason in reasons_of(case)],
        runs=[_run(run, case) for run in case.runs],
        is_open=case.status != _PASSED,
    )


def _run(run: eval_result_pb2.CaseRunResult, case: eval_result_pb2.CaseResult) -> RunView:
    facts = [f"{score.name} {score.score:.3g}" for score in run.scores if score.HasField("score")]
    if run.HasField("duration"):
        facts.append(f"{run.duration.ToTimedelta().total_seconds():.1f} s")
    if run.usage.HasField("total_tokens"):
        facts.append(f"{run.usage.total_tokens:,} tokens")
    notes = [Note(text=run.reason, style=_style(run.status))] if run.reason else []
    for score in run.scores:
        if score.reason:
            notes.append(Note(text=f"{score.name}: {score.reason}", style=_style(score.status)))
        notes += [
            Note(text=f"{score.name}, {one.rubric_id}: {'holds' if one.holds else 'does not hold'}: {one.reason}")
            for one in score.judgements
        ]
    return RunView(
        number=run.index + 1,
        verdict=status_text(run.status),
        style=_style(run.status),
        facts=facts,
        notes=notes,
        turns=[_turn(number, turn, run, case) for number, turn in enumerate(run.turns)],
        is_open=run.status != _PASSED and run.index == 0,
    )


def _turn(
    number: int,
    turn: eval_result_pb2.TurnResult,
    run: eval_result_pb2.CaseRunResult,
    case: eval_result_pb2.CaseResult,
) -> TurnView:
    asked = case.turns[number] if number < len(case.turns) else eval_set_pb2.EvalTurn()
    missing = {
        (one.agent, one.expected_parent)
        for score in run.scores
        for comparison in score.agents
        if comparison.turn == number
        for one in comparison.differences
        if one.kind == eval_result_pb2.DIFFERENCE_KIND_MISSING
    }
    notes = [Note(text=f"run {turn.run_id}" + (f", trace {turn.trace_id}" if turn.trace_id else ""))]
    if turn.error.message:
        notes.append(Note(text=turn.error.message, style="failed"))
    if turn.truncated:
        notes.append(Note(text="Parts of the tree were left out.", style="anomaly"))
    return TurnView(
        blocks=[Block(title=f"turn {number + 1}, user", text=asked.user)] if asked.user else [],
        expected=list(_expected(asked.expect.agents, "", 0, missing)),
        expectations=list(_expectations(asked.expect)),
        actual=[_agent(agent) for agent in turn.agents],
        notes=notes,
    )


def _expected(
    agents: Sequence[eval_set_pb2.ExpectedAgent], parent: str, depth: int, missing: set[tuple[str, str]]
) -> Iterator[TreeNode]:
    for agent in agents:
        facts = ["optional"] if agent.optional else []
        if agent.HasField("repeat"):
            facts.append(_repeat_text(agent.repeat))
        if agent.extra == eval_set_pb2.EXTRA_AGENTS_ALLOW:
            facts.append("others allowed")
        if agent.forbidden:
            facts.append(f"never below it: {', '.join(agent.forbidden)}")
        calls = [Call(name=tool.name, state="", blocks=_wanted(tool)) for tool in agent.tools]
        yield TreeNode(
            name=agent.name,
            depth=depth,
            mark="missing" if (agent.name, parent) in missing else "",
            facts=facts,
            steps=[Step(calls=calls)] if calls else [],
        )
        yield from _expected(agent.children, f"{parent}/{agent.name}" if parent else agent.name, depth + 1, missing)


def _repeat_text(repeat: eval_set_pb2.EvalRepeat) -> str:
    low = repeat.min if repeat.HasField("min") else 1
    if not repeat.HasField("max"):
        return f"at least {low} times"
    return f"{low} times" if low == repeat.max else f"{low} to {repeat.max} times"


def _expectations(expect: eval_set_pb2.Expectation) -> Iterator[Block]:
    if expect.tools:
        lines = [f"{tool.name}({tool.arguments_json})" if tool.arguments_json else tool.name for tool in expect.tools]
        yield Block(title="tool calls", text="\n".join(lines))
    if expect.HasField("answer"):
        yield Block(title="answer", text=str(expect.answer).strip())


def _wanted(tool: eval_set_pb2.ExpectedTool) -> list[Block]:
    blocks = [Block(title="arguments", text=_json(tool.arguments_json))] if tool.arguments_json else []
    if tool.HasField("arguments_match"):
        blocks.append(Block(title="arguments match", text=str(tool.arguments_match).strip()))
    if tool.result_json:
        blocks.append(Block(title="result", text=_json(tool.result_json)))
    if tool.HasField("result_match"):
        blocks.append(Block(title="result matches", text=str(tool.result_match).strip()))
    return blocks


def _agent(agent: eval_result_pb2.ResultAgent) -> TreeNode:
    facts = [f"{agent.step_count} steps"] if agent.step_count else []
    if agent.usage.HasField("total_tokens"):
        facts.append(f"{agent.usage.total_tokens:,} tokens")
    return TreeNode(
        id=agent.invocation_id,
        name=agent.name,
        depth=agent.depth,
        state=_state_text(agent.state),
        mark=_MARKS.get(agent.mark, ""),
        facts=facts,
        steps=[Step(calls=[_call(call) for call in agent.calls])] if agent.calls else [],
        answer=[Block(title="answer", text=agent.answer)] if agent.answer else [],
        is_open=agent.depth == 0,
    )


def _call(call: eval_result_pb2.ResultCall) -> Call:
    blocks = [
        Block(title=title, text=_json(text))
        for title, text in (("arguments", call.arguments_json), ("result", call.result_json))
        if text
    ]
    notes = [Note(text=call.error.message, style="failed")] if call.error.message else []
    return Call(name=call.name, state=_state_text(call.state), blocks=blocks, notes=notes)


def _json(text: str) -> str:
    """Return JSON indented; a text that is no JSON, as one that was cut, as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def _state_text(state: execution_pb2.ExecutionState.ValueType) -> str:
    return execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_").lower() if state else ""


def _style(status: eval_result_pb2.MetricStatus.ValueType) -> str:
    return status_text(status).replace(" ", "-")
