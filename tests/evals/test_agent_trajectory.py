"""The tree metric: cases whose scores, marks and words are known."""

from itertools import permutations
from typing import Any

import pytest

from bough.v1 import eval_result_pb2, eval_set_pb2, execution_pb2
from bough_server.evals.metrics import agent_trajectory
from bough_server.evals.metrics.agent_trajectory import TreeScore, compare_trees
from bough_server.evals.metrics.turn import Turn
from tests.evals.invocations import Agent, agent, expected, invocation

MATCHED = eval_result_pb2.TREE_MARK_MATCHED
MOVED = eval_result_pb2.TREE_MARK_MOVED
UNEXPECTED = eval_result_pb2.TREE_MARK_UNEXPECTED
ALLOWED = eval_result_pb2.TREE_MARK_ALLOWED
VIOLATED = eval_result_pb2.TREE_MARK_VIOLATED
SUCCEEDED, FAILED = execution_pb2.EXECUTION_STATE_SUCCEEDED, execution_pb2.EXECUTION_STATE_FAILED

Metric = eval_set_pb2.AgentTrajectoryMetric


def compared(wanted: eval_set_pb2.ExpectedAgent, *there: Agent, metric: Metric | None = None) -> TreeScore:
    return compare_trees([wanted], invocation(*there), metric or Metric())


def metric(**fields: Any) -> eval_set_pb2.EvalMetric:
    return eval_set_pb2.EvalMetric(agent_trajectory=Metric(), **fields)


def messages(score: TreeScore) -> list[str]:
    return [difference.message for difference in score.comparison.differences]


def test_two_empty_trees_are_equal() -> None:
    score = compare_trees([], invocation(), Metric())
    assert score.comparison == eval_result_pb2.TreeComparison(recall=1, precision=1, f1=1)
    assert score.score == 1


def test_an_agent_that_another_one_called_is_a_move_of_one_agent() -> None:
    wanted = expected("lead", expected("researcher"), expected("writer"))
    score = compared(wanted, agent("lead", agent("researcher", agent("writer"))))
    two_thirds = 2 / 3
    assert score.comparison == eval_result_pb2.TreeComparison(
        violations=2,
        recall=two_thirds,
        precision=two_thirds,
        f1=two_thirds,
        differences=[
            eval_result_pb2.TreeDifference(
                kind=eval_result_pb2.DIFFERENCE_KIND_MOVED,
                agent="writer",
                expected_parent="lead",
                actual_parent="lead/researcher",
                message="writer was called by researcher, expected by lead",
                invocation_id="i3",
            )
        ],
    )
    assert score.score == two_thirds
    assert score.marks == {"i1": VIOLATED, "i2": VIOLATED, "i3": MOVED}


def test_missing_and_unexpected_agents_are_named_with_their_callers() -> None:
    wanted = expected("lead", expected("researcher"), expected("*"))
    score = compared(wanted, agent("lead"), agent("critic", agent("editor")))
    assert messages(score) == [
        "researcher is missing, expected to be called by lead",
        "an agent is missing, expected to be called by lead",
        "critic was a root, which is not expected",
        "editor was called by critic, which is not expected",
    ]
    assert score.comparison.violations == 3
    assert (score.comparison.recall, score.comparison.precision) == (1 / 3, 1 / 3)
    assert score.marks == {"i1": VIOLATED, "i2": UNEXPECTED, "i3": UNEXPECTED}


def test_an_extra_agent_is_refused_unless_it_is_allowed() -> None:
    there = agent("lead", agent("writer"), agent("critic", agent("editor")))
    refused = compared(expected("lead", expected("writer")), there)
    assert (refused.comparison.violations, refused.comparison.precision) == (1, 1 / 2)
    allowed = compared(expected("lead", expected("writer"), allows_extra=True), there)
    assert (allowed.comparison.violations, allowed.comparison.precision, allowed.score) == (0, 1, 1)
    assert allowed.marks == {"i1": MATCHED, "i2": MATCHED, "i3": ALLOWED, "i4": ALLOWED}


