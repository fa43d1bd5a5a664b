"""The tool_trajectory metric: its five modes, which calls count, and the first difference in words."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, eval_set_pb2
from bough.v1.eval_result_pb2 import VERDICT_FAILED, VERDICT_NOT_EVALUATED, VERDICT_PASSED
from bough.v1.eval_set_pb2 import (
    EvalExpectation,
    EvalMetric,
    ExpectedTool,
    ToolTrajectoryMetric,
    TrajectoryMode,
    ValueMatcher,
)
from bough.v1.invocation_pb2 import ToolInvocation
from bough_server.evals.metrics.tool_trajectory import mismatch, score, select_calls
from tests.evals.records import FAILED, SUCCEEDED, case_of, did, record, trajectory, turns_of, wants

EXACT = eval_set_pb2.TRAJECTORY_MODE_EXACT
IN_ORDER = eval_set_pb2.TRAJECTORY_MODE_IN_ORDER
ANY_ORDER = eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER
SUPERSET = eval_set_pb2.TRAJECTORY_MODE_SUPERSET
SUBSET = eval_set_pb2.TRAJECTORY_MODE_SUBSET
MODES = {"EXACT": EXACT, "IN_ORDER": IN_ORDER, "ANY_ORDER": ANY_ORDER, "SUPERSET": SUPERSET, "SUBSET": SUBSET}
NAMES = st.lists(st.sampled_from("abc*"), max_size=5)


def named(names: Sequence[str]) -> list[ExpectedTool]:
    return [wants(name) for name in names]


def made(names: Sequence[str]) -> list[ToolInvocation]:
    return [did(name, agent="") for name in names]


def passing(expected: Sequence[ExpectedTool], actual: Sequence[ToolInvocation]) -> set[str]:
    return {name for name, mode in MODES.items() if mismatch(expected, actual, mode) == ""}


@pytest.mark.parametrize(
    ("expected", "actual", "modes"),
    [
        ("", "", {"EXACT", "IN_ORDER", "ANY_ORDER", "SUPERSET", "SUBSET"}),
        ("abc", "abc", {"EXACT", "IN_ORDER", "ANY_ORDER", "SUPERSET", "SUBSET"}),
        ("abc", "ac", {"SUBSET"}),
        ("abc", "", {"SUBSET"}),
        ("ab", "axb", {"IN_ORDER", "SUPERSET"}),
        ("", "a", {"IN_ORDER", "SUPERSET"}),
        ("ab", "ba", {"ANY_ORDER", "SUPERSET", "SUBSET"}),
        ("aab", "ab", {"SUBSET"}),
        ("ab", "aab", {"IN_ORDER", "SUPERSET"}),
        ("ab", "xbxa", {"SUPERSET"}),
        ("ab", "x", set()),
        ("*a", "ab", {"ANY_ORDER", "SUPERSET", "SUBSET"}),
        ("*", "b", {"EXACT", "IN_ORDER", "ANY_ORDER", "SUPERSET", "SUBSET"}),
    ],
)
def test_each_mode_takes_what_it_says(expected: str, actual: str, modes: set[str]) -> None:
    assert passing(named(expected), made(actual)) == modes


def test_reversed_calls_of_one_tool_pass_without_order_and_fail_in_order() -> None:
    expected = [wants("search", arguments_json='{"q": 1}'), wants("search", arguments_json='{"q": 2}')]
    assert passing(expected, [did("search", {"q": 2}), did("search", {"q": 1})]) == {"ANY_ORDER", "SUPERSET", "SUBSET"}


def test_a_mode_that_is_not_set_is_exact() -> None:
    assert mismatch(named("ab"), made("ba"), eval_set_pb2.TRAJECTORY_MODE_UNSPECIFIED) != ""
    assert mismatch(named("ab"), made("ab"), eval_set_pb2.TRAJECTORY_MODE_UNSPECIFIED) == ""


@pytest.mark.parametrize(
    ("expected", "actual", "mode", "words"),
    [
        ("ab", "ac", EXACT, "call 2 is c, expected b"),
        ("a", "ab", EXACT, "call 2, b, is not expected"),
        ("abc", "a", EXACT, "call 2 is missing, expected b; call 3 is missing, expected c"),
        ("abc", "xby", EXACT, "call 1 is x, expected a; call 3 is y, expected c"),
        (
            "a",
            "bcdefgh",
            EXACT,
            "call 1 is b, expected a; call 2, c, is not expected; call 3, d, is not expected; "
            "call 4, e, is not expected; call 5, f, is not expected; and 2 more",
        ),
        ("ab", "bxa", IN_ORDER, "no call fits the expected b after call 3"),
        ("ab", "b", IN_ORDER, "no call fits the expected a"),
        ("abc", "b", IN_ORDER, "no call fits the expected a; no call fits the expected c after call 1"),
        (
            "abcdef",
            "",
            IN_ORDER,
            "no call fits the expected a; no call fits the expected b; no call fits the expected c; "
            "no call fits the expected d; the expected calls after that were not compared",
        ),
        ("ab", "bc", ANY_ORDER, "no call fits the expected a; call 2, c, is not expected"),
        ("abc", "b", SUPERSET, "no call fits the expected a; no call fits the expected c"),
        ("ab", "bca", ANY_ORDER, "call 2, c, is not expected"),
        ("ab", "b", SUPERSET, "no call fits the expected a"),
        ("ab", "cbd", SUBSET, "call 1, c, is not expected; call 3, d, is not expected"),
    ],
)
def test_the_differences_are_named_up_to_a_few(
    expected: str, actual: str, mode: TrajectoryMode.ValueType, words: str
) -> None:
    assert mismatch(named(expected), made(actual), mode) == words


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (EXACT, "call 1, search of lead: the arguments differ: q is 2, expected 1"),
        (
            IN_ORDER,
            "no call fits the expected search: call 1, search of lead: the arguments differ: q is 2, expected 1",
        ),
        (
            ANY_ORDER,
            "no call fits the expected search: call 1, search of lead: the arguments differ: q is 2, expected 1",
        ),
        (
            SUPERSET,
            "no call fits the expected search: call 1, search of lead: the arguments differ: q is 2, expected 1",
        ),
        (SUBSET, "call 1, search of lead: the arguments differ: q is 2, expected 1"),
    ],
)
def test_a_call_of_the_same_name_is_said_to_differ(mode: TrajectoryMode.ValueType, words: str) -> None:
    assert mismatch([wants("search", arguments_json='{"q": 1}')], [did("search", {"q": 2})], mode) == words


def test_every_condition_that_a_call_violates_is_named() -> None:
    expected = wants("search", nth=2, state=FAILED, arguments_json='{"q": 1, "n": 2}', result_json='"gold"')
    assert mismatch([expected], [did("search", {"q": 3, "n": 4}, "dust")], EXACT) == (
        "call 1, search of lead, is number 1 of its tool, expected number 2; "
        "call 1, search of lead, is SUCCEEDED, expected FAILED; "
        "call 1, search of lead: the arguments differ: q is 3, expected 1; n is 4, expected 2; "
        'call 1, search of lead: the result differs: the value is "dust", expected "gold"'
    )


def test_a_call_that_nearly_fits_is_not_named_once_more_as_one_too_many() -> None:
    expected = [wants("search", arguments_json='{"q": 1}'), wants("search", arguments_json='{"q": 2}')]
    calls = [did("search", {"q": 3}), did("search", {"q": 4}), did("read")]
    assert mismatch(expected, calls, ANY_ORDER) == (
        "no call fits the expected search: call 1, search of lead: the arguments differ: q is 3, expected 1; "
        "no call fits the expected search: call 2, search of lead: the arguments differ: q is 4, expected 2; "
        "call 3, read of lead, is not expected"
    )


def test_arguments_and_results_are_compared_by_their_matchers() -> None:
    expected = wants(
        "search",
        arguments_match=ValueMatcher(subset_json='{"q": "leaves"}'),
        result_match=ValueMatcher(regex="red"),
    )
    assert mismatch([expected], [did("search", {"q": "leaves", "n": 3}, "They are red.")], EXACT) == ""
    wrong = mismatch([expected], [did("search", {"q": "leaves"}, "They are green.")], EXACT)
    assert wrong == 'call 1, search of lead: the result differs: "They are green." does not match the regex red'
    assert mismatch([wants("search", result_json='"red"')], [did("search", result="red")], EXACT) == ""


def test_a_pattern_of_names_takes_the_tools_in_whose_names_it_matches() -> None:
    search = ExpectedTool(name_regex="^search_(web|docs)$", arguments_json='{"q": 1}')
    calls = [did("search_docs", {"q": 1}), did("search_web", {"q": 1})]
    assert passing([search, search], calls) == set(MODES)
    assert passing([wants("search_web"), search], calls) == {"ANY_ORDER", "SUPERSET", "SUBSET"}
    assert mismatch([search], [did("search_mail", {"q": 1})], EXACT) == (
        "call 1 is search_mail of lead, expected tool that matches ^search_(web|docs)$"
    )
    assert mismatch([search], [], IN_ORDER) == "no call fits the expected tool that matches ^search_(web|docs)$"
    differs = (
        "no call fits the expected tool that matches ^search_(web|docs)$: call 1, search_web of lead: the arguments"
    )
    assert mismatch([search], [did("search_web", {"q": 2})], ANY_ORDER).startswith(differs)


def test_a_name_that_is_too_long_for_a_pattern_is_not_matched_by_it() -> None:
    pattern = ExpectedTool(name_regex="(a{1000})" * 100)
    assert mismatch([pattern], [did("a" * 1_000_000)], EXACT).startswith("call 1 is a")


def test_a_failed_call_has_no_result_and_no_text_means_no_arguments() -> None:
    call = did("search")
    call.state, call.result_json = FAILED, ""
    assert mismatch([wants("search", arguments_json="{}")], [call], EXACT) == ""
    expected = wants("search", result_match=ValueMatcher())
    assert mismatch([expected], [call], EXACT) == "call 1, search of lead, has no result"


def test_a_call_is_expected_by_its_number_among_the_calls_of_its_tool() -> None:
    calls = [did("search", result="dust"), did("read"), did("search", result="gold")]
    second = ExpectedTool(name="search", nth=2, result_json='"gold"')
    assert passing([second], calls) == {"IN_ORDER", "SUPERSET"}
    assert passing([wants("search", nth=1), wants("read", nth=1), second], calls) == set(MODES)
    assert mismatch([wants("search", nth=3)], calls, SUPERSET) == (
        "no call fits the expected search: call 1, search of lead, is number 1 of its tool, expected number 3"
    )
    assert mismatch([wants("search", nth=1, result_json='"gold"')], calls, IN_ORDER).startswith(
        "no call fits the expected search: call 1, search of lead: the result differs"
    )


def test_a_call_is_expected_to_end_in_a_state() -> None:
    failed = did("search")
    failed.state = FAILED
    calls = [failed, did("search")]
    assert passing([wants("search", state=FAILED), wants("search", state=SUCCEEDED)], calls) == set(MODES)
    assert mismatch([wants("search", state=FAILED)], [did("search")], EXACT) == (
        "call 1, search of lead, is SUCCEEDED, expected FAILED"
    )


def test_calls_of_agents_and_of_built_in_tools_count_only_by_name() -> None:
    of_agent = did("call_writer")
    of_agent.child_invocation_id = "W"
    calls = [did("b"), of_agent, did("transfer_to_agent"), did("exit"), did("plan"), did("set_state"), did("a")]
    for sequence, call in zip([7, 6, 5, 4, 3, 2, 1], calls, strict=True):
        call.sequence = sequence
    assert [call.name for call in select_calls([], calls, agents=())] == ["a", "b"]
    assert [call.name for call in select_calls([wants("*")], calls, agents=())] == ["a", "b"]
    assert [call.name for call in select_calls(named(["call_writer", "exit"]), calls, agents=())] == [
        "a",
        "exit",
        "call_writer",
        "b",
    ]
    assert [call.name for call in select_calls([ExpectedTool(name_regex="^call_")], calls, agents=())] == [
        "a",
        "call_writer",
        "b",
    ]


def test_a_call_of_an_agent_that_failed_before_the_agent_began_is_no_tool_call() -> None:
    refused, unlinked, tool, ran = did("call_writer"), did("call_nobody"), did("call_center"), did("call_lead")
    for call, reason in (
        (refused, error_pb2.ERROR_REASON_BAD_ARGUMENTS),
        (unlinked, error_pb2.ERROR_REASON_NOT_LINKED),
        (tool, error_pb2.ERROR_REASON_BAD_ARGUMENTS),
    ):
        call.state, call.error.reason = FAILED, reason
    calls = [refused, unlinked, tool, ran]
    assert select_calls([], calls, agents={"lead", "writer"}) == [tool, ran]
    assert select_calls([wants("call_writer")], calls, agents={"lead", "writer"}) == [refused, tool, ran]


@given(NAMES, NAMES)
def test_the_modes_imply_one_another(expected: list[str], actual: list[str]) -> None:
    modes = passing(named(expected), made(actual))
    if "EXACT" in modes:
        assert modes == set(MODES)
    if "IN_ORDER" in modes:
        assert "SUPERSET" in modes
    assert ("ANY_ORDER" in modes) == ({"SUPERSET", "SUBSET"} <= modes and len(expected) == len(actual))
    if "ANY_ORDER" in modes:
        assert {"SUPERSET", "SUBSET"} <= modes


NUMBERS = st.lists(st.integers(0, 3), max_size=4)
OVERLAPPING = st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=4)


@given(OVERLAPPING, NUMBERS)
def test_matching_without_order_is_as_good_as_trying_everything(expected: list[set[int]], actual: list[int]) -> None:
    tools = [wants("a", arguments_match=ValueMatcher(schema_json=f'{{"enum": {sorted(one)}}}')) for one in expected]
    calls = [did("a", number) for number in actual]
    most = largest_matching(expected, actual)
    assert (mismatch(tools, calls, SUPERSET) == "") == (most == len(expected))
    assert (mismatch(tools, calls, SUBSET) == "") == (most == len(actual))
    assert (mismatch(tools, calls, ANY_ORDER) == "") == (most == len(expected) == len(actual))


def largest_matching(expected: list[set[int]], actual: list[int]) -> int:
    """Try every assignment of calls to what is expected."""
    padded = [*actual, *[-1] * len(expected)]
    tries = itertools.permutations(padded, len(expected))
    return max(sum(call in fitting for call, fitting in zip(one, expected, strict=True)) for one in tries)


@given(OVERLAPPING, NUMBERS)
def test_matching_in_order_is_as_good_as_trying_everything(expected: list[set[int]], actual: list[int]) -> None:
    tools = [wants("a", arguments_match=ValueMatcher(schema_json=f'{{"enum": {sorted(one)}}}')) for one in expected]
    is_possible = any(
        all(call in fitting for call, fitting in zip(chosen, expected, strict=True))
        for chosen in itertools.combinations(actual, len(expected))
    )
    assert (mismatch(tools, [did("a", number) for number in actual], IN_ORDER) == "") == is_possible


def test_a_score_is_the_mean_over_the_turns_that_have_an_expectation() -> None:
    metric = trajectory()
    case = case_of(EvalExpectation(tools=named("a")), None, EvalExpectation(tools=named("b")), metrics=[metric])
    found = score(metric, case, turns_of(case, record(did("a")), record(did("x")), record(did("c", agent=""))))
    assert found is not None
    assert (found.name, found.verdict, found.score, found.threshold) == ("tool_trajectory", VERDICT_FAILED, 0.5, 1)
    assert found.reason == "turns[2]: call 1 is c, expected b."


def test_a_failed_trajectory_shows_the_expected_calls_and_those_that_were_made() -> None:
    metric = trajectory()
    case = case_of(EvalExpectation(tools=[*named("ab"), wants("", name_regex="^c")]), metrics=[metric])
    found = score(metric, case, turns_of(case, record(did("a"), did("c", agent=""), *(did("x") for _ in range(30)))))
    assert found is not None
    made = ", ".join(f"{number} x of lead" for number in range(3, 21))
    more = "; ".join(f"call {number}, x of lead, is not expected" for number in range(4, 7))
    assert found.reason == (
        f"call 2 is c, expected b; call 3 is x of lead, expected tool that matches ^c; {more}; and 26 more; "
        "expected: 1 a, 2 b, 3 tool that matches ^c; "
        f"called: 1 a of lead, 2 c, {made}, and 12 more."
    )


def test_a_configured_metric_expects_no_calls_where_none_are_named() -> None:
    metric = trajectory(name="tools")
    case = case_of(EvalExpectation(), None, metrics=[metric])
    found = score(metric, case, turns_of(case, record(did("a")), record(did("b"))))
    assert found is not None
    assert (found.name, found.score, found.reason) == ("tools", 0, "turns[0]: call 1, a of lead, is not expected.")
    empty = score(metric, case, turns_of(case, record(), record(did("b"))))
    assert empty is not None
    assert (empty.verdict, empty.score, empty.reason) == (VERDICT_PASSED, 1, "")


def test_a_metric_that_no_case_names_scores_only_turns_that_name_calls() -> None:
    case = case_of(EvalExpectation(), EvalExpectation(tools=named("a")), None)
    found = score(trajectory(), case, turns_of(case, record(did("x")), record(did("a")), record(did("y"))))
    assert found is not None
    assert found.score == 1
    nothing = case_of(EvalExpectation(), None)
    assert score(trajectory(), nothing, turns_of(nothing, record(did("x")), record())) is None


def test_calls_in_the_metric_are_expected_in_every_turn() -> None:
    metric = EvalMetric(threshold=0.5, tool_trajectory=ToolTrajectoryMetric(tools=named("a")))
    case = case_of(None, EvalExpectation(tools=named("b")), metrics=[metric])
    found = score(metric, case, turns_of(case, record(did("a")), record(did("b", agent=""))))
    assert found is not None
    assert (found.verdict, found.score) == (VERDICT_PASSED, 0.5)
    assert found.reason == "turns[1]: call 1 is b, expected a."


def test_only_calls_of_the_named_agent_count() -> None:
    metric = trajectory(agent="writer")
    case = case_of(EvalExpectation(tools=named("b")), metrics=[metric])
    found = score(metric, case, turns_of(case, record(did("a"), did("b", agent="writer"))))
    assert found is not None
    assert found.score == 1


def test_the_arguments_that_an_approver_edited_are_compared_instead_of_those_that_the_model_wrote() -> None:
    call = did("pay", {"amount": 5}, edited={"amount": 7})
    assert mismatch([wants("pay", arguments_json='{"amount": 7}')], [call], EXACT) == ""
    assert mismatch([wants("pay", arguments_json='{"amount": 5}')], [call], EXACT) == (
        "call 1, pay of lead: the arguments differ: amount is 7, expected 5"
    )
    call.arguments_truncated = True
    case = case_of(EvalExpectation(tools=[wants("pay", arguments_json='{"amount": 7}')]), metrics=[trajectory()])
    whole = score(trajectory(), case, turns_of(case, record(call)))
    call.executed_arguments_truncated = True
    cut = score(trajectory(), case, turns_of(case, record(call)))
    assert whole is not None
    assert cut is not None
    assert (whole.verdict, cut.verdict) == (VERDICT_PASSED, VERDICT_NOT_EVALUATED)
    assert cut.reason == "The arguments of pay of lead were cut in the record, so they cannot be compared."


def test_a_call_that_was_cut_is_not_compared() -> None:
    call = did("a", {"q": "long"}, "long")
    call.arguments_truncated = call.result_truncated = True
    for tool, words in [
        (wants("a"), ""),
        (wants("b", arguments_json="{}"), "call 1 is a of lead, expected b."),
        (
            wants("a", arguments_json="{}"),
            "The arguments of a of lead were cut in the record, so they cannot be compared.",
        ),
        (wants("*", result_json="{}"), "The result of a of lead was cut in the record, so it cannot be compared."),
    ]:
        case = case_of(EvalExpectation(tools=[tool]), metrics=[trajectory()])
        found = score(trajectory(), case, turns_of(case, record(call)))
        assert found is not None
        assert found.reason == words
        assert (found.verdict == VERDICT_NOT_EVALUATED) == ("cut" in words)
        assert found.HasField("score") == ("cut" not in words)
