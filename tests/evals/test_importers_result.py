"""Results in the form of trpc-agent-go, and the commands that import and export."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner, Result

from bough.v1 import eval_result_pb2, eval_set_pb2
from bough.v1.execution_pb2 import EXECUTION_STATE_SUCCEEDED
from bough_server.cli.commands import command
from bough_server.cli.eval.files import read_result
from bough_server.cli.eval.import_ import export, import_
from bough_server.cli.output import json_text
from bough_server.evals.importers.trpc_result import trpc_result
from bough_server.messages import text_of
from tests.evals.trpc_files import import_json, import_values
from tests.support.examples import examples
from tests.support.random_messages import messages

FILES = Path(__file__).parents[1] / "golden" / "imports"
CALL = {
    "name": "add",
    "arguments_json": '{"a":1}',
    "result_json": '{"sum":2}',
    "state": "EXECUTION_STATE_SUCCEEDED",
}
PASSED_TRIAL = {
    "case_id": "sum",
    "verdict": "VERDICT_PASSED",
    "turns": [
        {
            "run_id": "r1",
            "state": "EXECUTION_STATE_SUCCEEDED",
            "answer": "It is 2.",
            "agents": [
                {"name": "lead", "invocation_id": "i1", "calls": [CALL]},
                {
                    "name": "a",
                    "depth": 1,
                    "invocation_id": "i2",
                    "calls": [{"name": "now", "error": {"message": "No."}}],
                },
                {"name": "b", "depth": 2, "invocation_id": "i3"},
                {"name": "c", "depth": 1, "invocation_id": "i4"},
            ],
        }
    ],
    "scores": [
        {"name": "calls", "verdict": "VERDICT_PASSED", "score": 1, "threshold": 1},
        {"name": "answer", "verdict": "VERDICT_PASSED", "score": 0, "threshold": 0, "reason": "It differs."},
    ],
}
CRASHED_TRIAL = {
    "case_id": "sum",
    "trial": 1,
    "verdict": "VERDICT_FAILED",
    "crashed": True,
    "reason": "The run failed.",
}
UNSCORED_TRIAL = {
    "case_id": "other",
    "verdict": "VERDICT_NOT_EVALUATED",
    "reason": "quality: It was not asked.",
    "scores": [{"name": "quality", "verdict": "VERDICT_NOT_EVALUATED", "threshold": 0.5, "reason": "Why."}],
    "turns": [{"run_id": "r3", "answer": "Yes"}, {"run_id": "r4", "answer": "No"}],
}
RESULT: dict[str, object] = {
    "evaluation_id": "e1",
    "eval_set_name": "math",
    "verdict": "VERDICT_FAILED",
    "create_time": "2026-11-22T10:00:00.500Z",
    "cases": [
        {
            "case_id": "sum",
            "verdict": "VERDICT_FAILED",
            "turns": [
                {
                    "user": "1 + 1?",
                    "expect": {
                        "answer": {"exact": "2"},
                        "tools": [{"name": "add", "arguments_json": '{"a":1}', "result_match": {"equals_json": "2"}}],
                    },
                }
            ],
            "trials": [PASSED_TRIAL, CRASHED_TRIAL],
        },
        {
            "case_id": "other",
            "verdict": "VERDICT_NOT_EVALUATED",
            "turns": [{"user": "Well?"}, {"input": {"parts": [{"text": "And?"}]}}],
            "trials": [UNSCORED_TRIAL],
        },
    ],
}


def result_of(members: dict[str, object]) -> eval_result_pb2.EvalResult:
    return json_format.ParseDict(members, eval_result_pb2.EvalResult())


CALLS = {"metricName": "calls", "score": 1.0, "evalStatus": "passed", "threshold": 1.0}
ANSWER = {"metricName": "answer", "evalStatus": "passed"}
QUALITY = {"metricName": "quality", "evalStatus": "not_evaluated", "threshold": 0.5}
SCORES = [{**CALLS, "details": {"score": 1.0}}, {**ANSWER, "details": {"reason": "It differs."}}]
TOTALS = [
    {
        "metricName": "calls",
        "averageScore": 1.0,
        "evalStatus": "passed",
        "threshold": 1.0,
        "statusCounts": {"passed": 1},
    },
    {"metricName": "answer", "evalStatus": "passed", "statusCounts": {"passed": 1}},
]
NO_TOTALS = [
    {"metricName": "quality", "evalStatus": "not_evaluated", "threshold": 0.5, "statusCounts": {"notEvaluated": 1}}
]
SUM_RUNS = [
    {
        "evalSetId": "math",
        "evalId": "sum",
        "runId": 1,
        "score": 1,
        "finalEvalStatus": "passed",
        "overallEvalMetricResults": SCORES,
        "evalMetricResultPerInvocation": [
            {
                "actualInvocation": {
                    "invocationId": "r1",
                    "userContent": {"role": "user", "content": "1 + 1?"},
                    "finalResponse": {"role": "assistant", "content": "It is 2."},
                    "tools": [
                        {"id": "call-1", "name": "add", "arguments": {"a": 1}, "result": {"sum": 2}},
                        {"id": "call-2", "name": "now", "arguments": {}, "result": "No."},
                    ],
                    "agents": [
                        {"invocationId": "i1", "name": "lead", "branch": "lead"},
                        {"invocationId": "i2", "parentInvocationId": "i1", "name": "a", "branch": "lead/a"},
                        {"invocationId": "i3", "parentInvocationId": "i2", "name": "b", "branch": "lead/a/b"},
                        {"invocationId": "i4", "parentInvocationId": "i1", "name": "c", "branch": "lead/c"},
                    ],
                },
                "expectedInvocation": {
                    "invocationId": "sum-1",
                    "userContent": {"role": "user", "content": "1 + 1?"},
                    "finalResponse": {"role": "assistant", "content": "2"},
                    "tools": [{"name": "add", "arguments": {"a": 1}, "result": 2}],
                },
                "evalMetricResults": SCORES,
            }
        ],
    },
    {
        "evalSetId": "math",
        "evalId": "sum",
        "runId": 2,
        "finalEvalStatus": "failed",
        "errorMessage": "The run failed.",
    },
]
OTHER_RUN = {
    "evalSetId": "math",
    "evalId": "other",
    "runId": 1,
    "finalEvalStatus": "not_evaluated",
    "errorMessage": "quality: It was not asked.",
    "overallEvalMetricResults": [{**QUALITY, "details": {"reason": "Why."}}],
    "evalMetricResultPerInvocation": [
        {
            "actualInvocation": {
                "invocationId": f"r{number + 2}",
                "userContent": {"role": "user", "content": said},
                "finalResponse": {"role": "assistant", "content": answer},
            },
            "expectedInvocation": {
                "invocationId": f"other-{number}",
                "userContent": {"role": "user", "content": said},
            },
        }
        for number, said, answer in ((1, "Well?", "Yes"), (2, "And?", "No"))
    ],
}
SUMMARY = {
    "overallStatus": "failed",
    "numRuns": 2,
    "runStatusCounts": {"failed": 1, "notEvaluated": 1},
    "runSummaries": [
        {
            "runId": 1,
            "overallStatus": "not_evaluated",
            "caseStatusCounts": {"passed": 1, "notEvaluated": 1},
            "metricSummaries": [*TOTALS, *NO_TOTALS],
        },
        {"runId": 2, "overallStatus": "failed", "caseStatusCounts": {"failed": 1}},
    ],
    "evalCaseSummaries": [
        {
            "evalId": "sum",
            "overallStatus": "failed",
            "runStatusCounts": {"passed": 1, "failed": 1},
            "metricSummaries": TOTALS,
            "runSummaries": [
                {"runId": 1, "finalEvalStatus": "passed", "metricResults": [CALLS, ANSWER]},
                {"runId": 2, "finalEvalStatus": "failed", "errorMessage": "The run failed."},
            ],
        },
        {
            "evalId": "other",
            "overallStatus": "not_evaluated",
            "runStatusCounts": {"notEvaluated": 1},
            "metricSummaries": NO_TOTALS,
            "runSummaries": [
                {
                    "runId": 1,
                    "finalEvalStatus": "not_evaluated",
                    "errorMessage": "quality: It was not asked.",
                    "metricResults": [QUALITY],
                }
            ],
        },
    ],
}


def test_a_result_is_written_with_the_fields_of_the_other_reader() -> None:
    assert trpc_result(result_of(RESULT)) == {
        "evalSetResultId": "math_e1",
        "evalSetResultName": "math_e1",
        "evalSetId": "math",
        "evalCaseResults": [*SUM_RUNS, OTHER_RUN],
        "summary": SUMMARY,
        "creationTimestamp": 1795341600.5,
    }


def test_an_exported_result_can_be_imported() -> None:
    eval_set, _ = import_values(trpc_result(result_of(RESULT)), path=Path("x.evalset_result.json"))
    assert [case.id for case in eval_set.cases] == ["sum run 1", "other"]
    record = eval_set.cases[0].turns[0].recorded.invocation
    assert [(call.name, call.arguments_json) for call in record.tools] == [("add", '{"a":1}'), ("now", "{}")]
    assert [(agent.name, agent.depth) for agent in record.agents] == [("lead", 0), ("a", 1), ("b", 2), ("c", 1)]


TEXTS = st.text(max_size=8)
NAMES = st.text(min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CALL_TEXTS = st.tuples(st.dictionaries(TEXTS, JSON, max_size=2), JSON).map(
    lambda call: tuple(json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in call)
)


@st.composite
def turns(draw: st.DrawFn) -> eval_result_pb2.EvalTurnResult:
    turn = eval_result_pb2.EvalTurnResult(run_id=draw(NAMES), answer=draw(TEXTS))
    depth = -1
    for number in range(draw(st.integers(0, 4))):
        depth = draw(st.integers(0, depth + 1))
        agent = turn.agents.add(name=draw(NAMES), invocation_id=f"i{number}", depth=depth)
        for arguments, result in draw(st.lists(CALL_TEXTS, max_size=2)):
            agent.calls.add(name=draw(NAMES), arguments_json=arguments, result_json=result)
    return turn


@examples(30)
@given(st.lists(st.tuples(TEXTS, turns()), min_size=1, max_size=3))
def test_what_an_exported_result_holds_of_runs_is_imported_whole(
    said: list[tuple[str, eval_result_pb2.EvalTurnResult]],
) -> None:
    case = eval_result_pb2.CaseResult(case_id="one", turns=[eval_set_pb2.EvalTurn(user=user) for user, _ in said])
    case.trials.add(case_id="one", turns=[turn for _, turn in said])
    exported = trpc_result(eval_result_pb2.EvalResult(eval_set_name="s", cases=[case]))
    found = import_json(exported, path=Path("x.evalset_result.json"))
    records = [turn.recorded.invocation for turn in found.set.cases[0].turns]
    assert [
        (
            text_of(record.user_content),
            text_of(record.final_response),
            [(agent.name, agent.depth) for agent in record.agents],
            [(call.name, call.arguments_json, call.result_json) for call in record.tools],
        )
        for record in records
    ] == [
        (
            user,
            turn.answer,
            [(agent.name, agent.depth) for agent in turn.agents],
            [(call.name, call.arguments_json, call.result_json) for each in turn.agents for call in each.calls],
        )
        for user, turn in said
    ]
    assert [str(each) for each in found.left_out if each.reason] == []


@examples(30)
@given(messages(eval_result_pb2.EvalResult))
def test_a_result_that_json_wrote_reads_back_to_the_same(result: eval_result_pb2.EvalResult) -> None:
    result.state = EXECUTION_STATE_SUCCEEDED
    result.cases.add(case_id="last")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        path.write_text(json_text(result), encoding="utf-8")
        assert read_result(path) == result


def test_a_text_that_was_cut_stays_a_text() -> None:
    run = eval_result_pb2.CaseTrialResult()
    run.turns.add().agents.add().calls.add(name="add", arguments_json='{"a": "x…', result_json='{"r": …')
    case = eval_result_pb2.CaseResult(case_id="one", trials=[run])
    made = trpc_result(eval_result_pb2.EvalResult(eval_set_name="s", cases=[case]))
    assert '"arguments": "{\\"a\\": \\"x…"' in json.dumps(made, ensure_ascii=False)


# The commands.

APP = Typer()
command(APP, "import")(import_)
command(APP, "export")(export)


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_a_number_that_is_no_json_stays_a_text() -> None:
    result = eval_result_pb2.EvalResult(eval_set_name="s")
    turn = result.cases.add(case_id="a").trials.add(case_id="a").turns.add()
    turn.agents.add(name="lead").calls.add(name="now", arguments_json="NaN", result_json='{"a": Infinity}')
    text = json.dumps(trpc_result(result), allow_nan=False)
    assert '"arguments": "NaN"' in text


def test_import_writes_a_set_and_says_what_has_no_place(tmp_path: Path) -> None:
    to = tmp_path / "trace.json"
    found = called("import", FILES / "trace-basic.evalset.json", "--to", to, "--agent", "calculator")
    assert found.exit_code == 0
    eval_set = json_format.Parse(to.read_bytes(), eval_set_pb2.EvalSet())
    assert (eval_set.name, eval_set.agent, len(eval_set.cases)) == ("trace-basic", "calculator", 1)
    source, conversation = FILES / "trace-basic.evalset.json", "evalCases[0].conversation[0]"
    actual = "evalCases[0].actualConversation[0]"
    assert found.stderr.splitlines() == [
        "There is no metrics file: tool calls are compared exactly, in any order.",
        "No metric compares the expected answers: they are kept with the threshold 0.",
        "Left out with no effect on runs and scores:",
        f"  {source}:3: name",
        f"  {source}:10: {conversation}.invocationId",
        f"  {source}:12: {conversation}.userContent.role",
        f"  {source}:16: {conversation}.finalResponse.role",
        f"  {source}:42: {actual}.userContent.role",
        f"  {source}:46: {actual}.finalResponse.role",
        f"  {source}:69: evalCases[0].sessionInput.appName",
        f"  {source}:70: evalCases[0].sessionInput.userId",
        f"wrote {to}: 1 case",
    ]


def test_import_says_that_an_agent_is_missing(tmp_path: Path) -> None:
    found = called("import", FILES / "tooltrajectory-basic.evalset.json", "--to", tmp_path / "a.json")
    assert "The set names no agent: write one into it, or name it by `bough eval run --agent`." in found.stderr


def test_import_of_a_file_that_is_none_exits_with_2_and_writes_nothing(tmp_path: Path) -> None:
    source, to = tmp_path / "a.json", tmp_path / "set.json"
    source.write_text("{}")
    found = called("import", source, "--to", to)
    assert found.exit_code == 2
    assert found.stderr.startswith(f"{source}: The file is no eval set of trpc-agent-go")
    assert not to.exists()


def test_export_writes_a_result_file(tmp_path: Path) -> None:
    source, to = tmp_path / "result.json", tmp_path / "math.evalset_result.json"
    kept = result_of(RESULT)
    kept.state = EXECUTION_STATE_SUCCEEDED
    source.write_text(json_format.MessageToJson(kept))
    found = called("export", source, "--to", to, "--format", "trpc")
    assert (found.exit_code, found.stderr) == (0, f"wrote {to}\n")
    assert json.loads(to.read_text()) == trpc_result(result_of(RESULT))