def test_roots_are_refused_and_ordered_by_the_metric() -> None:
    there = [agent("b"), agent("a"), agent("c")]
    wanted = [expected("a"), expected("b")]
    assert compare_trees(wanted, invocation(*there), Metric()).comparison.violations == 1
    allowing = Metric(extra_roots=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW)
    assert compare_trees(wanted, invocation(*there), allowing).score == 1
    ordered = Metric(extra_roots=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW, roots_order=eval_set_pb2.EVAL_ORDER_ORDERED)
    score = compare_trees(wanted, invocation(*there), ordered)
    assert score.comparison.violations == 1
    assert messages(score) == ["b was a root in another order, or with other agents or tools, than expected"]


def test_children_may_come_in_any_order_unless_their_order_counts() -> None:
    there = agent("lead", agent("writer"), agent("researcher"))
    children = [expected("researcher"), expected("writer")]
    assert compared(expected("lead", *children), there).score == 1
    score = compared(expected("lead", *children, is_ordered=True), there)
    assert score.comparison.violations == 2
    assert messages(score) == [
        "writer was called by lead in another order, or with other agents or tools, than expected"
    ]


def test_an_optional_agent_may_be_missing_but_not_incomplete() -> None:
    wanted = expected("lead", expected("critic", expected("editor"), optional=True))
    assert compared(wanted, agent("lead")).comparison == eval_result_pb2.TreeComparison(recall=1, precision=1, f1=1)
    assert compared(wanted, agent("lead", agent("critic", agent("editor")))).score == 1
    score = compared(wanted, agent("lead", agent("critic")))
    assert messages(score) == ["editor is missing, expected to be called by critic"]
    assert (score.comparison.recall, score.comparison.precision) == (1 / 2, 1)


def test_an_optional_agent_is_there_not_at_all_or_as_often_as_its_repeat_says() -> None:
    wanted = expected("lead", expected("worker", at_least=2, optional=True))
    lead = [agent("lead", *[agent("worker")] * count) for count in range(4)]
    assert [compared(wanted, one).comparison.violations for one in lead] == [0, 1, 0, 0]
    assert messages(compared(wanted, lead[1])) == [
        "worker is missing, expected to be called by lead, not at all or at least 2 times"
    ]


def test_an_agent_is_left_to_the_expectation_that_has_not_to_be_there_several_times() -> None:
    several = expected("worker", at_least=2, optional=True)
    any_one = expected("*", optional=True)
    for children in ([several, any_one], [any_one, several]):
        assert compared(expected("lead", *children), agent("lead", agent("worker"))).score == 1


def test_the_state_and_the_input_of_an_agent_are_expected_below_a_caller_that_recovered() -> None:
    record = invocation(agent("lead", agent("researcher"), agent("researcher")))
    for one, state, text in zip(record.agents[1:], (FAILED, SUCCEEDED), ("Oslo", "Bergen"), strict=True):
        one.state = state
        one.input.parts.add(text=text)
    lead, first, second = (
        eval_set_pb2.ExpectedAgent(name="lead", state=SUCCEEDED),
        eval_set_pb2.ExpectedAgent(name="researcher", state=FAILED),
        eval_set_pb2.ExpectedAgent(name="researcher", input_match=eval_set_pb2.ValueMatcher(equals_json='"Bergen"')),
    )
    lead.children.extend([second, first])
    assert compare_trees([lead], record, Metric()).score == 1

    del lead.children[1]
    lead.children[0].state = FAILED
    lead.extra = eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW
    found = compare_trees([lead], record, Metric())
    assert [(one.kind, one.message, one.invocation_id) for one in found.comparison.differences] == [
        (
            eval_result_pb2.DIFFERENCE_KIND_INPUT,
            'researcher: the input differs: the value is "Oslo", expected "Bergen"',
            "i2",
        ),
    ]
    assert found.comparison.violations == 1
    assert found.marks == {"i1": MATCHED, "i2": VIOLATED, "i3": ALLOWED}

    lead.children[0].ClearField("input_match")
    lead.children[0].state = execution_pb2.EXECUTION_STATE_CANCELLED
    (difference, *_) = compare_trees([lead], record, Metric()).comparison.differences
    assert (difference.kind, difference.message) == (
        eval_result_pb2.DIFFERENCE_KIND_STATE,
        "researcher: FAILED, expected CANCELLED",
    )


