"""Results as one HTML page: cases, gates, and the expected tree beside the actual one with the differences marked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2, input_pb2, usage_pb2
from bough_server.evals.metrics.tool_names import name_words
from bough_server.evals.reports.expectations import call_blocks, expectation_blocks, mode_words, repeat_words
from bough_server.evals.reports.page import Block, Call, Note, Step, TreeNode, indent_json, render
from bough_server.evals.reports.words import (
    CHANGES,
    change_reasons,
    comparison_sentences,
    comparison_text,
    describe_judgment,
    rate_text,
    rates_text,
    reasons_of_trial,
    verdict_text,
)

_MARKS: Final = {
    eval_result_pb2.TREE_MARK_MATCHED: "matched",
    eval_result_pb2.TREE_MARK_MOVED: "moved",
    eval_result_pb2.TREE_MARK_UNEXPECTED: "unexpected",
    eval_result_pb2.TREE_MARK_ALLOWED: "allowed",
    eval_result_pb2.TREE_MARK_VIOLATED: "violated",
}
_CHANGE_STYLES: Final = {
    eval_result_pb2.CASE_CHANGE_BETTER: "passed",
    eval_result_pb2.CASE_CHANGE_WORSE: "failed",
    eval_result_pb2.CASE_CHANGE_REMOVED: "anomaly",
}
_PASSED: Final = eval_result_pb2.VERDICT_PASSED


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
    style: str
    rates: str
    reasons: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """A turn of a run."""

    blocks: Sequence[Block]
    expected: Sequence[TreeNode]
    expectations: Sequence[Block]
    actual: Sequence[TreeNode]
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """A trial of a case."""

    number: int
    verdict: str
    style: str
    facts: Sequence[str]
    notes: Sequence[Note]
    blocks: Sequence[Block]
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
    trials: Sequence[TrialView]
    is_open: bool


def html_page(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return the page of a result. It loads nothing, and works from a file."""
    return render(
        "result.html.jinja",
        title=result.eval_set_name or "evaluation",
        verdict=verdict_text(result.verdict),
        style=_style(result.verdict),
        head=list(_head(result, comparison)),
        gates=[_gate(gate) for gate in result.gates],
        changes=list(_changes(comparison)) if comparison is not None else [],
        cases=[_case(index, case) for index, case in enumerate(result.cases)],
    )


def _head(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None) -> Iterator[Note]:
    found = result.totals
    parts = [
        f"{found.cases_passed} of {found.cases} cases passed",
        f"{found.trials_passed} of {found.trials} trials passed",
    ]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not scored")
    if found.HasField("pass_rate"):
        bounds = found.pass_rate_interval
        parts.append(f"pass rate {found.pass_rate:.2f} ({bounds.lower:.2f} to {bounds.upper:.2f})")
    yield Note(text=" · ".join(parts), style=_style(result.verdict))
    if result.reason:
        yield Note(text=result.reason, style=_style(result.verdict))
    means = [f"{name} {mean:.3g}" for name, mean in sorted(found.metric_means.items())]
    if means:
        yield Note(text=" · ".join(means))
    for name, usage in (("runs", found.usage), ("judges", found.judge_usage)):
        if used := list(_usage_facts(usage)):
            yield Note(text=f"{name}: {' · '.join(used)}")
    if found.flaky_cases:
        yield Note(text=f"flaky: {', '.join(found.flaky_cases)}", style="anomaly")
    if result.evaluation_id:
        yield Note(text=f"evaluation {result.evaluation_id}, agent {result.pins.agent or '-'}")
    if comparison is not None:
        yield Note(text=f"against the baseline: {comparison_text(comparison)}")
        yield from (Note(text=text) for text in comparison_sentences(comparison, result.suspects))
        yield from (Note(text=text, style="anomaly") for text in comparison.pins_changed)


def _gate(gate: eval_result_pb2.GateResult) -> GateRow:
    value = f"{gate.value:.4g}" if gate.HasField("value") else ""
    verdict = verdict_text(gate.verdict)
    return GateRow(gate=gate.gate, verdict=verdict, style=_style(gate.verdict), value=value, reason=gate.reason)


def _changes(comparison: eval_result_pb2.EvalComparison) -> Iterator[ChangeRow]:
    for case in comparison.cases:
        if case.change in CHANGES:
            yield ChangeRow(
                case_id=case.case_id,
                change=CHANGES[case.change],
                style=_CHANGE_STYLES.get(case.change, ""),
                rates=rates_text(case),
                reasons=" ".join(change_reasons(case)),
            )


def _case(index: int, case: eval_result_pb2.CaseResult) -> CaseView:
    metrics = ", ".join(
        f"{metric.name} {metric.mean:.3g}" if metric.HasField("mean") else f"{metric.name} -" for metric in case.metrics
    )
    rate = rate_text(case.statistics)
    flaky = " flaky" if case.statistics.flaky else ""
    labels = [f"{name}={value}" for name, value in sorted(case.labels.items())]
    return CaseView(
        id=f"case-{index}",
        name=case.case_id,
        verdict=verdict_text(case.verdict),
        style=_style(case.verdict),
        rate=f"{rate}{flaky}",
        metrics=metrics,
        facts=[fact for fact in (f"{rate}{flaky}", metrics, *labels) if fact],
        notes=[Note(text=case.reason, style=_style(case.verdict))] if case.reason else [],
        trials=[_trial(trial, case) for trial in case.trials],
        is_open=case.verdict != _PASSED,
    )


