"""How a case runs: answers, mocks, forks, recorded invocations and timeouts, over a real socket."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from bough.v1 import (
    eval_result_pb2,
    eval_service_pb2,
    execution_pb2,
    invocation_pb2,
)
from bough_server.evals.reports.words import reasons_of
from tests.evals.job_server import CALLED, case, check_log, eval_set, evaluated, evaluating, evaluation, front, runs_of
from tests.rpc.run_server import Served, begin
from tests.support.judge_models import text_reply
from tests.support.model_scenarios import Reply, Request
from tests.support.model_server import serving_model
from tests.support.projects import openai_model

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED
CANCELLED = execution_pb2.EXECUTION_STATE_CANCELLED


async def recorded(server: Served, agent: str, text: str) -> str:
    """Run an agent to its end and return the run's id."""
    turn = begin(server, agent, text)
    await turn.to_the_end()
    return turn.events[0].run_id


@pytest.mark.parametrize(
    ("agent", "said", "answers", "answer"),
    [
        ("cashier", "5", [{"tool": "pay", "approval": {"approved": True}}], "paid 5"),
        ("cashier", "5", [{"approval": {"approved": True, "arguments_json": '{"amount": 7}'}}], "paid 7"),
        (
            "asker",
            "Which colour?",
            [
                {"question": "size", "value_json": '"large"'},
                {"agent": "cashier", "value_json": '"not of this agent"'},
                {"agent": "asker", "question": "colour", "value_json": '"red"'},
                {"value_json": '"too late"'},
            ],
            "red",
        ),
        ("scout", "roof", [{"tool": "look", "tool_outcome": {"parts": [{"text": "a cat"}]}}], "a cat"),
    ],
)
async def test_the_answers_of_a_case_answer_its_run(
    server: Served, agent: str, said: str, answers: list[dict[str, Any]], answer: str
) -> None:
    one = case("one", said, answers=[answer], trials=2)
    one["answers"] = answers
    log = await evaluated(server, eval_set(one, agent=agent))
    check_log(log.events)
    assert log.verdict == PASSED, log.results()


async def test_what_an_approver_edited_is_what_the_case_expects(server: Served) -> None:
    edited = {"approval": {"approved": True, "arguments_json": '{"amount": 7}'}}
    expects = {
        name: {"tools": [{"name": "pay", "arguments_json": json.dumps({"amount": amount})}]}
        for name, amount in (("executed", 7), ("written", 5))
    }
    cases = [
        {"id": name, "turns": [{"user": "5", "expect": expect}], "answers": [edited]}
        for name, expect in expects.items()
    ]
    log = await evaluated(server, eval_set(*cases, agent="cashier"))
    assert [log.result(name).verdict for name in expects] == [PASSED, FAILED], log.results()
    (call,) = log.result("executed").turns[0].agents[0].calls
    assert (json.loads(call.arguments_json), json.loads(call.executed_arguments_json)) == ({"amount": 5}, {"amount": 7})


async def test_a_refused_approval_is_an_answer(server: Served) -> None:
    one = case("one", "5")
    one["answers"] = [{"tool": "pay", "approval": {}}]
    log = await evaluated(server, eval_set(one, agent="cashier"))
    assert (log.verdict, log.result("one").crashed) == (FAILED, True), "this agent fails if it may not pay"
    assert not log.result("one").HasField("unanswered")


@pytest.mark.parametrize(
    ("agent", "said", "answers", "words"),
    [
        ("asker", "Which colour?", [], "Which colour?"),
        ("asker", "Which colour?", [{"tool": "pay", "approval": {"approved": True}}], "Which colour?"),
        ("cashier", "5", [{"question": "pay", "value_json": "1"}], "pay"),
        ("scout", "roof", [{"approval": {"approved": True}}], "look"),
    ],
)
async def test_a_request_that_no_answer_answers_makes_the_case_not_scored_and_cancels_its_run(
    server: Served, agent: str, said: str, answers: list[dict[str, Any]], words: str
) -> None:
    one = case("one", said, "and again")
    one["answers"] = answers
    log = await evaluated(server, eval_set(one, agent=agent))
    (run,) = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    result = log.result("one")
    assert log.verdict == result.verdict == NOT_EVALUATED
    assert words in result.reason
    assert result.unanswered.input_id
    assert run.state == CANCELLED