def test_an_input_that_was_cut_is_not_compared() -> None:
    record = invocation(agent("lead"))
    record.agents[0].input.parts.add(text="Os", truncated=True)
    wanted = eval_set_pb2.ExpectedAgent(name="lead", input_match=eval_set_pb2.ValueMatcher(regex="Oslo"))
    with pytest.raises(ValueError, match="The input of lead was cut in the record"):
        compare_trees([wanted], record, Metric())


@pytest.mark.parametrize(
    ("at_least", "at_most", "right"),
    [(None, None, {1, 2, 3, 4}), (2, None, {2, 3, 4}), (0, 1, {0, 1}), (None, 2, {1, 2}), (2, 3, {2, 3})],
)
def test_a_repeated_agent_is_there_as_often_as_its_bounds_say(
    at_least: int | None, at_most: int | None, right: set[int]
) -> None:
    for is_ordered in (False, True):
        wanted = expected(
            "lead",
            expected("worker", repeated=True, at_least=at_least, at_most=at_most),
            expected("writer"),
            is_ordered=is_ordered,
        )
        passing = {
            count
            for count in range(5)
            if compared(wanted, agent("lead", *[agent("worker")] * count, agent("writer"))).score == 1
        }
        assert passing == right


def test_a_forbidden_agent_is_found_at_any_depth_and_below_allowed_agents() -> None:
    wanted = expected("lead", allows_extra=True, forbidden=["shell"])
    score = compared(wanted, agent("lead", agent("helper", agent("shell"))))
    assert score.comparison.violations == 1
    assert messages(score) == ["shell was called by helper, forbidden below lead"]
    assert (score.comparison.f1, score.score) == (1, 0)
    assert score.marks == {"i1": VIOLATED, "i2": ALLOWED, "i3": ALLOWED}


def test_composites_do_not_count_unless_the_expectation_names_them() -> None:
    flow = agent(
        "flow",
        agent("both", agent("a"), agent("b"), kind=execution_pb2.AGENT_KIND_PARALLEL),
        agent("c"),
        kind=execution_pb2.AGENT_KIND_SEQUENCE,
    )
    roots = [expected("a"), expected("b"), expected("c")]
    ordered = Metric(roots_order=eval_set_pb2.EVAL_ORDER_ORDERED)
    score = compare_trees(roots, invocation(flow), ordered)
    assert score.score == 1
    assert score.marks == {"i3": MATCHED, "i4": MATCHED, "i5": MATCHED}
    named = expected("flow", expected("a"), expected("b"), expected("c"))
    assert compared(named, flow).score == 1
    shown = Metric(transparent=eval_set_pb2.AgentKinds())
    assert compared(named, flow, metric=shown).score < 1
    supervisors = Metric(transparent=eval_set_pb2.AgentKinds(kinds=[execution_pb2.AGENT_KIND_SUPERVISOR]))
    boss = agent("boss", agent("a"), kind=execution_pb2.AGENT_KIND_SUPERVISOR)
    assert compared(expected("a"), boss, metric=supervisors).score == 1


def test_a_composite_that_is_forbidden_by_name_counts() -> None:
    there = agent("lead", agent("crowd", agent("a"), kind=execution_pb2.AGENT_KIND_PARALLEL))
    score = compared(expected("lead", allows_extra=True, forbidden=["crowd"]), there)
    assert messages(score) == ["crowd was called by lead, forbidden below lead"]


