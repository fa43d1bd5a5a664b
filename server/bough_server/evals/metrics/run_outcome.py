"""The run_outcome metric: how a run ended, what it left in its session, and who handed over to whom."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, execution_pb2, invocation_pb2
from bough.v1.eval_set_pb2 import ExpectedHandoff
from bough_server.evals.metrics.bipartite_matching import find_largest_matching
from bough_server.evals.metrics.turn import (
    Turn,
    TurnScore,
    list_expectations,
    mean_score,
    name_state,
    score_difference,
)
from bough_server.log.session_state import value_at, values_of
from bough_server.matching.values import mismatch
from bough_server.matching.work import spend

_SUCCEEDED: Final = execution_pb2.EXECUTION_STATE_SUCCEEDED
_UNORDERED: Final = (
    eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER,
    eval_set_pb2.TRAJECTORY_MODE_SUPERSET,
    eval_set_pb2.TRAJECTORY_MODE_SUBSET,
)


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns with an expected outcome; None if there are none."""
    expected = {
        turn.index: (turn.expect.run, turn) for turn in turns if turn.expect is not None and turn.expect.HasField("run")
    }
    return mean_score(metric, case, {index: _turn_score(run, turn) for index, (run, turn) in expected.items()})


def find_expected_state(expected: eval_set_pb2.ExpectedRun) -> execution_pb2.ExecutionState.ValueType:
    """Return the state in which a run is expected to end."""
    return expected.state or _SUCCEEDED


def needs_state(case: eval_set_pb2.EvalCase) -> bool:
    """Return whether a case expects something of its session's values."""
    return any(expect.run.session_state for expect in list_expectations(case))


def _turn_score(expected: eval_set_pb2.ExpectedRun, turn: Turn) -> TurnScore:
    return score_difference("; ".join(_differences(expected, turn.invocation)))


def _differences(expected: eval_set_pb2.ExpectedRun, actual: invocation_pb2.Invocation) -> Iterator[str]:
    wanted = find_expected_state(expected)
    if actual.state != wanted:
        yield f"the run is {name_state(actual.state)}, expected {name_state(wanted)}"
    if expected.reason and actual.error.reason != expected.reason:
        found = name_reason(actual.error.reason) if actual.HasField("error") else "none"
        yield f"the reason of the run's error is {found}, expected {name_reason(expected.reason)}"
    if expected.session_state:
        yield from _state_differences(expected, actual)
    if expected.handoffs or expected.handoffs_mode:
        yield from _handoff_differences(expected, actual)


def _state_differences(expected: eval_set_pb2.ExpectedRun, actual: invocation_pb2.Invocation) -> Iterator[str]:
    try:
        values = {key: json.loads(text) for key, text in values_of(actual.session_state_json).items()}
    except ValueError:  # a record of another system
        yield "the record's session_state_json is no JSON object"
        return
    for each in expected.session_state:
        if wrong := _value_difference(each, values):
            yield f"session_state {each.path}: {wrong}"


def _value_difference(expected: eval_set_pb2.ExpectedStateValue, values: Mapping[str, Any]) -> str:
    try:
        value = value_at(values, expected.path)
    except KeyError:
        return "" if expected.absent else "there is no value"
    if expected.absent:
        return "there is a value, expected none"
    return mismatch(expected.value_match, json.dumps(value)) if expected.HasField("value_match") else ""


def _handoff_differences(expected: eval_set_pb2.ExpectedRun, actual: invocation_pb2.Invocation) -> Iterator[str]:
    names = {agent.invocation_id: agent.name for agent in actual.agents}
    made = [
        ExpectedHandoff(from_agent=names.get(agent.from_invocation_id, ""), to_agent=agent.name)
        for agent in sorted(actual.agents, key=lambda agent: (agent.start_time.seconds, agent.start_time.nanos))
        if agent.from_invocation_id
    ]
    if not _are_as_expected(expected.handoffs, made, expected.handoffs_mode):
        yield f"the handoffs are {describe_handoffs(made)}, expected {describe_handoffs(expected.handoffs)}"


def _are_as_expected(
    wanted: Sequence[ExpectedHandoff], made: Sequence[ExpectedHandoff], mode: eval_set_pb2.TrajectoryMode.ValueType
) -> bool:
    if mode == eval_set_pb2.TRAJECTORY_MODE_IN_ORDER:
        rest = iter(made)
        return all(any(_fits(each, one) for one in rest) for each in wanted)
    if mode not in _UNORDERED:
        return len(wanted) == len(made) and all(map(_fits, wanted, made))
    spend(len(wanted) * len(made))
    fitting = [[index for index, one in enumerate(made) if _fits(each, one)] for each in wanted]
    pairs = len(find_largest_matching(fitting))
    has_all, has_no_others = pairs == len(wanted), pairs == len(made)
    return (has_all or mode == eval_set_pb2.TRAJECTORY_MODE_SUBSET) and (
        has_no_others or mode == eval_set_pb2.TRAJECTORY_MODE_SUPERSET
    )


def _fits(wanted: ExpectedHandoff, made: ExpectedHandoff) -> bool:
    return wanted.from_agent in ("", made.from_agent) and wanted.to_agent == made.to_agent


def describe_handoffs(handoffs: Sequence[ExpectedHandoff]) -> str:
    """Return handoffs in words, "*" for any agent."""
    return ", ".join(f"{each.from_agent or '*'} to {each.to_agent}" for each in handoffs) or "none"


def name_reason(reason: error_pb2.ErrorReason.ValueType) -> str:
    """Return a reason as files write it, without the prefix of its enum; of a later version its number."""
    known = reason in error_pb2.ErrorReason.values()
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_") if known else str(reason)
