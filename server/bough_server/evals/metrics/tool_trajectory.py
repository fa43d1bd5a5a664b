"""The tool_trajectory metric: tool calls of the whole tree, or of one agent, compared with the expected ones."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, execution_pb2
from bough.v1.eval_set_pb2 import (
    TRAJECTORY_MODE_ANY_ORDER,
    TRAJECTORY_MODE_IN_ORDER,
    TRAJECTORY_MODE_SUBSET,
    TRAJECTORY_MODE_SUPERSET,
    ExpectedTool,
    TrajectoryMode,
    ValueMatcher,
)
from bough.v1.invocation_pb2 import AgentInvocation, ToolInvocation
from bough_server.evals.metrics.bipartite_matching import find_largest_matching
from bough_server.evals.metrics.tool_names import fits_name, is_named, name_words
from bough_server.evals.metrics.turn import (
    Turn,
    TurnScore,
    is_configured,
    mean_score,
    name_state,
    no_turn_score,
    score_difference,
)
from bough_server.history.visible import CALL_PREFIX
from bough_server.matching import values
from bough_server.matching.values import MOST_NAMED
from bough_server.matching.work import spend
from bough_server.messages import effective_arguments, has_truncated_arguments
from bough_server.tools.builtin import RESERVED

_MOST_LISTED: Final = 20
"""The most calls of a list in a reason."""

_PAIR_STEPS: Final = 50
"""The steps to compare an expected call with one of its name, beside those for arguments and results."""

_UNORDERED: Final = frozenset({TRAJECTORY_MODE_ANY_ORDER, TRAJECTORY_MODE_SUPERSET, TRAJECTORY_MODE_SUBSET})


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns whose tool calls are judged; None if there are none.

    Those are all turns if the metric has expected calls, else the turns with an expectation, a whole conversation among
    them. If the metric is only there because some turn expects calls, then the turns that do.
    """
    wanted, scores = metric.tool_trajectory, {}
    needs_tools = not is_configured(metric, case)
    for turn in turns:
        expected: Sequence[ExpectedTool] = wanted.tools
        if wanted.tools:
            if turn.is_conversation:
                continue
        else:
            if turn.expect is None or (needs_tools and not turn.expect.tools):
                continue
            expected = turn.expect.tools
        scores[turn.index] = _turn_score(wanted, expected, turn)
    return mean_score(metric, case, scores)


def select_calls(
    expected: Sequence[ExpectedTool], calls: Iterable[ToolInvocation], *, agents: Collection[str]
) -> list[ToolInvocation]:
    """Return the calls that count, in the order in which they started; `agents` are the names of all in the record.

    Calls of agents and of built-in tools count only if their names are expected, by name or by a pattern.
    """
    found = [
        call
        for call in calls
        if not (is_of_agent(call, agents) or call.name in RESERVED)
        or any(is_named(tool, call.name) for tool in expected)
    ]
    return sorted(found, key=attrgetter("sequence"))


def names_of(agents: Iterable[AgentInvocation]) -> frozenset[str]:
    """Return the names of agents."""
    return frozenset(agent.name for agent in agents)


def is_of_agent(call: ToolInvocation, agents: Collection[str]) -> bool:
    """Return whether a call is one of an agent, as far as the record says so.

    One that failed before its agent began has no invocation of it. It is known by its error, or by its name if that is
    the name of the tool for some agent of the record.
    """
    if call.child_invocation_id:
        return True
    is_failed = call.state == execution_pb2.EXECUTION_STATE_FAILED and call.name.startswith(CALL_PREFIX)
    return is_failed and (
        call.error.reason == error_pb2.ERROR_REASON_NOT_LINKED or call.name.removeprefix(CALL_PREFIX) in agents
    )


def mismatch(expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation], mode: TrajectoryMode.ValueType) -> str:
    """Return the differences between calls in their order and what is expected of them; empty if there are none.

    The first are named and the others counted. The mode's default is EXACT. Raises TooMuchWork.
    """
    found = list(_find_differences(expected, actual, mode))
    more = len(found) - MOST_NAMED
    return "; ".join([*found[:MOST_NAMED], *([f"and {more:,} more"] if more > 0 else [])])


