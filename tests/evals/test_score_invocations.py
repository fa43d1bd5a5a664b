"""Records that are stored or that callers bring: ScoreInvocations, DiffInvocations and CompareEvaluations."""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from grpc import StatusCode, aio

from bough.v1 import (
    eval_result_pb2,
    eval_set_pb2,
    execution_pb2,
    invocation_pb2,
)
from bough.v1.eval_result_pb2 import EvalSource
from bough.v1.eval_service_pb2 import CompareEvaluationsRequest, DiffInvocationsRequest, ScoreInvocationsRequest
from bough.v1.invocation_pb2 import InvocationSource, RunRef
from bough_server.evals.job import given as given_records
from bough_server.evals.job import judging
from tests.evals.invocations import agent, invocation
from tests.evals.test_judges import broken, judge, judged_by
from tests.rpc.run_server import Served, begin, served, settings

PASSED = eval_result_pb2.VERDICT_PASSED
FAILED = eval_result_pb2.VERDICT_FAILED
NOT_EVALUATED = eval_result_pb2.VERDICT_NOT_EVALUATED
SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED

LEAD = eval_set_pb2.EvalExpectation(agents=[eval_set_pb2.ExpectedAgent(name="lead")])
TREE = eval_set_pb2.EvalMetric(agent_trajectory=eval_set_pb2.AgentTrajectoryMetric())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(settings(tmp_path)) as serving:
        yield serving


def given(*records: invocation_pb2.Invocation) -> list[InvocationSource]:
    return [InvocationSource(invocation=record) for record in records]


def stored(run_id: str, through: int = 0) -> InvocationSource:
    return InvocationSource(run=RunRef(run_id=run_id, as_of_sequence=through))


async def scored(server: Served, *sources: InvocationSource, **fields: Any) -> eval_result_pb2.EvalResult:
    answer = await server.trees.ScoreInvocations(ScoreInvocationsRequest(invocations=sources, **fields))
    return answer.result


async def ran(server: Served, agent_name: str, text: str) -> str:
    turn = await begin(server, agent_name, text).to_the_end()
    return await turn.run_id()


