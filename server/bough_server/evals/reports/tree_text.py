"""Both trees of the trials that did not pass, with their numbered calls and the differences, as plain text."""

from collections.abc import Iterator, Sequence
from typing import Final

from bough.v1 import eval_result_pb2
from bough_server.evals.reports.page import Block, Call, TreeNode
from bough_server.evals.reports.trees import TurnView, iter_turn_views
from bough_server.evals.reports.words import reasons_of_trial, verdict_text
from bough_server.evals.results.gate_numbers import pluralize
from bough_server.plain_text import escape_controls, one_line

_MOST_TEXT: Final = 200
"""The most characters of a text; a file of --json or --html has more."""
_MOST_LINES: Final = 200
"""The most lines of a tree."""
_MOST_INDENT: Final = 24


def trees_text(case: eval_result_pb2.CaseResult, *, most_trials: int) -> str:
    """Return the trees and differences of the first trials of a case that did not pass; empty if there are none.

    Each line begins with words of the report or with spaces, so that no text of a result looks like one of its lines.
    """
    failed = [trial for trial in case.trials if trial.verdict != eval_result_pb2.VERDICT_PASSED]
    lines = [line for trial in failed[:most_trials] for line in _trial_lines(trial, case)]
    if len(failed) > most_trials:
        lines.append(f"and {pluralize(len(failed) - most_trials, 'more trial')} that did not pass")
    return "\n".join(lines)


def _trial_lines(trial: eval_result_pb2.CaseTrialResult, case: eval_result_pb2.CaseResult) -> Iterator[str]:
    yield f"trial {trial.trial + 1}: {verdict_text(trial.verdict)}"
    for turn in iter_turn_views(trial, case):
        yield from _turn_lines(turn)
    if reasons := reasons_of_trial(trial):
        yield "differences:"
        yield from _limit([f"  - {_line(reason)}" for reason in reasons])


def _turn_lines(turn: TurnView) -> Iterator[str]:
    yield from (_block_line(block) for block in turn.blocks)
    yield "expected:"
    expected = [line for node in turn.expected for line in _node_lines(node)]
    for block in turn.expectations:
        expected += [f"  {block.title}:", *(f"    {_indent_line(line)}" for line in block.text.splitlines())]
    yield from _limit(expected or ["  nothing"])
    yield "actual:"
    yield from _limit([line for node in turn.actual for line in _node_lines(node)] or ["  no tree"])
    yield from (f"  {_line(note.text)}" for note in turn.notes)


def _node_lines(node: TreeNode) -> Iterator[str]:
    indent = "  " * (node.indent + 1)
    facts = [fact for fact in (node.state, *map(_line, node.facts)) if fact]
    mark = f" [{node.mark}]" if node.mark else ""
    yield f"{indent}{_line(node.name)}{mark}{': ' if facts else ''}{', '.join(facts)}"
    yield from (f"{indent}  {_call_line(call)}" for step in node.steps for call in step.calls)
    yield from (f"{indent}  {_block_line(block)}" for block in node.answer)


def _call_line(call: Call) -> str:
    number = f"{call.number}." if call.number else "-"
    details = [*map(_block_line, call.blocks), *(_line(note.text) for note in call.notes)]
    state = f" {call.state}" if call.state else ""
    return f"{number} {_line(call.name)}{state}{': ' if details else ''}{'; '.join(details)}"


def _block_line(block: Block) -> str:
    return f"{block.title}: {_line(block.text)}"


def _line(text: str) -> str:
    line = one_line(escape_controls(text))
    return line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + "…"


def _indent_line(text: str) -> str:
    return " " * min(len(text) - len(text.lstrip()), _MOST_INDENT) + _line(text)


def _limit(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"  and {pluralize(len(lines) - _MOST_LINES, 'more line')}"
