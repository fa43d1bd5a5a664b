"""Results of evaluations, lists of them, and comparisons, as lines for a terminal."""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from bough.v1 import eval_result_pb2, evaluation_pb2, execution_pb2
from bough_server.cli.render.blocks import truncate_line
from bough_server.cli.render.format import cost_text, pluralize, state_style, state_text, time_text, tokens, tokens_text
from bough_server.evals.reports.words import (
    CHANGES,
    best_text,
    cell_rows,
    change_reasons,
    comparison_sentences,
    comparison_text,
    incomplete_text,
    pass_rate_text,
    rate_text,
    rates_text,
    reasons_of,
    result_text,
    retries_text,
    value_text,
    verdict_text,
)
from bough_server.plain_text import one_line

_STYLES: Final = {
    eval_result_pb2.VERDICT_PASSED: "green",
    eval_result_pb2.VERDICT_FAILED: "red",
    eval_result_pb2.VERDICT_NOT_EVALUATED: "yellow",
}
_MOST_DIFFERENCES: Final = 5
_MOST_REASONS: Final = 10
"""The most reasons of a case; a file of --json or --html has them all."""


def result_lines(
    result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None, *, width: int
) -> list[Text]:
    """Return a line for each case with the reasons of those that did not pass, the gates, and the totals."""
    lines = [line for case in result.cases for line in _case_lines(case, width)]
    lines += _cell_lines(result, width)
    lines += [_gate_line(gate, width) for gate in result.gates]
    if comparison is not None:
        lines += comparison_lines(comparison, result.suspects, width=width)
    if result.reason:
        lines.append(Text(one_line(result.reason), style=_STYLES.get(result.verdict, "")))  # whole: it says what to do
    if result.state and (incomplete := incomplete_text(result)):
        lines.append(Text(one_line(incomplete), style="yellow"))
    if retries := retries_text(result.totals):
        lines.append(Text(retries, style="yellow"))
    lines.append(_total_line(result))
    return lines


def _case_lines(case: eval_result_pb2.CaseResult, width: int) -> Iterator[Text]:
    line = Text(f"{verdict_text(case.verdict):10}  ", style=_STYLES.get(case.verdict, ""))
    line.append(one_line(case.case_id), style="default")
    if case.statistics.trials > 1:
        flaky = ", flaky" if case.statistics.flaky else ""
        line.append(f"  {rate_text(case.statistics)}{flaky}", style="dim")
    if means := " ".join(f"{one.name}={one.mean:.3g}" for one in case.metrics if one.HasField("mean")):
        line.append(f"  {means}", style="dim")
    yield truncate_line(line, width)
    for reason in _reasons(case):
        yield Text(f"            {reason}", style="dim")  # whole: it says what to do


def _reasons(case: eval_result_pb2.CaseResult) -> list[str]:
    """Return why a case did not pass, each reason on one line."""
    shown = [one_line(reason) for reason in reasons_of(case)]
    more = len(shown) - _MOST_REASONS
    return shown if more <= 0 else [*shown[:_MOST_REASONS], f"and {pluralize(more, 'more reason')}"]


def _cell_lines(result: eval_result_pb2.EvalResult, width: int) -> Iterator[Text]:
    """Yield the table of the cells of a matrix, and what is proven of the best of them."""
    rows = cell_rows(result)
    longest = max((len(one_line(row.name)) for row in rows), default=0)
    for row in rows:
        line = Text(f"{'best' if row.is_best else 'cell':10}  ", style="green" if row.is_best else "dim")
        line.append(f"{one_line(row.name):{longest}}", style="default")
        parts = [f"{row.cases} cases", row.rate, row.means, row.cost]
        line.append("  " + ", ".join(one_line(part) for part in parts if part), style="dim")
        yield truncate_line(line, width)
    if best := best_text(result):
        yield Text(one_line(best))


