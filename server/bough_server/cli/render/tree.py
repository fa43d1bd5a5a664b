"""The agent tree of a run as a table, alone or beside another tree."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from bough.v1 import execution_pb2, invocation_pb2
from bough_server.cli.render.format import (
    UNKNOWN,
    amount_text,
    clip,
    clip_middle,
    cost_text,
    error_text,
    pluralize,
    seconds_between,
    seconds_text,
    state_style,
    state_text,
    tokens,
    tokens_text,
)
from bough_server.cli.render.notes import cancellation_text, ending_text, finish_text, kind_text
from bough_server.plain_text import one_line

_DEEPEST: Final = 8
"""Levels that are drawn; deeper agents show their depth as a number."""
_GAP: Final = 2
_NARROWEST_NAME: Final = 12
_COLUMNS: Final[Sequence[tuple[str, int]]] = (
    ("state", 9),
    ("time", 8),
    ("steps", 5),
    ("tools", 5),
    ("tokens", 9),
    ("cost", 9),
)
_NOTED_STATES: Final = (
    execution_pb2.EXECUTION_STATE_FAILED,
    execution_pb2.EXECUTION_STATE_CANCELLED,
    execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
)
"""States of tool calls that are counted beside the tool's name."""

_BETWEEN: Final = " │ "

Titled = tuple[str, invocation_pb2.Invocation]


def tree_lines(
    invocation: invocation_pb2.Invocation, *, width: int = 80, is_pipe: bool = False, shown_errors: Sequence[str] = ()
) -> list[Text]:
    """Return the tree, its totals and its anomalies as lines of at most `width` cells; in a pipe errors are not cut.

    Messages of errors that `shown_errors` has are left out.
    """
    room = sys.maxsize if is_pipe else width
    columns = _columns(invocation)
    name_width = max(_NARROWEST_NAME, width - _sizes(columns))
    lines = [_row("agent", _heads(invocation, columns), columns, name_width, style="dim")]
    tools, unfinished = _tools_by_agent(invocation), _finish_reasons_by_agent(invocation)
    for agent, (head, below) in zip(invocation.agents, _connectors(invocation.agents), strict=True):
        lines.append(_agent_row(agent, head, columns, name_width))
        if description := kind_and_end(agent):
            lines.append(_note(below, f"· {description}", "dim", width))
        if agent.invocation_id in tools:
            lines.append(_note(below, f"· {tools[agent.invocation_id]}", "dim", width))
        if agent.invocation_id in unfinished:
            lines.append(_note(below, f"· finish reason {unfinished[agent.invocation_id]}", "yellow", width))
        if agent.HasField("error") and agent.state != execution_pb2.EXECUTION_STATE_CANCELLED:
            lines.append(_note(below, f"✗ {error_text(agent.error, shown_errors)}", state_style(agent.state), room))
    if (more := invocation.agents_total - len(invocation.agents)) > 0:
        lines.append(Text(f"… and {pluralize(more, 'more agent')}", style="dim"))
    lines += [Text(line, style="bold") for line in _join_parts(totals(invocation), width)]
    if invocation.HasField("forked_from"):
        lines += [Text(line, style="dim") for line in _join_parts(origin_parts(invocation), width)]
    if not invocation.agents and invocation.HasField("error"):
        lines.append(Text(clip(f"✗ {error_text(invocation.error, shown_errors)}", room), style="red"))
    anomalies = [*invocation.anomalies, *(each for agent in invocation.agents for each in agent.anomalies)]
    return lines + [Text(clip(f"! {one_line(each.message)}", room), style="yellow") for each in anomalies]


def narrowest_tree(invocation: invocation_pb2.Invocation) -> int:
    """Return the fewest cells that a tree's columns fit in."""
    return _NARROWEST_NAME + _sizes(_columns(invocation))


def _columns(invocation: invocation_pb2.Invocation) -> Sequence[tuple[str, int]]:
    states = [len(state_text(agent.state)) for agent in invocation.agents]
    return [
        (name, max([size, *states]) if name == "state" else size)
        for name, size in _COLUMNS
        if name != "cost" or _has_prices(invocation)
    ]


def _heads(invocation: invocation_pb2.Invocation, columns: Sequence[tuple[str, int]]) -> list[str]:
    cost = f"cost {invocation.tree_usage.currency_code}".rstrip()
    return [cost if name == "cost" else name for name, _ in columns]