async def test_an_answer_that_the_run_refuses_makes_the_case_not_scored_and_cancels_its_run(server: Served) -> None:
    one = case("one", "5")
    one["answers"] = [{"approval": {"approved": True, "arguments_json": '{"amount": "much"}'}}]
    log = await evaluated(server, eval_set(one, case("other", "6"), agent="cashier"))
    runs = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    assert log.result("one").verdict == NOT_EVALUATED
    assert "amount" in log.result("one").reason
    assert [run.state for run in runs] == [CANCELLED] * 2


async def test_a_run_that_takes_too_long_has_crashed(server: Served) -> None:
    log = await evaluated(server, eval_set(case("one", "never opened", timeout="0.2s"), agent="gated"))
    result = log.result("one")
    assert (result.verdict, result.crashed) == (FAILED, True)
    assert "wall_duration" in result.reason or "seconds" in result.reason, result.reason


async def test_mocks_answer_instead_of_the_tool(server: Served) -> None:
    mocks = {"tools": [{"name": "stamp", "result_json": '"mocked"'}]}
    log = await evaluated(
        server, eval_set(case("one", "mock-a b", answers=["mocked, mocked"], mocks=mocks), agent="clerk")
    )
    assert log.verdict == PASSED, log.results()
    assert not CALLED["mock-a"]


async def test_mocks_that_answered_no_call_in_any_trial_are_listed(server: Served) -> None:
    def mock(item: str, result: str, **fields: str) -> dict[str, Any]:
        matching = {"subset_json": json.dumps({"text": item})}
        return {"name": "stamp", "arguments_match": matching, "result_json": result, **fields}

    tools = [mock("used", '"1"'), mock("usde", '"2"'), mock("used", '"3"'), mock("other", '"4"', agent="echo")]
    one = case("one", "used other", answers=["1, 5"], mocks={"tools": [*tools, mock("other", '"5"')]})
    log = await evaluated(server, eval_set(one, case("plain", "b"), agent="clerk"), trials=2)
    found = (await evaluation(server, log.evaluation_id)).result.cases
    assert [list(trial.used_mocks) for trial in found[0].trials] == [[0, 4]] * 2
    assert [(mock.index, mock.name) for mock in found[0].unused_mocks] == [(1, "stamp"), (2, "stamp"), (3, "stamp")]
    assert reasons_of(found[0])[0] == "mocks.tools[1], of stamp, answered no call."
    assert not found[1].unused_mocks


