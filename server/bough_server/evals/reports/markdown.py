"""Results as Markdown, for a comment on a pull request or the summary of a CI job."""

import html
import re
from collections.abc import Iterator, Sequence
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.reports.tree_text import trees_text
from bough_server.evals.reports.words import (
    CHANGES,
    best_text,
    cell_rows,
    change_reasons,
    comparison_sentences,
    comparison_text,
    cost_text,
    incomplete_text,
    means_texts,
    pass_rate_text,
    rate_text,
    rates_text,
    reasons_of,
    result_text,
    retries_text,
    value_text,
    verdict_text,
)
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.plain_text import escape_controls, one_line

MAX_CHARACTERS: Final = 65_000
"""The most characters of a report: a comment on GitHub takes 65,536."""

_MOST_REASON: Final = 300
_MOST_REASONS: Final = 3
_MOST_SENTENCE: Final = 2_000
"""The most characters of a sentence of the comparison, which may name every metric."""
_MOST_METRICS: Final = 20
_MOST_FLAKY: Final = 20
_MOST_OF_LIST: Final = 12_000
"""The most characters of the list of gates, and of that of changes."""
_MOST_OF_TREES: Final = 8_000
"""The most characters of the trees of a case."""

_PASSED: Final = eval_result_pb2.VERDICT_PASSED
_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>|#~$])")
_LINKS: Final = re.compile(r"([@#])(?=\w)|(://)|\b(www)(?=\.)|\b(GH)(?=-\d)", re.IGNORECASE)
"""What GitHub makes links of, after Markdown is read: mentions, which notify people, issues and addresses."""

_BACKTICKS: Final = re.compile("`{3,}")
_ZERO_WIDTH_SPACE: Final = "\u200b"


def markdown_text(result: eval_result_pb2.EvalResult, comparison: eval_result_pb2.EvalComparison | None = None) -> str:
    """Return a result as Markdown of at most MAX_CHARACTERS.

    Cases that did not pass come first. Below them are the trees of those, folded. What does not fit is left out from
    the end, trees first, then passing cases, and counted.
    """
    head = [*_head(result), *_fit_list(_gates(result))]
    if comparison is not None:
        head += [f"Against the baseline: {comparison_text(comparison)}.", ""]
        sentences = [_plain(text, _MOST_SENTENCE) for text in comparison_sentences(comparison, result.suspects)]
        sentences += map(_plain, comparison.pins_changed)
        head += [*_fit_list(f"- {text}" for text in sentences), *_fit_table(_changes(comparison))]
    cases = sorted(result.cases, key=lambda case: case.verdict == _PASSED)
    rows = [_row(case) for case in cases]
    kept, left_out = _fitting(rows, MAX_CHARACTERS - sum(len(line) + 1 for line in head) - 200)
    lines = [*head, "| verdict | case | trials | why |", "|---|---|---|---|", *kept]
    if left_out:
        lines += ["", f"{left_out} more cases are left out."]
    lines += _fit_trees(cases, MAX_CHARACTERS - sum(len(line) + 1 for line in lines) - 200)
    return "\n".join(lines) + "\n"


def _head(result: eval_result_pb2.EvalResult) -> Iterator[str]:
    found = result.totals
    yield f"### {_plain(result.eval_set_name or 'Evaluation')}: {result_text(result)}"
    yield ""
    if incomplete := incomplete_text(result):
        yield _plain(incomplete)
        yield ""
    parts = [f"{found.cases_passed:,} of {pluralize(found.cases, 'case')} passed"]
    if found.cases_not_evaluated:
        parts.append(f"{found.cases_not_evaluated} not scored")
    if found.HasField("pass_rate"):
        parts.append(f"pass rate {pass_rate_text(found)}")
    parts += map(_plain, means_texts(found)[:_MOST_METRICS])
    if cost := cost_text(found):
        parts.append(_plain(cost))
    yield ", ".join(parts)
    yield ""
    for text in filter(None, (result.reason, retries_text(found), best_text(result))):
        yield _plain(text)
        yield ""
    if result.cells:
        yield "| cell | cases | pass rate | means | cost |"
        yield "|---|---|---|---|---|"
        for cell in cell_rows(result):
            name = f"**{_plain(cell.name)}**, the best" if cell.is_best else _plain(cell.name)
            yield f"| {name} | {cell.cases} | {cell.rate} | {_plain(cell.means)} | {_plain(cell.cost)} |"
        yield ""
    if found.flaky_cases:
        more = f" and {len(found.flaky_cases) - _MOST_FLAKY} more" if len(found.flaky_cases) > _MOST_FLAKY else ""
        yield "Flaky: " + ", ".join(_plain(case_id) for case_id in found.flaky_cases[:_MOST_FLAKY]) + more
        yield ""


