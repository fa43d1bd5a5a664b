"""The run_outcome metric: how runs end, what they leave in their session, and who handed over to whom."""

import json
from typing import Any

import pytest
from google.protobuf import json_format

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, execution_pb2
from bough.v1.invocation_pb2 import Invocation
from bough_server.evals.metrics import run_outcome
from bough_server.evals.metrics.scoring import score_trial
from tests.evals.job_server import case, check_log, eval_set, evaluated, runs_of
from tests.evals.records import node, record
from tests.rpc.run_server import Served

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
FAILED_RUN = execution_pb2.EXECUTION_STATE_FAILED


def expect(**run: Any) -> eval_set_pb2.EvalCase:
    """A case of one turn that expects this of its run, in the file's form."""
    turn = {"user": "Go.", "expect": {"run": run}}
    return json_format.ParseDict({"id": "one", "turns": [turn]}, eval_set_pb2.EvalCase())


def reason_of(wanted: eval_set_pb2.EvalCase, run: Invocation) -> str:
    """What a trial fails for; empty if it passes."""
    result = score_trial(wanted, [run], trial=0)
    assert (result.verdict == PASSED) == (not result.reason)
    assert [score.name for score in result.scores] == ["run_outcome"]
    return result.reason.removeprefix("run_outcome is 0, below 1: ")


def failed(reason: error_pb2.ErrorReason.ValueType = error_pb2.ERROR_REASON_TOOL_FAILED) -> Invocation:
    run = record(answer=None)
    run.state = FAILED_RUN
    run.error.CopyFrom(error_pb2.AgentError(reason=reason, message="It broke."))
    return run


def test_a_run_that_fails_as_expected_is_no_crash() -> None:
    assert reason_of(expect(state="EXECUTION_STATE_FAILED"), failed()) == ""
    wanted = expect(state="EXECUTION_STATE_FAILED", reason="ERROR_REASON_TOOL_FAILED")
    assert reason_of(wanted, failed()) == ""
    assert reason_of(wanted, failed(error_pb2.ERROR_REASON_MODEL_TIMEOUT)) == (
        "the reason of the run's error is MODEL_TIMEOUT, expected TOOL_FAILED."
    )


def test_a_run_that_is_expected_to_fail_and_succeeds_has_failed_the_case() -> None:
    wanted = expect(state="EXECUTION_STATE_FAILED", reason="ERROR_REASON_TOOL_FAILED")
    assert reason_of(wanted, record()) == (
        "the run is SUCCEEDED, expected FAILED; the reason of the run's error is none, expected TOOL_FAILED."
    )


def test_a_run_that_fails_otherwise_than_expected_is_a_crash() -> None:
    result = score_trial(expect(state="EXECUTION_STATE_CANCELLED"), [failed()], trial=0)
    assert (result.verdict, result.crashed) == (FAILED, True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"path": "order"}, ""),
        ({"path": "order.items.1", "value_match": {"equals_json": '"tea"'}}, ""),
        ({"path": "order", "value_match": {"subset_json": '{"paid": true}'}}, ""),
        ({"path": "refund", "absent": True}, ""),
        ({"path": "refund"}, "session_state refund: there is no value"),
        ({"path": "order.items.2"}, "session_state order.items.2: there is no value"),
        ({"path": "order", "absent": True}, "session_state order: there is a value, expected none"),
        ({"path": "order.items.0", "value_match": {"equals_json": '"tea"'}}, "session_state order.items.0: "),
    ],
)
def test_values_of_the_session_are_compared_by_their_paths(value: dict[str, Any], words: str) -> None:
    run = record()
    run.session_state_json = json.dumps({"order": {"items": ["boat", "tea"], "paid": True}})
    found = reason_of(expect(session_state=[value]), run)
    assert found.startswith(words) if words else found == ""


def test_every_condition_that_does_not_hold_is_named() -> None:
    wanted = expect(
        session_state=[{"path": "a"}, {"path": "b"}], handoffs=[{"to_agent": "billing"}], state="EXECUTION_STATE_FAILED"
    )
    assert reason_of(wanted, record()) == (
        "the run is SUCCEEDED, expected FAILED; session_state a: there is no value; "
        "session_state b: there is no value; the handoffs are none, expected * to billing."
    )