def _gate_line(gate: eval_result_pb2.GateResult, width: int) -> Text:
    line = Text(f"{verdict_text(gate.verdict):10}  ", style=_STYLES.get(gate.verdict, ""))
    line.append(f"gate {gate.gate}", style="default")
    if measured := value_text(gate):
        line.append(f"  is {one_line(measured)}", style="dim")
    if gate.reason:
        line.append(f"  {one_line(gate.reason)}", style="dim")
    return truncate_line(line, width)


def _total_line(result: eval_result_pb2.EvalResult) -> Text:
    found = result.totals
    line = Text(f"{result_text(result)}: ", style=_STYLES.get(result.verdict, ""))
    parts = [f"{found.cases_passed:,} of {pluralize(found.cases, 'case')} passed"]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not scored")
    if found.trials > found.cases:
        parts.append(f"{found.trials_passed:,} of {pluralize(found.trials, 'trial')} passed")
    if found.HasField("pass_rate_interval"):
        parts.append(f"pass rate {pass_rate_text(found)}")
    if tokens(found.usage) is not None:
        parts.append(f"{tokens_text(found.usage)} tokens")
    if found.usage.HasField("cost_nanos"):
        parts.append(cost_text(found.usage))
    for name, usage in (("judges", found.judge_usage), ("simulated users", found.user_usage)):
        if usage.HasField("cost_nanos"):
            parts.append(f"{name} {cost_text(usage)}")
    line.append(", ".join(parts), style="default")
    return line


def comparison_lines(
    comparison: eval_result_pb2.EvalComparison, suspects: eval_result_pb2.EvalSuspects, *, width: int
) -> list[Text]:
    """Return what two results depended on differently, and the cases that changed."""
    lines = [truncate_line(Text(one_line(changed), style="dim"), width) for changed in comparison.pins_changed]
    for name, state in (("baseline", comparison.state_baseline), ("candidate", comparison.state_candidate)):
        if state != execution_pb2.EXECUTION_STATE_SUCCEEDED:
            lines.append(Text(f"The {name} is of an evaluation that is {state_text(state)}: it may lack cases."))
    for case in comparison.cases:
        if case.change not in CHANGES:
            continue
        line = Text(f"{CHANGES[case.change]:10}  {one_line(case.case_id)}")
        details = [rates_text(case)]
        if case.verdict_baseline and case.verdict_candidate:
            details.insert(0, f"{verdict_text(case.verdict_baseline)} -> {verdict_text(case.verdict_candidate)}")
        line.append(f"  {', '.join(details)}", style="dim")
        lines.append(truncate_line(line, width))
        shown = change_reasons(case)[: _MOST_DIFFERENCES + 1]
        lines += [truncate_line(Text(f"            {one_line(text)}", style="dim"), width) for text in shown]
    lines.append(Text(f"compared with the baseline: {comparison_text(comparison)}"))
    return [*lines, *(Text(one_line(text), style="dim") for text in comparison_sentences(comparison, suspects))]


def evaluations_table(evaluations: Sequence[evaluation_pb2.Evaluation], width: int) -> list[Text]:
    """Return a row for each evaluation: its id, verdict or state, creation time, set and agent."""
    lines = [Text(f"{'evaluation':36}  {'verdict':10}  {'created':16}  set, agent"[:width], style="dim")]
    for one in evaluations:
        line = Text(f"{one.evaluation_id:36}  ")
        if one.verdict:
            line.append(f"{verdict_text(one.verdict):10}", style=_STYLES.get(one.verdict, ""))
        else:
            line.append(f"{state_text(one.state):10}", style=state_style(one.state))
        line.append(f"  {time_text(one.create_time)}  {one.eval_set_name}, {one.agent or '-'}")
        lines.append(truncate_line(line, width))
    return lines


def diff_lines(diff: eval_result_pb2.InvocationDiff, *, width: int) -> list[Text]:
    """Return the differences of two runs."""
    if diff.same:
        return [Text("The agents, their calls and the answers are the same.")]
    lines = [Text(one_line(one.message)) for one in diff.agent_differences]
    lines += [Text(one_line(one.message)) for one in diff.call_differences]
    if not diff.same_answer:
        lines.append(Text("The answers differ."))
    return [truncate_line(line, width) for line in lines]