def test_agents_of_one_name_are_told_apart_by_their_tools() -> None:
    wanted = expected("lead", expected("r", tools=["search"]), expected("r", tools=["fetch"]))
    assert compared(wanted, agent("lead", agent("r", calls=["fetch"]), agent("r", calls=["search"]))).score == 1
    wrong = compared(wanted, agent("lead", agent("r", calls=["search"]), agent("r", calls=["search"])))
    assert wrong.comparison.violations == 1
    [difference] = wrong.comparison.differences
    assert (difference.kind, difference.agent) == (eval_result_pb2.DIFFERENCE_KIND_TOOLS, "r")
    assert (difference.expected_parent, difference.actual_parent) == ("", "lead")
    assert difference.message.startswith("r: ")
    assert (wrong.comparison.f1, wrong.score) == (1, pytest.approx(2 / 3))


def test_of_two_matches_with_as_many_violations_the_one_with_fewer_extra_agents_counts() -> None:
    there = [agent("a", agent("b", agent("c"))), agent("a", agent("b"))]
    for roots in (there, there[::-1]):
        score = compare_trees(
            [expected("a")], invocation(*roots), Metric(extra_roots=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW)
        )
        assert (score.comparison.violations, score.comparison.precision) == (1, 1 / 2)


def test_agents_of_one_name_are_told_apart_by_whether_they_may_call_others() -> None:
    wanted = [expected("r"), expected("r", allows_extra=True), expected("r")]
    there = [agent("r", agent("helper")), agent("r"), agent("r")]
    for called in permutations(there):
        assert compared(expected("lead", *wanted), agent("lead", *called)).score == 1


def test_tools_are_scored_if_there_are_any_or_their_mode_is_set() -> None:
    there = agent("lead", calls=["search"])
    assert compared(expected("lead"), there).score == 1
    assert compared(expected("lead", tools_mode=eval_set_pb2.TRAJECTORY_MODE_EXACT), there).score == 0
    superset = expected("lead", tools=["search"], tools_mode=eval_set_pb2.TRAJECTORY_MODE_SUPERSET)
    assert compared(superset, agent("lead", calls=["fetch", "search"])).score == 1


def test_calls_belong_to_the_agent_that_makes_them() -> None:
    there = agent("lead", agent("r", calls=["search"]))
    assert compared(expected("lead", expected("r", tools=["search"])), there).score == 1
    assert compared(expected("lead", expected("r"), tools=["search"]), there).comparison.violations == 1


def test_an_agent_below_the_wrong_one_of_two_of_its_name_is_moved() -> None:
    wanted = expected(
        "lead", expected("r", expected("w"), tools=["search"]), expected("r", tools=["fetch"]), is_ordered=True
    )
    score = compared(wanted, agent("lead", agent("r", calls=["search"]), agent("r", agent("w"), calls=["fetch"])))
    assert messages(score) == ["w was called by r, expected by another lead/r"]


def test_a_move_between_callers_of_one_name_says_their_paths() -> None:
    wanted = expected("lead", expected("a", expected("r", expected("w"))), expected("b", expected("r")))
    score = compared(wanted, agent("lead", agent("a", agent("r")), agent("b", agent("r", agent("w")))))
    assert messages(score) == ["w was called by lead/b/r, expected by lead/a/r"]


def test_an_agent_that_was_no_root_and_one_that_was() -> None:
    score = compare_trees([expected("lead"), expected("writer")], invocation(agent("lead", agent("writer"))), Metric())
    assert messages(score) == ["writer was called by lead, expected as a root"]
    score = compared(expected("lead", expected("writer")), agent("lead"), agent("writer"))
    assert messages(score) == ["writer was a root, expected by lead"]


def test_at_most_a_hundred_differences_are_named_and_all_are_counted() -> None:
    score = compared(expected("lead", expected("w", at_least=1000)), agent("lead"), *[agent("x")] * 300)
    assert score.comparison.violations == 1300
    assert len(score.comparison.differences) == 100


def test_repeats_in_repeats_are_counted_without_being_listed() -> None:
    wanted = expected("a", expected("b", expected("c", at_least=1000), at_least=1000), at_least=1000)
    score = compared(wanted)
    assert score.comparison.violations == 1000 + 1000**2 + 1000**3
    assert len(score.comparison.differences) == 100