async def test_faults_are_injected_into_the_same_calls_in_every_evaluation_and_counted(server: Served) -> None:
    words = [f"word-{number}" for number in range(10)]
    faults = [
        {"tool": "stamp", "share": 0.1, "fail": {"message": "jammed"}},
        {"tool": "stamp", "share": 0.3, "answer_json": '"smudged"'},
        {"tool": "stamp", "agent": "echo", "share": 1, "fail": {}},
    ]
    passing = {"answer": {"regex": "stamped word-9$"}}
    both = case("faulty", " ".join(words)), case("sound", "word", faults=[{**faults[0], "agent": "echo"}])
    both[0]["turns"] = [{"user": " ".join(words), "expect": passing}, {"user": "again"}]
    made = eval_set(*both, agent="clerk", defaults={"faults": faults})
    first, second = [await evaluated(server, made, trials=4) for _ in range(2)]
    for log in (first, second):
        check_log(log.events)
    results = {
        key: (one.verdict, one.crashed, [(fault.index, fault.count) for fault in one.injected_faults])
        for key, one in first.results().items()
    }
    assert results == {
        key: (one.verdict, one.crashed, [(fault.index, fault.count) for fault in one.injected_faults])
        for key, one in second.results().items()
    }
    found = (await evaluation(server, first.evaluation_id)).result.cases
    jammed, smudged, other = found[0].faults
    counts = [results["faulty", trial] for trial in range(4)]
    assert [(fault.name, fault.is_model) for fault in found[0].faults] == [("stamp", False)] * 3
    assert (other.injected, other.trials) == (0, 0)
    for fault in (jammed, smudged):
        having = [trial for trial in counts if fault.index in dict(trial[2])]
        assert fault.injected == sum(dict(trial[2])[fault.index] for trial in having) > 0
        assert (fault.trials, fault.passed) == (len(having), sum(trial[0] == PASSED for trial in having))
    assert len({tuple(trial[2]) for trial in counts}) > 1, "each trial has draws apart"
    times = "once" if jammed.injected == 1 else f"{jammed.injected} times"
    shown = reasons_of(found[0])
    assert shown[-3:] == [
        f"faults[0], of stamp, was injected {times}: {jammed.passed} of {_trials(jammed.trials)} with it passed.",
        f"faults[1], of stamp, was injected {smudged.injected} times: {smudged.passed} of {_trials(smudged.trials)} "
        "with it passed.",
        "faults[2], of stamp, was drawn for no call.",
    ]
    assert reasons_of(found[1]) == ["faults[0], of stamp, was drawn for no call."]


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count} trials"


async def test_mocks_answer_for_agents_and_so_often_over_all_turns_of_a_trial(server: Served) -> None:
    agents = [
        {"agent": "echo", "times": 1, "text": "first"},
        {"agent": "echo", "caller": "gruff", "text": "never"},
        {"agent": "echo", "times": 2, "message": {"parts": [{"text": "mocked"}]}},
    ]
    made = front("echo")
    one = case("one", "a", "b", "c", answers=["first", "mocked", "mocked"], mocks={"agents": agents})
    log = await evaluated(server, eval_set(one, agent="front"), definitions=[made])
    assert log.verdict == PASSED, log.results()
    assert list(log.result("one").used_agent_mocks) == [0, 2]
    found = (await evaluation(server, log.evaluation_id)).result.cases[0]
    assert reasons_of(found) == ["mocks.agents[1], of echo, answered no call."]
    over = case("one", "a", "b", "c", "d", answers=[None, None, None, "d"], mocks={"agents": agents})
    log = await evaluated(server, eval_set(over, agent="front"), definitions=[made])
    assert "is answered by no mock of this case, and mocks name that agent" in log.result("one").reason


async def test_a_trial_is_not_scored_if_code_does_without_an_agent_that_no_mock_answers_for(server: Served) -> None:
    agents = [{"agent": "echo", "caller": "slow", "text": "never"}, {"agent": "gruff", "text": "mocked"}]
    log = await evaluated(server, eval_set(case("one", "a", "b", mocks={"agents": agents}), agent="lenient"))
    result = log.result("one")
    assert (result.verdict, list(result.used_agent_mocks)) == (NOT_EVALUATED, [1])
    assert "The call of the agent 'echo' by 'lenient'" in result.reason
    assert len(result.turns) == 1