def _gates(result: eval_result_pb2.EvalResult) -> Iterator[str]:
    for gate in result.gates:
        value = f": {_plain(measured)}" if (measured := value_text(gate)) else ""
        reason = f" ({_plain(gate.reason)})" if gate.reason else ""
        yield f"- {verdict_text(gate.verdict)}: {_plain(gate.gate)}{value}{reason}"


def _changes(comparison: eval_result_pb2.EvalComparison) -> Iterator[str]:
    """Yield the rows of the cases that changed; those that were added are rows of the result."""
    for case in comparison.cases:
        if case.change in CHANGES and case.change != eval_result_pb2.CASE_CHANGE_ADDED:
            why = _join_reasons(change_reasons(case))
            yield f"| {CHANGES[case.change]} | {_plain(case.case_id)} | {rates_text(case)} | {why} |"


def _fit_table(rows: Iterator[str]) -> list[str]:
    """Return the rows of the table of changes that fit, and how many do not; nothing if there are none."""
    lines = list(rows)
    kept, left_out = _fitting(lines, _MOST_OF_LIST)
    more = ["", f"{left_out} more changes are left out."] if left_out else []
    return ["| change | case | pass rate | why |", "|---|---|---|---|", *kept, *more, ""] if lines else []


def _fit_list(items: Iterator[str]) -> list[str]:
    """Return the items of a list that fit, how many do not, and an empty line; nothing if there are none."""
    lines = list(items)
    kept, left_out = _fitting(lines, _MOST_OF_LIST)
    more = [f"- and {left_out} more"] if left_out else []
    return [*kept, *more, ""] if lines else []


def _row(case: eval_result_pb2.CaseResult) -> str:
    reasons = _join_reasons(reasons_of(case))
    flaky = " flaky" if case.statistics.flaky else ""
    columns = verdict_text(case.verdict), _plain(case.case_id), f"{rate_text(case.statistics)}{flaky}", reasons
    return f"| {' | '.join(columns)} |"


def _fit_trees(cases: Sequence[eval_result_pb2.CaseResult], most: int) -> list[str]:
    """Return the folded trees of the cases that did not pass, as far as they fit, and how many do not."""
    lines: list[str] = []
    left_out = 0
    for case in cases:
        if case.verdict == _PASSED or all(trial.verdict == _PASSED for trial in case.trials):
            continue
        if not left_out:  # there may be thousands: those after the first that does not fit are only counted
            lines.append(f"\n{_fold(case.case_id, trees_text(case, most_trials=1))}")
            most -= len(lines[-1]) + 1
        left_out += most < 0
    if left_out:
        lines[-1] = f"\nThe trees of {pluralize(left_out, 'more case')} are left out."
    return lines


def _fold(title: str, text: str) -> str:
    """Return a text folded below a title. A fence longer than any in the text keeps it a text."""
    lines, left_out = _fitting(text.split("\n"), _MOST_OF_TREES)
    more = [f"and {pluralize(left_out, 'more line')}"] if left_out else []
    fence = "`" * max([3, *(len(run) + 1 for run in _BACKTICKS.findall(text))])
    summary = html.escape(_break_links(_shorten(title)))
    head = f"<details><summary>{summary}: expected and actual tree</summary>"
    return "\n".join([head, "", f"{fence}text", *lines, *more, fence, "", "</details>"])


def _fitting(rows: list[str], most: int) -> tuple[list[str], int]:
    """Return the rows that fit, and how many do not."""
    size = 0
    for index, row in enumerate(rows):
        size += len(row) + 1
        if size > most:
            return rows[:index], len(rows) - index
    return rows, 0


def _join_reasons(reasons: Sequence[str]) -> str:
    """Return the first reasons as one text; some are sentences and end with a period."""
    return "; ".join(map(_plain, reasons[:_MOST_REASONS])).replace(".; ", ". ")


def _plain(text: str, most: int = _MOST_REASON) -> str:
    """Return a text on one line that Markdown shows as it is, and in which nothing is a link or notifies anyone."""
    line = _break_links(_shorten(text, most))
    return _SPECIAL.sub(r"\\\1", line.replace("&", "&amp;"))


def _shorten(text: str, most: int = _MOST_REASON) -> str:
    line = one_line(escape_controls(text))
    return line if len(line) <= most else line[: most - 1] + "…"


def _break_links(line: str) -> str:
    return _LINKS.sub(lambda match: match[0] + _ZERO_WIDTH_SPACE, line)