def test_more_required_agents_than_can_be_counted_exactly_are_refused() -> None:
    wanted = expected("x", at_least=1000)
    for _ in range(6):
        wanted = expected("x", wanted, at_least=1000)
    with pytest.raises(ValueError, match=r"too large to be compared: 1001001001001001001000 agents are required"):
        compared(wanted)


def test_more_pairs_than_are_compared_are_refused() -> None:
    wanted = expected("lead", *[expected("*")] * 1000)
    with pytest.raises(ValueError, match="more than 4,000,000 pairs"):
        compared(wanted, agent("lead", *[agent("x")] * 4001))


@pytest.mark.parametrize("is_ordered", [False, True])
def test_trees_a_thousand_agents_deep_are_compared(is_ordered: bool) -> None:
    there, wanted = agent("x"), expected("x", is_ordered=is_ordered)
    deepest = wanted
    for _ in range(999):
        there, deepest = agent("x", there), deepest.children.add(name="x", children_order=wanted.children_order)
    assert compared(wanted, there).score == 1
    shorter = compared(expected("x"), there)
    assert (shorter.comparison.violations, shorter.comparison.precision) == (1, 1 / 1000)
    path = shorter.comparison.differences[-1].actual_parent
    assert path == "/".join(["x", "...", *["x"] * 14])


def test_the_score_of_a_trial_is_the_mean_over_the_turns_with_expected_agents() -> None:
    wanted = eval_set_pb2.EvalExpectation(agents=[expected("lead", expected("writer"))])
    turns = [
        Turn(index=0, expect=None, invocation=invocation(agent("other"))),
        Turn(index=1, expect=wanted, invocation=invocation(agent("lead", agent("writer")))),
        Turn(index=2, expect=wanted, invocation=invocation(agent("lead"))),
    ]
    case = eval_set_pb2.EvalCase(id="c", turns=[eval_set_pb2.EvalTurn()] * 3)
    score = agent_trajectory.score(metric(), case, turns)
    assert score is not None
    assert score.score == pytest.approx((1 + 2 / 3) / 2)
    assert [comparison.turn for comparison in score.tree_comparisons] == [1, 2]
    assert (score.name, score.threshold, score.verdict) == (
        "agent_trajectory",
        1,
        eval_result_pb2.VERDICT_FAILED,
    )
    assert score.reason == "turns[2]: writer is missing, expected to be called by lead."
    lower = agent_trajectory.score(metric(name="tree", threshold=0.8), case, turns)
    assert lower is not None
    assert (lower.name, lower.verdict) == ("tree", eval_result_pb2.VERDICT_PASSED)


def test_turns_without_expected_agents_have_no_score() -> None:
    case = eval_set_pb2.EvalCase(id="c")
    turns = [Turn(index=0, expect=eval_set_pb2.EvalExpectation(), invocation=invocation(agent("lead")))]
    assert agent_trajectory.score(metric(), case, turns) is None


def test_trees_that_are_too_large_are_not_scored() -> None:
    wanted = eval_set_pb2.EvalExpectation(agents=[expected("lead", *[expected("*")] * 1000)])
    turn = Turn(index=0, expect=wanted, invocation=invocation(agent("lead", *[agent("x")] * 4001)))
    score = agent_trajectory.score(metric(), eval_set_pb2.EvalCase(id="c"), [turn])
    assert score is not None
    assert score.verdict == eval_result_pb2.VERDICT_NOT_EVALUATED
    assert "too large" in score.reason
    assert not score.HasField("score")


def test_a_call_that_was_cut_cannot_be_scored() -> None:
    wanted = expected("lead")
    wanted.tools.add(name="search", arguments_json="{}")
    record = invocation(agent("lead", calls=["search"]))
    record.tools[0].arguments_truncated = True
    turn = Turn(index=0, expect=eval_set_pb2.EvalExpectation(agents=[wanted]), invocation=record)
    score = agent_trajectory.score(metric(), eval_set_pb2.EvalCase(id="c"), [turn])
    assert score is not None
    assert score.verdict == eval_result_pb2.VERDICT_NOT_EVALUATED
    assert "cut" in score.reason