async def test_a_recorded_run_answers_its_calls_and_nothing_else_is_called_unless_mocks_are_not_strict(
    server: Served,
) -> None:
    run_id = await recorded(server, "clerk", "rec-a rec-b")
    mocks = {"run_id": run_id}
    cases = [
        case("same", "rec-b rec-a", answers=["stamped rec-b, stamped rec-a"], mocks=mocks),
        case("other", "rec-a rec-c", mocks=mocks),
        case("loose", "rec-d rec-a", answers=["stamped rec-d, stamped rec-a"], mocks={**mocks, "strict": False}),
        case("gone", "rec-a", mocks={"run_id": "no-such-run"}),
    ]
    log = await evaluated(server, eval_set(*cases, agent="clerk"))
    runs = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    assert [log.result(one).verdict for one in ("same", "loose")] == [PASSED] * 2
    assert {name: CALLED[f"rec-{name}"] for name in "abcd"} == {"a": 1, "b": 1, "c": 0, "d": 1}
    assert log.result("other").verdict == NOT_EVALUATED
    assert "stamp" in log.result("other").reason
    assert log.result("gone").verdict == NOT_EVALUATED
    assert "no-such-run" in log.result("gone").reason
    assert {run.evaluation.case_id for run in runs} == {"same", "other", "loose"}


async def test_a_case_that_begins_with_a_fork_runs_only_what_follows(server: Served) -> None:
    turn = begin(server, "clerk", "fork-a fork-b")
    await turn.to_the_end()
    run_id = turn.events[0].run_id
    ends = [event.sequence for event in turn.events if event.HasField("tool_completed")]
    origin = {"run_id": run_id, "after_sequence": str(ends[0])}
    one: dict[str, Any] = {
        "id": "one",
        "origin": origin,
        "turns": [
            {"expect": {"answer": {"exact": "stamped fork-a, stamped fork-b"}}},
            {"user": "fork-c", "expect": {"answer": {"exact": "stamped fork-c"}}},
        ],
    }
    gone = {"id": "gone", "origin": {"run_id": "no-such-run", "after_sequence": "1"}, "turns": [{}]}
    beyond = {"id": "beyond", "origin": {**origin, "after_sequence": "9999"}, "turns": [{}]}
    changes = {"input": {"parts": [{"text": "fork-d"}]}}
    changed = {
        "id": "changed",
        "origin": {"run_id": run_id, "after_sequence": "1", "changes": changes},
        "turns": [{"expect": {"answer": {"exact": "stamped fork-d"}}}],
    }
    log = await evaluated(server, eval_set(one, gone, beyond, changed, agent="clerk"))
    runs = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    # Each fork has a session that its run names.
    assert {event.case_trial_started.session_id for event in log.events if event.HasField("case_trial_started")} == {""}
    assert log.result("one").verdict == PASSED, log.result("one")
    assert log.result("changed").verdict == PASSED, log.result("changed")
    assert [CALLED[f"fork-{name}"] for name in "abcd"] == [1, 2, 1, 1]
    for name in ("gone", "beyond"):
        assert log.result(name).verdict == NOT_EVALUATED
    assert "no-such-run" in log.result("gone").reason
    ones = [run for run in runs if run.evaluation.case_id == "one"]
    assert [(run.evaluation.turn, run.forked_from.run_id) for run in ones] == [(0, run_id), (1, "")]
    assert len({run.session_id for run in ones}) == 1, "the second turn goes on in the session of the fork"


def instruction_of(request: Request) -> Reply:
    """An answer that repeats the instruction of the agent that asks."""
    return text_reply(str(request["messages"][0]["content"]))