def has_mismatch(
    expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation], mode: TrajectoryMode.ValueType
) -> bool:
    """Return whether `mismatch` finds any difference."""
    return next(_find_differences(expected, actual, mode), None) is not None


def _find_differences(
    expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation], mode: TrajectoryMode.ValueType
) -> Iterator[str]:
    calls = _number_calls(actual)
    if mode in _UNORDERED:
        return _find_unordered_differences(expected, calls, mode)
    if mode == TRAJECTORY_MODE_IN_ORDER:
        return _find_order_differences(expected, calls)
    return _find_exact_differences(expected, calls)


class _Call(NamedTuple):
    """A call with its number among the calls of its tool, from 1."""

    record: ToolInvocation
    nth: int

    @property
    def name(self) -> str:
        return self.record.name


def _number_calls(calls: Sequence[ToolInvocation]) -> list[_Call]:
    seen: Counter[str] = Counter()
    found = []
    for call in calls:
        seen[call.name] += 1
        found.append(_Call(call, seen[call.name]))
    return found


def find_truncated_call(expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation]) -> str:
    """Return that a call was cut where it has to be compared, as a sentence; empty if none was."""
    for call in actual:
        if not (has_truncated_arguments(call) or call.result_truncated):
            continue  # nearly always, and there may be thousands of both
        named = [tool for tool in expected if fits_name(tool, call.name)]
        if has_truncated_arguments(call) and any(_arguments_matchers(tool) for tool in named):
            return f"The arguments of {_label(call)} were cut in the record, so they cannot be compared."
        if call.result_truncated and any(_result_matchers(tool) for tool in named):
            return f"The result of {_label(call)} was cut in the record, so it cannot be compared."
    return ""


def _turn_score(wanted: eval_set_pb2.ToolTrajectoryMetric, expected: Sequence[ExpectedTool], turn: Turn) -> TurnScore:
    calls = [call for call in turn.invocation.tools if wanted.agent in ("", call.agent)]
    actual = select_calls(expected, calls, agents=names_of(turn.invocation.agents))
    cut = find_truncated_call(expected, actual)
    if cut:
        return no_turn_score(cut)
    wrong = mismatch(expected, actual, wanted.mode)
    # A sentence about one call says all there is.
    lists = f"; {_list_both(expected, actual)}" if wrong and max(len(expected), len(actual)) > 1 else ""
    return score_difference(wrong + lists)


def _list_both(expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation]) -> str:
    """Return the expected calls and those that were made, each with its number."""
    return f"expected: {_number([name_words(tool) for tool in expected])}; called: {_number(list(map(_label, actual)))}"