class Threads:
    """Where functions of modules run that take long for large records: never in the thread of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.calls: Counter[str] = Counter()
        self.in_loop: Counter[str] = Counter()

    def watch(self, owner: object, *names: str) -> None:
        """Note each call of these functions from now on."""
        for name in names:
            self._monkeypatch.setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        loop = threading.get_ident()

        @wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            self.in_loop[name] += threading.get_ident() == loop
            return function(*args, **kwargs)

        return watched


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """The functions that see whole records, whatever their number and size."""
    watched = Threads(monkeypatch)
    watched.watch(judging, "find_mock_problem", "is_scorable", "score_trial")
    watched.watch(given_records, "case_result", "totals", "verdict", "copy_of")
    return watched


async def test_stored_runs_are_scored(server: Served) -> None:
    first, second = await ran(server, "echo", "hello"), await ran(server, "lead", "hello")
    expect = eval_set_pb2.EvalExpectation(answer=eval_set_pb2.ExpectedAnswer(exact="hello"))
    found = await scored(server, stored(first), stored(second), stored(first), expect=expect)
    assert [one.case_id for one in found.cases] == [first, second, f"{first} (2)"]
    assert [one.verdict for one in found.cases] == [PASSED, FAILED, PASSED]
    assert (found.totals.cases, found.totals.cases_passed, found.verdict) == (3, 2, FAILED)
    assert [turn.run_id for one in found.cases for turn in one.trials[0].turns] == [first, second, first]


async def test_a_run_up_to_a_sequence_has_not_ended(server: Served) -> None:
    run_id = await ran(server, "echo", "hello")
    found = await scored(server, stored(run_id, 1))
    assert found.cases[0].verdict == NOT_EVALUATED
    assert "has not ended" in found.cases[0].reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": execution_pb2.EXECUTION_STATE_UNSPECIFIED}, "has not ended"),
        ({"state": execution_pb2.EXECUTION_STATE_INPUT_REQUIRED}, "waits for input"),
        ({"agents_total": 7}, "more agents or tool calls than its record"),
        ({"tools_total": 7}, "more agents or tool calls than its record"),
        ({"anomalies": [invocation_pb2.Anomaly(message="two roots")]}, "is inconsistent: two roots"),
    ],
)
async def test_records_that_are_not_whole_are_not_scored(server: Served, change: dict[str, Any], words: str) -> None:
    record = invocation(agent("lead"))
    for name, value in change.items():
        getattr(record, name).extend(value) if isinstance(value, list) else setattr(record, name, value)
    found = await scored(server, *given(record, invocation(agent("lead"))), expect=LEAD)
    assert [one.verdict for one in found.cases] == [NOT_EVALUATED, PASSED]
    assert words in found.cases[0].reason


async def test_records_of_other_systems_need_no_ids_and_no_kinds(server: Served) -> None:
    bare = invocation(agent("lead", agent("writer", kind=execution_pb2.AGENT_KIND_UNSPECIFIED)))
    bare.run_id = ""
    named, long, tricky = invocation(agent("lead")), invocation(agent("lead")), invocation(agent("lead"))
    named.run_id, long.run_id, tricky.run_id = "1", "x" * 1_000, "1 (3)"
    empty = invocation_pb2.Invocation(state=SUCCEEDED)
    found = await scored(server, *given(bare, tricky, named, named, long, empty), expect=LEAD)
    assert [one.case_id for one in found.cases] == ["0", "1 (3)", "1", "1 (3) (3)", "x" * 128, "5"]
    assert [one.verdict for one in found.cases] == [FAILED, PASSED, PASSED, PASSED, PASSED, FAILED]


async def test_a_tree_whose_ids_repeat_is_not_scored(server: Served) -> None:
    record = invocation(agent("lead", agent("writer"), agent("writer")))
    for one in record.agents:
        one.invocation_id = one.parent_invocation_id = ""
    found = await scored(server, *given(record), expect=LEAD)
    assert found.cases[0].verdict == NOT_EVALUATED
    assert "several agents with the same invocation_id" in found.cases[0].reason


async def test_a_record_may_have_any_times(server: Served) -> None:
    record = invocation(agent("lead"))
    record.start_time.seconds, record.end_time.seconds = -(10**17), 10**17
    limit = eval_set_pb2.BudgetMetric()
    limit.limits.wall_duration.FromSeconds(1)
    found = await scored(server, *given(record), metrics=[eval_set_pb2.EvalMetric(budget=limit)])
    assert found.verdict == FAILED
    assert MessageToJson(found)


async def test_runs_that_are_not_there_are_errors(server: Served) -> None:
    run_id = await ran(server, "echo", "hello")
    for source, code in (
        (stored("none"), StatusCode.NOT_FOUND),
        (stored(run_id, 1_000), StatusCode.OUT_OF_RANGE),
        (InvocationSource(), StatusCode.INVALID_ARGUMENT),
        (stored(""), StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(aio.AioRpcError) as refused:
            await scored(server, source)
        assert refused.value.code() == code
        with pytest.raises(aio.AioRpcError) as refused:
            await server.trees.DiffInvocations(DiffInvocationsRequest(before=source, after=stored(run_id)))
        assert refused.value.code() == code


async def test_mistakes_are_named_by_their_place_in_the_request(server: Served) -> None:
    wrong = eval_set_pb2.EvalExpectation(answer=eval_set_pb2.ExpectedAnswer(regex="("))
    unknown = eval_set_pb2.EvalMetric(custom=eval_set_pb2.CustomMetric(name="none"))
    with pytest.raises(aio.AioRpcError) as refused:
        await scored(server, *given(invocation(agent("lead"))), expect=wrong, metrics=[unknown])
    assert [field for field, _ in broken(refused.value)] == ["expect.answer", "metrics[0].custom.name"]


async def test_the_result_of_as_many_records_as_a_call_may_score_fits_an_answer(
    server: Served, threads: Threads
) -> None:
    record = invocation(agent("lead", *[agent(f"writer {number}") for number in range(20)]), answer="answer " * 1_000)
    metrics = [
        eval_set_pb2.EvalMetric(name=f"budget-{n:0120}", budget=eval_set_pb2.BudgetMetric(errors=n)) for n in range(64)
    ]
    found = await scored(server, *given(*[record] * 256), metrics=metrics)
    assert (threads.calls["score_trial"], threads.calls["case_result"], threads.calls["totals"]) == (256, 256, 1)
    assert threads.in_loop.total() == 0
    assert {(one.verdict, len(one.metrics)) for one in found.cases} == {(PASSED, 64)}
    assert found.ByteSize() <= 4 * 1024 * 1024
    assert (len(found.cases), found.totals.cases_passed, found.state) == (256, 256, SUCCEEDED)


async def test_more_records_than_a_call_may_score_are_refused(server: Served) -> None:
    with pytest.raises(aio.AioRpcError) as refused:
        await scored(server, *[stored("none")] * 257)
    assert [field for field, _ in broken(refused.value)] == ["invocations"]


async def test_a_large_record_does_not_hold_the_server_up(tmp_path: Path, threads: Threads) -> None:
    large = invocation(*(agent("lead", calls=["search"] * 20) for _ in range(2_000)))
    for call in large.tools:
        call.arguments_json = '"' + "x" * 50 + '"'
    assert 3_000_000 < large.ByteSize() < 8_000_000
    budget = eval_set_pb2.EvalMetric(budget=eval_set_pb2.BudgetMetric(errors=0))
    async with judged_by(tmp_path, lambda *_: True) as (server, _):
        found = await scored(server, *given(large), metrics=[budget, judge(template="{{answer}}")])
    assert found.cases[0].verdict == PASSED
    assert set(threads.calls) == {
        *("find_mock_problem", "is_scorable", "score_trial"),
        *("case_result", "totals", "verdict", "copy_of"),
    }
    assert threads.in_loop.total() == 0


async def test_a_judge_is_asked_about_given_records_once(tmp_path: Path) -> None:
    async with judged_by(tmp_path, lambda *_: True) as (server, model):
        record = invocation(agent("lead"), answer="Hello")
        first = await scored(server, *given(record, record), metrics=[judge()])
        assert first.verdict == PASSED
        assert (model.count, first.totals.judge_usage.model_calls) == (1, 1)
        second = await scored(server, *given(record), metrics=[judge()])
        assert (model.count, second.totals.judge_usage.model_calls) == (1, 0)


async def test_no_judge_is_asked_about_what_cannot_be_judged(tmp_path: Path) -> None:
    async with judged_by(tmp_path, lambda *_: True) as (server, model):
        record = invocation(agent("lead"))
        record.agents_total = 5
        assert (await scored(server, *given(record), metrics=[judge()])).verdict == NOT_EVALUATED
        assert model.count == 0


@pytest.mark.parametrize(
    ("template", "cut", "words"),
    [
        ("{{answer}}", "answer", "The answer was cut in the record"),
        ("{{user}}", "user", "What the user said was cut in the record"),
        ("{{tools}}", "arguments", "Calls of tools were cut in the record"),
        ("{{tools}}", "executed", "Calls of tools were cut in the record"),
        ("{{tools}}", "result", "Calls of tools were cut in the record"),
        ("{{agents.lead.output}}", "output", "What agents.lead.output stands for was cut in the record"),
        ("{{agents.lead.input}}", "input", "What agents.lead.input stands for was cut in the record"),
    ],
)
async def test_no_judge_is_asked_about_a_text_that_was_cut(tmp_path: Path, template: str, cut: str, words: str) -> None:
    async with judged_by(tmp_path, lambda *_: True) as (server, model):
        record = invocation(agent("lead", calls=["search"]), answer="Hello")
        record.user_content.parts.add(text="Hi", truncated=cut == "user")
        record.agents[0].input.parts.add(text="Hi", truncated=cut == "input")
        record.agents[0].output.parts.add(text="Hello", truncated=cut == "output")
        record.final_response.parts[0].truncated = cut == "answer"
        record.tools[0].arguments_truncated = cut == "arguments"
        record.tools[0].executed_arguments_json = '"ed' if cut == "executed" else ""
        record.tools[0].executed_arguments_truncated = cut == "executed"
        record.tools[0].result_truncated = cut == "result"
        found = await scored(server, *given(record), metrics=[judge(template=template)])
        assert found.cases[0].verdict == NOT_EVALUATED
        assert f"The judge was not asked: {words}." in found.cases[0].reason
        assert model.count == 0
        whole = await scored(server, *given(record), metrics=[judge(template="{{tree}}")])
        assert whole.cases[0].verdict == PASSED


async def test_stored_and_given_records_are_compared(server: Served) -> None:
    run_id = await ran(server, "lead", "hello")
    other = await ran(server, "echo", "hello")
    same = await server.trees.DiffInvocations(DiffInvocationsRequest(before=stored(run_id), after=stored(run_id)))
    assert same.diff.same
    two = await server.trees.DiffInvocations(DiffInvocationsRequest(before=stored(run_id), after=stored(other)))
    assert not two.diff.same
    assert {one.agent for one in two.diff.agent_differences} == {"lead", "nester", "echo"}


async def test_results_that_callers_bring_are_compared_whatever_they_lack(server: Served) -> None:
    empty = eval_result_pb2.EvalResult()
    twice = eval_result_pb2.EvalResult()
    for verdict in (PASSED, FAILED, 99):
        twice.cases.add(case_id="a", verdict=verdict)  # type: ignore[arg-type]
    twice.cases.add()
    twice.cases[0].trials.add(trial=-5)
    twice.cases[0].metrics.add(mean=float("nan"))
    for left, right in ((empty, empty), (twice, twice), (empty, twice), (twice, empty)):
        request = CompareEvaluationsRequest(
            baseline=EvalSource(result=left), candidate=EvalSource(result=right), allow_incomplete_baseline=True
        )
        found = (await server.trees.CompareEvaluations(request)).comparison
        assert len(found.cases) == max(len(left.cases), len(right.cases))
    with pytest.raises(aio.AioRpcError) as refused:
        await server.trees.CompareEvaluations(
            CompareEvaluationsRequest(baseline=EvalSource(), candidate=EvalSource(result=empty))
        )
    assert refused.value.code() == StatusCode.INVALID_ARGUMENT