def _trial(trial: eval_result_pb2.CaseTrialResult, case: eval_result_pb2.CaseResult) -> TrialView:
    facts = [f"{score.name} {score.score:.3g}" for score in trial.scores if score.HasField("score")]
    if trial.HasField("duration"):
        facts.append(f"{trial.duration.ToTimedelta().total_seconds():.1f} s")
    facts += _usage_facts(trial.usage)
    notes = [Note(text=reason, style=_style(trial.verdict)) for reason in reasons_of_trial(trial)]
    notes += [Note(text=f"{score.name}, {describe_judgment(one)}") for score in trial.scores for one in score.judgments]
    return TrialView(
        number=trial.trial + 1,
        verdict=verdict_text(trial.verdict),
        style=_style(trial.verdict),
        facts=facts,
        notes=notes,
        blocks=list(_question(trial.unanswered)) if trial.HasField("unanswered") else [],
        turns=[_turn(number, turn, trial, case) for number, turn in enumerate(trial.turns)],
        is_open=trial.verdict != _PASSED and trial.trial == 0,
    )


def _turn(
    number: int,
    turn: eval_result_pb2.EvalTurnResult,
    trial: eval_result_pb2.CaseTrialResult,
    case: eval_result_pb2.CaseResult,
) -> TurnView:
    asked = case.turns[number] if number < len(case.turns) else eval_set_pb2.EvalTurn()
    notes = [Note(text=f"run {turn.run_id}" + (f", trace {turn.trace_id}" if turn.trace_id else ""))]
    if turn.error.message:
        notes.append(Note(text=turn.error.message, style="failed"))
    if turn.truncated:
        notes.append(Note(text="Parts of the tree or of its texts were left out.", style="anomaly"))
    user = asked.user or "".join(part.text or part.data_json for part in asked.input.parts)
    return TurnView(
        blocks=[Block(title=f"turn {number + 1}, user", text=user)] if user else [],
        expected=list(_build_expected_nodes(asked.expect.agents, "", 0, _find_expected_marks(number, trial))),
        expectations=list(expectation_blocks(asked.expect)),
        actual=[_agent(agent) for agent in turn.agents],
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
        calls = [Call(name=name_words(tool), state="", blocks=list(call_blocks(tool))) for tool in agent.tools]
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
    if mode := mode_words(agent):
        yield mode


def _agent(agent: eval_result_pb2.EvalAgent) -> TreeNode:
    # The id is no anchor: it is not unique among the runs of a page.
    return TreeNode(
        name=agent.name,
        depth=agent.depth,
        state=_state_text(agent.state),
        mark=_MARKS.get(agent.mark, ""),
        facts=[*([_pluralize(agent.step_count, "step")] if agent.step_count else []), *_usage_facts(agent.usage)],
        steps=list(_steps(agent)),
        answer=[Block(title="answer", text=agent.answer)] if agent.answer else [],
        is_open=agent.depth == 0,
    )


def _steps(agent: eval_result_pb2.EvalAgent) -> Iterator[Step]:
    """Yield each step with its calls, then the calls outside of steps."""
    calls: dict[int | None, list[Call]] = {}
    numbers = {step.index for step in agent.steps}
    for call in agent.calls:
        number = call.step_index if call.HasField("step_index") and call.step_index in numbers else None
        calls.setdefault(number, []).append(_call(call))
    for step in agent.steps:
        blocks = [Block(title=f"step {step.index + 1}", text=step.text)] if step.text else []
        yield Step(blocks=blocks, calls=calls.pop(step.index, []))
    if None in calls:
        yield Step(calls=calls[None])


def _call(call: eval_result_pb2.EvalCall) -> Call:
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
    return Call(name=call.name, state=_state_text(call.state), blocks=blocks, notes=notes)


def _question(request: input_pb2.InputRequest) -> Iterator[Block]:
    """Yield the question that no answer of the case answers."""
    asker = " / ".join(request.agent_path)
    yield Block(title=f"asked by {asker}" if asker else "asked", text=request.prompt)
    if request.call.name:
        yield Block(title=f"about {request.call.name}", text=indent_json(request.call.arguments_json))


def _usage_facts(usage: usage_pb2.Usage) -> Iterator[str]:
    if usage.HasField("total_tokens"):
        yield f"{usage.total_tokens:,} tokens"
    elif usage.HasField("input_tokens") or usage.HasField("output_tokens"):
        yield f"{usage.input_tokens + usage.output_tokens:,} tokens"
    if usage.HasField("cost_nanos"):
        yield f"{usage.cost_nanos / 1e9:.4g} {usage.currency_code}"


def _pluralize(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _state_text(state: execution_pb2.ExecutionState.ValueType) -> str:
    """Return a state in words; empty for one that a later version has."""
    if not state or state not in execution_pb2.ExecutionState.values():
        return ""
    return execution_pb2.ExecutionState.Name(state).removeprefix("EXECUTION_STATE_").lower()


def _style(status: eval_result_pb2.Verdict.ValueType) -> str:
    return verdict_text(status).replace(" ", "-")