def _sizes(columns: Sequence[tuple[str, int]]) -> int:
    return sum(size + _GAP for _, size in columns)


def _has_prices(invocation: invocation_pb2.Invocation) -> bool:
    return invocation.tree_usage.HasField("cost_nanos")


def _row(
    name: str, cells: Sequence[str], columns: Sequence[tuple[str, int]], name_width: int, *, style: str = ""
) -> Text:
    text = name + " " * max(0, name_width - cell_len(name))
    for cell, (column, size) in zip(cells, columns, strict=True):
        text += " " * _GAP + (f"{cell:<{size}}" if column == "state" else f"{cell:>{size}}")
    return Text(text.rstrip(), style=style)


def _agent_row(
    agent: invocation_pb2.AgentInvocation, head: str, columns: Sequence[tuple[str, int]], name_width: int
) -> Text:
    known = {
        "state": state_text(agent.state),
        "time": _time_text(agent),
        "steps": str(agent.step_count),
        "tools": str(agent.usage.tool_calls),
        "tokens": tokens_text(agent.usage),
        "cost": amount_text(agent.usage),
    }
    if agent.trigger == execution_pb2.INVOCATION_TRIGGER_TRANSFER:
        head = head.removesuffix("─ ") + "→ " if head else head
    name = head + clip_middle(agent.name or "?", max(4, name_width - len(head)))
    row = _row(name, [known[column] for column, _ in columns], columns, name_width)
    row.stylize("dim", 0, len(head))
    row.stylize("bold", len(head), len(name))
    row.stylize(state_style(agent.state), name_width + _GAP, name_width + _GAP + len(known["state"]))
    return row


def kind_and_end(agent: invocation_pb2.AgentInvocation) -> str:
    """Describe an agent's kind and how it ended; empty for a model that simply answered."""
    is_explained = agent.cancel_reason != execution_pb2.CANCEL_REASON_UNSPECIFIED
    cancelled = cancellation_text(agent.cancel_reason) if is_explained else ""
    parts = (kind_text(agent.kind), ending_text(agent.end_reason, agent.kind), cancelled)
    return ", ".join(part for part in parts if part)


def _time_text(agent: invocation_pb2.AgentInvocation) -> str:
    if not (agent.HasField("start_time") and agent.HasField("end_time")):
        return UNKNOWN
    return seconds_text(seconds_between(agent.start_time, agent.end_time))


def _note(below: str, text: str, style: str, width: int) -> Text:
    line = Text(below, style="dim")
    return line.append(clip(text, max(8, width - len(below))), style=style)


def _tools_by_agent(invocation: invocation_pb2.Invocation) -> dict[str, str]:
    """Return each agent's tools with their numbers of calls. Agents called as tools have rows instead."""
    calls: dict[str, dict[str, Counter[execution_pb2.ExecutionState.ValueType]]] = {}
    for tool in invocation.tools:
        if not tool.child_invocation_id:
            calls.setdefault(tool.invocation_id, {}).setdefault(tool.name, Counter())[tool.state] += 1
    return {
        caller: ", ".join(_tool_text(name, states) for name, states in tools.items()) for caller, tools in calls.items()
    }


def _tool_text(name: str, states: Counter[execution_pb2.ExecutionState.ValueType]) -> str:
    """Return a tool's name, its number of calls, and how many did not succeed; for a single call, its state."""
    number = states.total()
    noted = [(states[state], state_text(state)) for state in _NOTED_STATES if states[state]]
    if number == 1:
        return name + "".join(f" ({word})" for _, word in noted)
    counts = ", ".join(f"{count} {word}" for count, word in noted)
    return f"{name} x{number}" + (f" ({counts})" if counts else "")


def _finish_reasons_by_agent(invocation: invocation_pb2.Invocation) -> dict[str, str]:
    """Return the finish reasons of each agent's incomplete answers; the record must have steps."""
    reasons: dict[str, Counter[str]] = {}
    for step in invocation.steps:
        if reason := finish_text(step.llm_response):
            reasons.setdefault(step.invocation_id, Counter())[reason] += 1
    return {
        agent: ", ".join(f"{reason} x{count}" if count > 1 else reason for reason, count in counts.items())
        for agent, counts in reasons.items()
    }


