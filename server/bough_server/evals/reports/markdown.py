"""Results as Markdown, for a comment on a pull request or the summary of a CI job."""

import re
from collections.abc import Iterator
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.reports.words import cost_text, rate_text, reasons_of, status_text

MAX_CHARACTERS: Final = 65_000
"""The most characters of a report: a comment on GitHub takes 65,536."""

_MOST_REASON: Final = 300
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|#~])")
_ICONS: Final = {
    eval_result_pb2.METRIC_STATUS_PASSED: "\N{WHITE HEAVY CHECK MARK}",
    eval_result_pb2.METRIC_STATUS_FAILED: "\N{CROSS MARK}",
    eval_result_pb2.METRIC_STATUS_NOT_EVALUATED: "\N{WHITE QUESTION MARK ORNAMENT}",
}
_CHANGES: Final = {
    eval_result_pb2.CASE_CHANGE_BETTER: "better",
    eval_result_pb2.CASE_CHANGE_WORSE: "worse",
    eval_result_pb2.CASE_CHANGE_REMOVED: "gone",
    eval_result_pb2.CASE_CHANGE_ADDED: "new",
}


def markdown_text(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return a result as Markdown of at most MAX_CHARACTERS.

    Cases that did not pass come first. What does not fit is left out from the end, passing cases first, and counted.
    """
    head = [*_head(result), *_gates(result), *(_compared(comparison) if comparison is not None else ())]
    cases = sorted(result.cases, key=lambda case: case.status == eval_result_pb2.METRIC_STATUS_PASSED)
    rows = [_row(case) for case in cases]
    kept, left_out = _fitting(rows, MAX_CHARACTERS - sum(len(line) + 1 for line in head) - 200)
    lines = [*head, "| | case | runs | why |", "|---|---|---|---|", *kept]
    if left_out:
        lines += ["", f"{left_out} more cases are left out."]
    return "\n".join(lines) + "\n"


def _head(result: eval_result_pb2.EvalResult) -> Iterator[str]:
    found = result.totals
    yield f"### {_icon(result.status)} {_plain(result.set_name or 'Evaluation')}: {status_text(result.status)}"
    yield ""
    parts = [f"{found.cases_passed} of {found.cases} cases passed"]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not judged")
    if found.HasField("pass_rate"):
        bounds = found.pass_rate_interval
        parts.append(f"pass rate {found.pass_rate:.2f} ({bounds.lower:.2f} to {bounds.upper:.2f})")
    parts += [f"{_plain(name)} {mean:.3g}" for name, mean in sorted(found.metric_means.items())]
    if cost := cost_text(result):
        parts.append(cost)
    yield ", ".join(parts)
    yield ""
    if found.flaky_cases:
        yield "Flaky: " + ", ".join(_plain(case_id) for case_id in found.flaky_cases[:20])
        yield ""


def _gates(result: eval_result_pb2.EvalResult) -> Iterator[str]:
    for gate in result.gates:
        value = f": {gate.value:.4g}" if gate.HasField("value") else ""
        reason = f" ({_plain(gate.reason)})" if gate.reason else ""
        yield f"- {_icon(gate.status)} `{gate.gate.replace('`', '')}`{value}{reason}"
    if result.gates:
        yield ""


def _compared(comparison: eval_result_pb2.EvalComparison) -> Iterator[str]:
    yield (
        f"Than the baseline: {comparison.better} better, {comparison.worse} worse, {comparison.removed} gone, "
        f"{comparison.added} new."
    )
    for text in comparison.pins_changed:
        yield f"- {_plain(text)}"
    for case in comparison.cases:
        if case.change in _CHANGES and case.change != eval_result_pb2.CASE_CHANGE_ADDED:
            why = "; ".join(_plain(one.message) for one in case.differences[:3])
            yield f"- {_CHANGES[case.change]}: {_plain(case.case_id)}{f' ({why})' if why else ''}"
    yield ""


def _row(case: eval_result_pb2.CaseResult) -> str:
    reasons = "; ".join(_plain(reason) for reason in reasons_of(case)[:3])
    flaky = " flaky" if case.statistics.flaky else ""
    return f"| {_icon(case.status)} | {_plain(case.case_id)} | {rate_text(case.statistics)}{flaky} | {reasons} |"


def _fitting(rows: list[str], most: int) -> tuple[list[str], int]:
    """Return the rows that fit, and how many do not."""
    size = 0
    for index, row in enumerate(rows):
        size += len(row) + 1
        if size > most:
            return rows[:index], len(rows) - index
    return rows, 0


def _icon(status: eval_result_pb2.MetricStatus.ValueType) -> str:
    return _ICONS.get(status, "")


def _plain(text: str) -> str:
    """Return a text on one line that Markdown shows as it is."""
    line = " ".join(text.split())
    return _SPECIAL.sub(r"\\\1", line if len(line) <= _MOST_REASON else line[: _MOST_REASON - 1] + "…")