def _number(names: Sequence[str]) -> str:
    shown = [f"{number} {name}" for number, name in enumerate(names[:_MOST_LISTED], start=1)]
    more = [f"and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    return ", ".join([*shown, *more]) or "none"


def _find_exact_differences(expected: Sequence[ExpectedTool], actual: Sequence[_Call]) -> Iterator[str]:
    for number, (tool, call) in enumerate(zip(expected, actual, strict=False), start=1):
        if wrong := _difference(tool, call, number):
            yield wrong
    for number, call in enumerate(actual[len(expected) :], start=len(expected) + 1):
        yield _surplus(call, number)
    for number, tool in enumerate(expected[len(actual) :], start=len(actual) + 1):
        yield f"call {number} is missing, expected {name_words(tool)}"


def _find_order_differences(expected: Sequence[ExpectedTool], actual: Sequence[_Call]) -> Iterator[str]:
    """Take the first call that fits each expected one: if any choice leaves enough for the rest, this one does."""
    position, missing = 0, 0
    for tool in expected:
        if missing == MOST_NAMED - 1:  # each is compared with all calls that are left
            yield "the expected calls after that were not compared"
            return
        rest = range(position, len(actual))
        found = next((index for index in rest if _fits(tool, actual[index])), None)
        if found is None:
            after = f" after call {position}" if position else ""
            near = next((index for index in rest if fits_name(tool, actual[index].name)), None)
            yield f"no call fits the expected {name_words(tool)}{after}{_nearest(tool, actual, near)}"
            missing += 1
        else:
            position = found + 1


def _find_unordered_differences(
    expected: Sequence[ExpectedTool], actual: Sequence[_Call], mode: TrajectoryMode.ValueType
) -> Iterator[str]:
    pairs = _pairs(expected, actual)
    taken = set(pairs.values())
    left = [index for index in range(len(actual)) if index not in taken]
    missing = [tool for index, tool in enumerate(expected) if index not in pairs]
    if mode != TRAJECTORY_MODE_SUBSET:
        for number, tool in enumerate(missing):
            # Those beyond are only counted; each is compared with all names that are left.
            is_named = number < MOST_NAMED
            near = next((index for index in left if is_named and fits_name(tool, actual[index].name)), None)
            yield f"no call fits the expected {name_words(tool)}{_nearest(tool, actual, near)}"
            if near is not None:
                left.remove(near)  # named with the call that is missing, and not once more
    if mode != TRAJECTORY_MODE_SUPERSET:
        for number, index in enumerate(left):
            call, may_be = actual[index], missing if mode == TRAJECTORY_MODE_SUBSET and number < MOST_NAMED else ()
            same = next((tool for tool in may_be if fits_name(tool, call.name)), None)
            yield _surplus(call, index + 1) if same is None else _difference(same, call, index + 1)


def _pairs(expected: Sequence[ExpectedTool], actual: Sequence[_Call]) -> dict[int, int]:
    """Return as many pairs of an expected call and one that fits it as there can be, by their indices.

    Expected calls can overlap: "*" must not take what only a named one fits.
    """
    by_name: dict[str, list[int]] = {}
    for column, call in enumerate(actual):
        by_name.setdefault(call.name, []).append(column)
    fitting: list[list[int]] = []
    for tool in expected:
        named = [column for name, columns in by_name.items() if fits_name(tool, name) for column in columns]
        spend(_PAIR_STEPS * len(named))
        fitting.append(sorted(column for column in named if _fits(tool, actual[column])))
    return find_largest_matching(fitting)


def _fits(tool: ExpectedTool, call: _Call) -> bool:
    return next(_iter_differences(tool, call, 0), None) is None


def _difference(tool: ExpectedTool, call: _Call, number: int) -> str:
    """Return every way in which a call differs from an expected one; empty if it fits."""
    return "; ".join(_iter_differences(tool, call, number))


def _iter_differences(tool: ExpectedTool, call: _Call, number: int) -> Iterator[str]:
    label, record = _label(call.record), call.record
    if not fits_name(tool, call.name):
        yield f"call {number} is {label}, expected {name_words(tool)}"
        return
    if tool.HasField("nth") and tool.nth != call.nth:
        yield f"call {number}, {label}, is number {call.nth} of its tool, expected number {tool.nth}"
    if tool.state and tool.state != record.state:
        yield f"call {number}, {label}, is {name_state(record.state)}, expected {name_state(tool.state)}"
    arguments = effective_arguments(record).strip() or "{}"  # no text means no arguments
    for matcher in _arguments_matchers(tool):
        if wrong := values.mismatch(matcher, arguments):
            yield f"call {number}, {label}: the arguments differ: {wrong}"
    matchers = _result_matchers(tool)
    if matchers and record.state != execution_pb2.EXECUTION_STATE_SUCCEEDED:
        yield f"call {number}, {label}, has no result"
        return
    for matcher in matchers:
        if wrong := values.mismatch(matcher, record.result_json):
            yield f"call {number}, {label}: the result differs: {wrong}"


def _arguments_matchers(tool: ExpectedTool) -> list[ValueMatcher]:
    exact = [ValueMatcher(equals_json=tool.arguments_json)] if tool.arguments_json else []
    return [*exact, tool.arguments_match] if tool.HasField("arguments_match") else exact


def _result_matchers(tool: ExpectedTool) -> list[ValueMatcher]:
    exact = [ValueMatcher(equals_json=tool.result_json)] if tool.result_json else []
    return [*exact, tool.result_match] if tool.HasField("result_match") else exact


def _nearest(tool: ExpectedTool, actual: Sequence[_Call], near: int | None) -> str:
    """Return how the nearest call differs, as the end of a sentence; empty if none has the expected name."""
    return "" if near is None else f": {_difference(tool, actual[near], near + 1)}"


def _surplus(call: _Call, number: int) -> str:
    return f"call {number}, {_label(call.record)}, is not expected"


def _label(call: ToolInvocation) -> str:
    return f"{call.name} of {call.agent}" if call.agent else call.name