def _connectors(agents: Sequence[invocation_pb2.AgentInvocation]) -> Iterator[tuple[str, str]]:
    """Return for each agent of a preorder the connectors before its name, and before the notes below it.

    Built from the end: whether a level continues below an agent depends on later siblings.
    """
    found: list[tuple[str, str]] = []
    open_levels: list[bool] = []
    for agent in reversed(agents):
        depth = max(0, agent.depth)
        has_children = len(open_levels) > depth + 1 and open_levels[depth + 1]
        open_levels = (open_levels + [False] * (depth + 1))[: depth + 1]
        bars = "".join("│  " if level else "   " for level in open_levels[1 : min(depth, _DEEPEST)])
        if depth > _DEEPEST:
            bars += f"⋯{depth} "
        head = bars + ("" if depth == 0 else "├─ " if open_levels[depth] else "└─ ")
        continued = bars + ("" if depth == 0 else "│  " if open_levels[depth] else "   ")
        found.append((head, continued + ("│  " if has_children else "   ")))
        open_levels[depth] = True
    return reversed(found)


def _join_parts(parts: Sequence[str], width: int) -> list[str]:
    """Join parts with dots, on as many lines as they need."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        lines = [*lines[:-1], longer] if len(longer) <= width else [*lines, part]
    return lines


def totals(invocation: invocation_pb2.Invocation) -> list[str]:
    """Return the run's state and its sums: agents, calls, tokens, cost, time."""
    usage = invocation.tree_usage
    parts = [
        state_text(invocation.state),
        pluralize(invocation.agents_total, "agent"),
        pluralize(usage.model_calls, "model call"),
        pluralize(usage.tool_calls, "tool call"),
    ]
    if tokens(usage) is not None:
        parts.append(f"{tokens_text(usage)} tokens")
    if usage.HasField("cost_nanos"):
        parts.append(f"cost {cost_text(usage)}")
    if invocation.HasField("start_time") and invocation.HasField("end_time"):
        parts.append(seconds_text(seconds_between(invocation.start_time, invocation.end_time)))
    if not invocation.complete:
        parts.append(f"so far, to event {invocation.as_of_sequence}")
    return parts


def origin_parts(invocation: invocation_pb2.Invocation) -> list[str]:
    """Return a fork's origin and what it inherited from it."""
    origin, inherited = invocation.forked_from, invocation.inherited_usage
    parts = [f"fork of run {origin.run_id} after {origin.sequence}"]
    if inherited.model_calls or inherited.tool_calls:
        parts.append(f"inherited {pluralize(inherited.model_calls, 'model call')}")
        parts.append(pluralize(inherited.tool_calls, "tool call"))
        if tokens(inherited) is not None:
            parts.append(f"{tokens_text(inherited)} tokens")
    return parts


def trees_beside(left: Titled, right: Titled, *, width: int, is_pipe: bool = False) -> list[Text]:
    """Return both trees under their titles, side by side if their columns fit into `width` cells, else in sequence.

    In a pipe errors are not cut, so trees with errors are in sequence there.
    """
    half = (width - len(_BETWEEN)) // 2
    has_whole_errors = is_pipe and any(agent.HasField("error") for _, tree in (left, right) for agent in tree.agents)
    if has_whole_errors or half < max(narrowest_tree(left[1]), narrowest_tree(right[1])):
        return [
            *_render_with_title(left, width, is_pipe=is_pipe),
            Text(""),
            *_render_with_title(right, width, is_pipe=is_pipe),
        ]
    return [
        _join_columns(one, other, half)
        for one, other in zip_longest(_render_with_title(left, half), _render_with_title(right, half))
    ]


def _render_with_title(titled: Titled, width: int, *, is_pipe: bool = False) -> Sequence[Text]:
    title, invocation = titled
    return [Text(title, style="bold"), *tree_lines(invocation, width=width, is_pipe=is_pipe)]


def _join_columns(left: Text | None, right: Text | None, half: int) -> Text:
    line = left.copy() if left is not None else Text("")
    line.truncate(half, overflow="ellipsis", pad=True)
    line.append(_BETWEEN, style="dim")
    return line.append_text(right) if right is not None else line