async def test_a_fork_gives_one_agent_another_model_and_another_instruction(tmp_path: Path) -> None:
    (tmp_path / "script.yaml").write_text(
        "agents:\n"
        "  lead: [{calls: [{name: call_writer, arguments: {message: Write.}}]}, It is written.]\n"
        "  writer: [Prose.]\n"
    )
    (tmp_path / "lead.yaml").write_text(
        "name: lead\ndescription: Leads.\nllm: {instruction: Lead.}\nsub_agents: [writer]\n"
    )
    (tmp_path / "writer.yaml").write_text("name: writer\ndescription: Writes.\nllm: {instruction: Write prose.}\n")
    changes = {"agents": {"writer": {"model": "other", "instruction": "Write in verse."}}}
    agents = [str(tmp_path / name) for name in ("lead.yaml", "writer.yaml")]
    async with serving_model(instruction_of) as wire:
        script = {"provider": "scripted", "script": str(tmp_path / "script.yaml")}
        models = {"default": script, "other": openai_model(wire.base_url)}
        async with evaluating(tmp_path, agents=agents, models=models) as server:
            turn = await begin(server, "lead", "Hi").to_the_end()
            called = next(event.sequence for event in turn.events if event.HasField("llm_completed"))
            origin = {"run_id": turn.events[0].run_id, "after_sequence": str(called)}
            cases = [
                {
                    "id": name,
                    "origin": {**origin, **extra},
                    "turns": [
                        {
                            "expect": {
                                "answer": {"exact": "It is written."},
                                "tools": [{"name": "call_writer", "result_json": f'"{said}"'}],
                            }
                        }
                    ],
                }
                for name, extra, said in (("same", {}, "Prose."), ("verse", {"changes": changes}, "Write in verse."))
            ]
            log = await evaluated(server, eval_set(*cases, agent="lead"))
            runs = await runs_of(server, log.evaluation_id)
    check_log(log.events)
    assert {name: (log.result(name).verdict, log.result(name).reason) for name in ("same", "verse")} == {
        "same": (PASSED, ""),
        "verse": (PASSED, ""),
    }
    assert {run.forked_from.run_id for run in runs} == {origin["run_id"]}
    assert wire.count == 1, "the writer alone asks the other model"


async def test_recorded_invocations_are_scored_and_nothing_runs(server: Served) -> None:
    run_id = await recorded(server, "clerk", "told-a")
    response = await server.trees.GetInvocation(eval_service_pb2.GetInvocationRequest(run_id=run_id))
    invocation = json_format.MessageToDict(response.invocation)
    sources: dict[str, dict[str, Any]] = {
        "given": {"invocation": invocation},
        "stored": {"run": {"run_id": run_id}},
        "other": {"run": {"run_id": run_id}},
        "part": {"run": {"run_id": run_id, "as_of_sequence": 1}},
        "missing": {"run": {"run_id": "no-such-run"}},
        "beyond": {"run": {"run_id": run_id, "as_of_sequence": 9999}},
    }
    cases = [
        {"id": name, "turns": [{"recorded": source, "expect": {"tools": [tool_of(name)]}}]}
        for name, source in sources.items()
    ]
    log = await evaluated(server, eval_set(*cases, agent=""), trials=5)
    assert not await runs_of(server, log.evaluation_id)
    check_log(log.events)
    assert {name: (log.result(name).verdict, log.result(name).reason) for name in sources if name != "other"} == {
        "given": (PASSED, ""),
        "stored": (PASSED, ""),
        "part": (NOT_EVALUATED, "The run has not ended."),
        "missing": (NOT_EVALUATED, "A recorded run cannot be read: There is no run 'no-such-run'."),
        "beyond": (
            NOT_EVALUATED,
            f"A recorded run cannot be read: The log of run {run_id!r} ends at {invocation['asOfSequence']} so far.",
        ),
    }
    assert log.result("other").verdict == FAILED
    assert [log.result(name).turns[0].run_id for name in ("given", "stored")] == [run_id] * 2
    assert "case_trial_ended" not in log.kinds
    assert {one.session_id for one in log.having("case_trial_started")} == {""}


def tool_of(name: str) -> dict[str, str]:
    """The call that the case of a name expects."""
    return {"name": "print" if name == "other" else "stamp"}


async def test_a_case_of_an_unfinished_record_is_not_scored(server: Served) -> None:
    turn = {"recorded": {"invocation": json_format.MessageToDict(invocation_pb2.Invocation(run_id="r"))}}
    log = await evaluated(server, eval_set({"id": "one", "turns": [turn]}, agent=""))
    assert log.result("one").verdict == NOT_EVALUATED
