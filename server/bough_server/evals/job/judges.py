"""Run the judges of llm_judge metrics: ordinary runs, each question asked once however often it comes up."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import (
    agent_service_pb2,
    eval_result_pb2,
    eval_set_pb2,
    evaluation_ref_pb2,
    execution_pb2,
    invocation_pb2,
    run_pb2,
)
from bough_server import messages, templates
from bough_server.errors import CallError, RunError, ServerStopping, StorageFailed
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.model_runs import OF_SERVER, ModelRuns, build_request
from bough_server.evals.metrics import llm_judge
from bough_server.evals.metrics.judge_prompts import list_judged_parts
from bough_server.evals.metrics.turn import name_of
from bough_server.evals.results.content import build_redactor, redact_copy
from bough_server.evals.trees.folding import read_invocation
from bough_server.identity import Principal
from bough_server.log.usage import Sums
from bough_server.matching.secrets import RedactionRules, Redactor
from bough_server.observability.tracing import Parent
from bough_server.threads import run_in_thread

MAX_AT_ONCE: Final = 16
"""The most judges of an evaluation that run at the same time."""

_TIMEOUT: Final = Duration(seconds=600)
"""The longest that a judge may run."""

_SUCCEEDED: Final = execution_pb2.EXECUTION_STATE_SUCCEEDED


def _never() -> bool:
    return False


class Judges:
    """Asks the judges of one evaluation, or of one call that scores given records.

    A question that was answered before, in this evaluation or another, is not asked again: its run is found by its
    request id. A question whose run has no answer is asked again by later evaluations, but not by the one that asked
    it.
    """

    def __init__(
        self,
        dependencies: EvaluationDependencies,
        principal: Principal,
        *,
        evaluation_id: str = "",
        counted: Iterable[str] = (),
        is_cancelled: Callable[[], bool] = _never,
        trace: Parent | None = None,
    ) -> None:
        """`counted` are the judges' runs whose usage is part of the evaluation's results already."""
        self._dependencies, self._principal, self._evaluation_id = dependencies, principal, evaluation_id
        self._counted = set(counted)
        self._runs = ModelRuns(dependencies, principal, is_cancelled=is_cancelled, trace=trace or Parent.of_call(()))
        self._free = asyncio.Semaphore(MAX_AT_ONCE)

    async def score(
        self,
        metric: eval_set_pb2.EvalMetric,
        case: eval_set_pb2.EvalCase,
        invocations: Sequence[invocation_pb2.Invocation],
        *,
        trial: int,
        run_ids: Sequence[str],
        used: Sums,
    ) -> eval_result_pb2.MetricScore:
        """Return a metric's score, and add to `used` what its judges used and no result has counted.

        Raises ServerStopping and StorageFailed.
        """
        try:
            # In a thread: the texts of a large record take a while to join.
            rules = self._dependencies.redaction
            asked = await run_in_thread(_questions, metric, case, invocations, rules)
        except RunError as error:
            return llm_judge.score(metric, (), problem=f"The judge was not asked: {error.message}")
        anew = f"{self._evaluation_id}\0{case.id}\0{trial}" if metric.llm_judge.fresh else ""
        refs = [self._ref(metric, case, question, run_ids=run_ids, trial=trial) for question in asked]
        # All are awaited, although one fails: a run that was started must be counted.
        answers = await asyncio.gather(
            *(self._answer(question, ref, used, anew=anew) for question, ref in zip(asked, refs, strict=True)),
            return_exceptions=True,
        )
        judgments: list[eval_result_pb2.Judgment] = []
        problem = ""
        for question, answer in zip(asked, answers, strict=True):
            if isinstance(answer, llm_judge.JudgeAnswer):
                judgments += llm_judge.parse_judgments(metric.llm_judge, question, answer)
            elif isinstance(answer, ServerStopping | StorageFailed) or not isinstance(answer, CallError | RunError):
                raise answer
            else:
                problem = problem or f"The judge was not asked: {answer.message}"
        return llm_judge.score(metric, judgments, problem=problem)

    def _ref(
        self,
        metric: eval_set_pb2.EvalMetric,
        case: eval_set_pb2.EvalCase,
        question: llm_judge.Question,
        *,
        run_ids: Sequence[str],
        trial: int,
    ) -> evaluation_ref_pb2.EvaluationRef:
        """Return what the run of a question is in the evaluation, or in a call that scores given records."""
        rubrics = metric.llm_judge.rubrics  # planned, so they have their ids
        return evaluation_ref_pb2.EvaluationRef(
            evaluation_id=self._evaluation_id,
            case_id=case.id if self._evaluation_id else "",
            trial=trial,
            turn=None if question.is_conversation else question.turn,
            role=evaluation_ref_pb2.EVALUATION_ROLE_JUDGE,
            metric=name_of(metric),
            rubric_id=rubrics[0].id if len(rubrics) == 1 else "",
            judged_run_id=run_ids[-1 if question.is_conversation else question.turn],
        )

    async def _answer(
        self, question: llm_judge.Question, ref: evaluation_ref_pb2.EvaluationRef, used: Sums, *, anew: str
    ) -> llm_judge.JudgeAnswer:
        """Return the answer to a question; `anew` names the trial that is not to share it, empty for any."""
        async with self._free:
            request = build_request(question.definition, question.prompt, timeout=_TIMEOUT)
            digest = self._digest(request, question, anew)
            # A run without an answer keeps its request id, so the same question is asked under the next number.
            for number in count():
                request.request_id = f"{OF_SERVER}judge/{digest}-{number}"
                answer = await self._ask(request, ref, used)
                if answer is not None:
                    return answer
        raise AssertionError("count() has no end")

    async def _ask(
        self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef, used: Sums
    ) -> llm_judge.JudgeAnswer | None:
        """Return what the run of this request says; None if it has no answer and was started elsewhere."""
        run, is_found = await self._runs.find_or_start(request, ref)
        if is_found and run.HasField("end_time") and run.state != _SUCCEEDED and not self._is_own(run):
            return None
        answer = await self._runs.wait_for_answer(run.run_id)
        if not is_found or self._is_own(answer.run):
            self._count(answer.run, used)
        elif answer.run.state == execution_pb2.EXECUTION_STATE_CANCELLED:
            return None  # with the evaluation that had asked
        text = await self._read_last_text(answer.run) if answer.problem else answer.text
        return llm_judge.JudgeAnswer(run_id=answer.run.run_id, text=text, problem=answer.problem)

    async def _read_last_text(self, run: run_pb2.Run) -> str:
        """Return what a judge without an answer said last; empty if it said nothing."""
        store = self._dependencies.store
        record = await read_invocation(self._dependencies.runs, store.log, self._principal, run.run_id)
        texts = (messages.text_of(step.llm_response.message) for step in reversed(record.steps))
        return next(filter(None, texts), "")

    def _is_own(self, run: run_pb2.Run) -> bool:
        return bool(self._evaluation_id) and run.evaluation.evaluation_id == self._evaluation_id

    def _count(self, run: run_pb2.Run, used: Sums) -> None:
        if run.run_id not in self._counted:
            self._counted.add(run.run_id)
            used.add(Sums.of(run.tree_usage))

    def _digest(self, request: agent_service_pb2.RunRequest, question: llm_judge.Question, anew: str) -> str:
        """Return the digest of everything that a judgment depends on: equal questions have one answer."""
        model = self._dependencies.models.get(question.definition.llm.model, "")
        content = [request.SerializeToString(deterministic=True), model.encode(), str(question.sample).encode()]
        if anew:
            content.append(anew.encode())
        return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in content)).hexdigest()


def _questions(
    metric: eval_set_pb2.EvalMetric,
    case: eval_set_pb2.EvalCase,
    invocations: Sequence[invocation_pb2.Invocation],
    rules: RedactionRules,
) -> list[llm_judge.Question]:
    """Return what a judge is asked, without what the rules remove."""
    judge = metric.llm_judge
    if not rules.is_empty:
        # Of the case, judges see no more than this.
        case = eval_set_pb2.EvalCase(turns=case.turns, user=case.user if case.HasField("user") else None)
        redactor = build_redactor([case, *invocations], rules)
        case = redact_copy(case, redactor)
        invocations = [_redact_record(invocation, judge.template, redactor) for invocation in invocations]
        judge = _redact_judge(judge, redactor)
    judged = list_judged_parts(judge, case, invocations)
    return [question for one in judged for question in llm_judge.questions(judge, one)]


def _redact_record(
    invocation: invocation_pb2.Invocation, template: str, redactor: Redactor
) -> invocation_pb2.Invocation:
    """Return a copy of a record without secrets; agents that a template names keep their names, to be found by."""
    shown = redact_copy(invocation, redactor)
    for agent, before in zip(shown.agents, invocation.agents, strict=True):
        if f"agents.{before.name}." in template:
            agent.name = before.name
    return shown


def _redact_judge(judge: eval_set_pb2.LlmJudgeMetric, redactor: Redactor) -> eval_set_pb2.LlmJudgeMetric:
    """Return a copy of a metric whose criteria and template have no secrets; its placeholders stay."""
    shown = messages.copy_of(judge)
    for rubric in shown.rubrics:
        rubric.text = redactor.redact(rubric.text, is_json=False)
    shown.template = templates.change_text(judge.template, partial(redactor.redact, is_json=False))
    return shown
