"""Judging is bounded: whatever is expected, and whatever there is, comparing them ends."""

import json
from collections.abc import Sequence

import pytest

from bough.v1 import error_pb2, eval_set_pb2, execution_pb2, invocation_pb2, message_pb2
from bough.v1.eval_set_pb2 import EvalExpectation, ExpectedAgent, ExpectedTool, ValueMatcher
from bough_server.errors import RunError
from bough_server.evals.metrics.scoring import score_trial
from bough_server.evals.results.verdicts import FAILED, NOT_EVALUATED, PASSED
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import problems_of
from bough_server.matching.values import check_matcher, mismatch
from bough_server.matching.work import TooMuchWork, limit_work, spend
from bough_server.runtime.tool_mocks import find_mock, is_replaced

SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED
ANY_ORDER = eval_set_pb2.EvalMetric(
    tool_trajectory=eval_set_pb2.ToolTrajectoryMetric(mode=eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER)
)
TOO_MUCH = "There is too much to compare: expect fewer or smaller values."


def statuses(
    expect: EvalExpectation,
    *,
    calls: Sequence[invocation_pb2.ToolInvocation] = (),
    agents: Sequence[invocation_pb2.AgentInvocation] = (),
) -> list[tuple[int, str]]:
    """The status and the reason of each score of a trial with these calls and agents."""
    case = eval_set_pb2.EvalCase(
        id="a",
        turns=[eval_set_pb2.EvalTurn(user="x", expect=expect)],
        metrics=[ANY_ORDER, eval_set_pb2.EvalMetric(budget=eval_set_pb2.BudgetMetric(errors=0))],
    )
    record = invocation_pb2.Invocation(state=SUCCEEDED, tools=calls, agents=agents)
    return [(score.verdict, score.reason) for score in score_trial(case, [record], trial=0).scores]


def call(number: int, arguments: object) -> invocation_pb2.ToolInvocation:
    return invocation_pb2.ToolInvocation(
        name="search", arguments_json=json.dumps(arguments), sequence=number + 1, state=SUCCEEDED
    )


def test_calls_that_take_too_long_to_compare_are_not_scored_and_other_metrics_are() -> None:
    long = "x" * 1_000
    expected = [ExpectedTool(name="search", arguments_json=json.dumps([long, n])) for n in range(500)]
    expect = EvalExpectation(tools=expected)
    calls = [call(n, [long, n]) for n in range(500)]
    assert statuses(expect, calls=calls) == [(NOT_EVALUATED, TOO_MUCH), (PASSED, "")]
    del expected[100:]
    assert statuses(EvalExpectation(tools=expected), calls=calls[:100]) == [(PASSED, ""), (PASSED, "")]


def test_costly_patterns_are_not_compared_with_everything() -> None:
    matcher = ValueMatcher(regex="(.{1,30}a?){20}b")
    expected = [ExpectedTool(name="search", arguments_match=matcher)] * 1_000
    calls = [call(n, "a" * 1_000) for n in range(1_000)]
    assert statuses(EvalExpectation(tools=expected), calls=calls)[0] == (NOT_EVALUATED, TOO_MUCH)


def test_trees_that_take_too_long_to_compare_are_not_scored() -> None:
    agents = []
    for number in range(1_000):
        parent = f"a{number}"
        agents.append(invocation_pb2.AgentInvocation(invocation_id=parent, name="a"))
        agents.append(
            invocation_pb2.AgentInvocation(invocation_id=f"b{number}", parent_invocation_id=parent, name="b", depth=1)
        )
    expected = [ExpectedAgent(name="*", children=[ExpectedAgent(name="b")])] * 1_000
    scores = statuses(EvalExpectation(agents=expected), agents=agents)
    assert (NOT_EVALUATED, TOO_MUCH) in scores


def test_a_thousand_siblings_of_one_name_are_scored() -> None:
    agents = [invocation_pb2.AgentInvocation(invocation_id=f"a{number}", name="a") for number in range(1_000)]
    expect = EvalExpectation(agents=[ExpectedAgent(name="a")] * 1_000)
    assert [verdict for verdict, _ in statuses(expect, agents=agents)] == [PASSED] * 3
    del expect.agents[999:]
    assert FAILED in [verdict for verdict, _ in statuses(expect, agents=agents)]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"allOf": [{"type": "string"}] * 2_000}}, ["a"] * 100_000),
        ({"items": {"enum": [{"b": number} for number in range(2_000)]}}, [{"b": 1_999}] * 5_000),
        ({"anyOf": [{"type": "string"}] * 2_000}, {"a": "b" * 1_000_000}),
        ({"allOf": [{"contains": {"const": -number}} for number in range(1_000)]}, list(range(20_000))),
    ],
)
def test_a_schema_cannot_ask_for_endless_work(schema: object, value: object) -> None:
    matcher = ValueMatcher(schema_json=json.dumps(schema))
    with limit_work(5_000_000), pytest.raises(TooMuchWork):
        mismatch(matcher, json.dumps(value))


def test_items_are_unique_as_json_says() -> None:
    matcher = ValueMatcher(schema_json=json.dumps({"uniqueItems": True}))
    assert mismatch(matcher, json.dumps([1, True, "1", [1], [True], {"a": 1}, {"a": True}, None])) == ""
    for equal in ([1, 1.0], [{"a": [1], "b": 2}, {"b": 2, "a": [1.0]}], [[], []]):
        assert mismatch(matcher, json.dumps(equal)) == "has equal items"
    assert mismatch(matcher, json.dumps([{"number": number} for number in range(50_000)])) == ""


def test_schemas_of_a_set_are_small_enough_to_be_checked() -> None:
    large = ValueMatcher(schema_json=json.dumps({"enum": ["x" * 70_000]}))
    assert check_matcher(large) == "schema_json is larger than 64 KiB."
    schemas = [json.dumps({"title": "x" * 60_000, "maximum": number}) for number in range(20)]
    tools = [ExpectedTool(name="a", result_match=ValueMatcher(schema_json=schema)) for schema in schemas]
    turn = eval_set_pb2.EvalTurn(user="x", expect=EvalExpectation(tools=tools))
    made = eval_set_pb2.EvalSet(name="s", agent="a", cases=[eval_set_pb2.EvalCase(id="a", turns=[turn])])
    found = problems_of(made, known=KnownNames())
    assert found
    assert all("all schemas of the set together take too long" in sentence for _, sentence in found)


def test_a_call_that_takes_too_long_to_compare_with_its_mocks_does_not_run() -> None:
    matcher = ValueMatcher(equals_json=json.dumps("y" * 200))
    mock = eval_set_pb2.ToolMock(name="search", arguments_match=matcher, result_json="1")
    mocks = eval_set_pb2.ToolMocks(tools=[mock] * 4_000)
    made = message_pb2.ToolCall(name="search", arguments_json=json.dumps("x" * 20_000))
    with pytest.raises(RunError) as refused:
        find_mock(mocks, made, agent="a")
    assert refused.value.reason == error_pb2.ERROR_REASON_TOOL_NOT_MOCKED
    assert "which takes too long: the tool did not run" in refused.value.message
    assert is_replaced(mocks, made, agent="a")
    made.arguments_json = json.dumps("x" * 200)
    assert find_mock(mocks, made, agent="a") is None
    assert not is_replaced(mocks, made, agent="a")


def test_work_is_counted_until_the_bound_and_stays_used_up() -> None:
    spend(10**12)  # outside of any bound
    with limit_work(10):
        spend(10)
        for _ in range(2):
            with pytest.raises(TooMuchWork):
                spend(1)
    spend(10**12)