def handing_over(*names: str) -> Invocation:
    """A run in which each agent handed over to the next one, listed in another order."""
    agents = [node(f"{name}{index}", seconds=(index, index + 1)) for index, name in enumerate(names)]
    for index, (agent, name) in enumerate(zip(agents, names, strict=True)):
        agent.name = name
        agent.from_invocation_id = agents[index - 1].invocation_id if index else ""
    return record(agents=agents[::-1])


@pytest.mark.parametrize(
    ("handoffs", "mode", "passes"),
    [
        ([("desk", "billing"), ("billing", "desk")], "", True),
        ([("", "billing"), ("", "desk")], "EXACT", True),
        ([("billing", "desk"), ("desk", "billing")], "EXACT", False),
        ([("billing", "desk"), ("desk", "billing")], "ANY_ORDER", True),
        ([("", "desk")], "IN_ORDER", True),
        ([("", "desk")], "EXACT", False),
        ([("", "desk")], "ANY_ORDER", False),
        ([("", "desk")], "SUPERSET", True),
        ([("desk", "desk")], "SUPERSET", False),
        ([("", "desk"), ("", "billing"), ("", "refunds")], "SUBSET", True),
        ([("", "desk")], "SUBSET", False),
        ([], "EXACT", False),
        ([], "SUPERSET", True),
    ],
)
def test_handoffs_are_compared_as_calls_are(handoffs: list[tuple[str, str]], mode: str, passes: bool) -> None:
    wanted = expect(
        handoffs=[{"from_agent": source, "to_agent": target} for source, target in handoffs],
        **({"handoffs_mode": f"TRAJECTORY_MODE_{mode}"} if mode else {}),
    )
    found = reason_of(wanted, handing_over("desk", "billing", "desk"))
    assert (found == "") == passes, found


def test_turns_without_an_expected_outcome_are_not_scored() -> None:
    metric = eval_set_pb2.EvalMetric(run_outcome=eval_set_pb2.RunOutcomeMetric())
    assert run_outcome.score(metric, expect(), []) is None


async def test_a_conversation_goes_on_after_a_run_that_fails_as_expected(server: Served) -> None:
    one = case("one", "fail", "hello", answers=[None, "hello"])
    one["turns"][0]["id"] = "breaks"
    one["turns"][0]["expect"] = {"run": {"state": "EXECUTION_STATE_FAILED", "reason": "ERROR_REASON_INTERNAL"}}
    log = await evaluated(server, eval_set(one, agent="touchy"))
    check_log(log.events)
    assert log.verdict == PASSED, log.results()
    assert len(await runs_of(server, log.evaluation_id)) == 2

    one["turns"][0]["expect"]["run"]["reason"] = "ERROR_REASON_TOOL_FAILED"
    log = await evaluated(server, eval_set(one, agent="touchy"))
    assert log.result("one").reason == (
        "run_outcome is 0, below 1: turns[0] (breaks): the reason of the run's error is INTERNAL, expected TOOL_FAILED."
    )


async def test_what_a_run_leaves_in_its_session_is_expected_turn_by_turn(server: Served) -> None:
    one = case("one", "tea", "cake", session_state_json='{"name": "Ada"}')
    for turn, words in zip(one["turns"], (["tea"], ["tea", "cake"]), strict=True):
        turn["expect"] = {
            "run": {
                "session_state": [
                    {"path": "said", "value_match": {"equals_json": json.dumps(words)}},
                    {"path": "name", "value_match": {"equals_json": '"Ada"'}},
                ]
            }
        }
    log = await evaluated(server, eval_set(one, agent="memory"))
    assert log.verdict == PASSED, log.results()
    run_ids = [turn.run_id for turn in log.result("one").turns]

    recorded = {
        "id": "stored",
        "turns": [{"recorded": {"run": {"run_id": run_ids[1]}}, "expect": one["turns"][1]["expect"]}],
    }
    log = await evaluated(server, eval_set(recorded, agent="memory"))
    assert log.verdict == PASSED, log.results()


def test_a_record_whose_state_is_no_json_object_says_so() -> None:
    run = record()
    run.session_state_json = "["
    assert reason_of(expect(session_state=[{"path": "a"}]), run) == (
        "the record's session_state_json is no JSON object."
    )
