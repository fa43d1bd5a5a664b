"""Run the judges of llm_judge metrics: ordinary runs, each question asked once however often it comes up."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Final

from bough.v1 import (
    agent_service_pb2,
    error_pb2,
    eval_result_pb2,
    eval_set_pb2,
    evaluation_ref_pb2,
    execution_pb2,
    follow_pb2,
    invocation_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server import messages
from bough_server.errors import CallError, RunError, ServerStopping, StorageFailed
from bough_server.evals.job.case_trials import OF_SERVER
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.metrics import llm_judge
from bough_server.evals.metrics.turn import name_of
from bough_server.evals.trees.folding import read_invocation
from bough_server.identity import Principal
from bough_server.log.usage import Sums
from bough_server.observability.tracing import Parent
from bough_server.runs.admission import EvaluationRun
from bough_server.store.ports.runs import RunRow
from bough_server.threads import run_in_thread

MAX_AT_ONCE: Final = 16
"""The most judges of an evaluation that run at the same time."""

TIMEOUT_SECONDS: Final = 600
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
        self._is_cancelled, self._trace = is_cancelled, trace or Parent.of_call(())
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
            asked = await run_in_thread(_questions, metric, case, invocations)
        except RunError as error:
            return llm_judge.score(metric, (), problem=f"The judge was not asked: {error.message}")
        anew = f"{self._evaluation_id}\0{case.id}\0{trial}" if metric.llm_judge.fresh else ""
        refs = [
            self._ref(metric, case, question, judged_run_id=run_ids[question.turn], trial=trial) for question in asked
        ]
        # All are awaited, although one fails: a run that was started must be counted.
        answers = await asyncio.gather(
            *(self._answer(question, ref, used, anew=anew) for question, ref in zip(asked, refs, strict=True)),
            return_exceptions=True,
        )
        said: list[eval_result_pb2.Judgment] = []
        problem = ""
        for question, answer in zip(asked, answers, strict=True):
            if isinstance(answer, llm_judge.JudgeAnswer):
                said += llm_judge.parse_judgments(metric.llm_judge, question, answer)
            elif isinstance(answer, ServerStopping | StorageFailed) or not isinstance(answer, CallError | RunError):
                raise answer
            else:
                problem = problem or f"The judge was not asked: {answer.message}"
        return llm_judge.score(metric, said, problem=problem)

    def _ref(
        self,
        metric: eval_set_pb2.EvalMetric,
        case: eval_set_pb2.EvalCase,
        question: llm_judge.Question,
        *,
        judged_run_id: str,
        trial: int,
    ) -> evaluation_ref_pb2.EvaluationRef:
        """Return what the run of a question is in the evaluation, or in a call that scores given records."""
        rubrics = metric.llm_judge.rubrics  # planned, so they have their ids
        return evaluation_ref_pb2.EvaluationRef(
            evaluation_id=self._evaluation_id,
            case_id=case.id if self._evaluation_id else "",
            trial=trial,
            turn=question.turn,
            role=evaluation_ref_pb2.EVALUATION_ROLE_JUDGE,
            metric=name_of(metric),
            rubric_id=rubrics[0].id if len(rubrics) == 1 else "",
            judged_run_id=judged_run_id,
        )

    async def _answer(
        self, question: llm_judge.Question, ref: evaluation_ref_pb2.EvaluationRef, used: Sums, *, anew: str
    ) -> llm_judge.JudgeAnswer:
        """Return the answer to a question; `anew` names the trial that is not to share it, empty for any."""
        async with self._free:
            request = _request(question)
            digest = self._digest(request, question, anew)
            # A run without an answer keeps its request id, so the same question is asked under the next number.
            for number in count():
                request.request_id = f"{OF_SERVER}judge/{digest}-{number}"
                name = hashlib.sha256(f"{self._principal.user_id}\0{request.request_id}".encode()).hexdigest()
                request.session_id = f"{OF_SERVER}{name[:32]}"
                answer = await self._ask(request, ref, used)
                if answer is not None:
                    return answer
        raise AssertionError("count() has no end")

    async def _ask(
        self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef, used: Sums
    ) -> llm_judge.JudgeAnswer | None:
        """Return what the run of this request says; None if it has no answer and was started elsewhere."""
        found = await self._dependencies.store.runs.find_request(self._principal, request.request_id)
        run = (found or await self._shield_start(request, ref)).run
        if found is not None and run.HasField("end_time") and run.state != _SUCCEEDED and not self._is_own(run):
            return None
        ended = await self._wait_for_end(run.run_id)
        if found is None or self._is_own(ended):
            self._count(ended, used)
        elif ended.state == execution_pb2.EXECUTION_STATE_CANCELLED:
            return None  # with the evaluation that had asked
        answer = await self._dependencies.runs.final_answer(ended)
        if answer is None:
            problem = ended.error.message or "its run has no answer."
            return llm_judge.JudgeAnswer(run_id=ended.run_id, text=await self._read_last_text(ended), problem=problem)
        return llm_judge.JudgeAnswer(run_id=ended.run_id, text=messages.text_of(answer))

    async def _read_last_text(self, run: run_pb2.Run) -> str:
        """Return what a judge without an answer said last; empty if it said nothing."""
        store = self._dependencies.store
        record = await read_invocation(self._dependencies.runs, store.log, self._principal, run.run_id)
        said = (messages.text_of(step.llm_response.message) for step in reversed(record.steps))
        return next(filter(None, said), "")

    async def _shield_start(
        self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef
    ) -> RunRow:
        # Shielded: whatever stops the caller meanwhile must not leave a run of an evaluation that is cancelled.
        starting = asyncio.create_task(self._start(request, ref))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(starting)

    async def _start(self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef) -> RunRow:
        if self._is_cancelled():
            raise RunError("The evaluation was cancelled.", reason=error_pb2.ERROR_REASON_CANCELLED)
        record = await self._dependencies.runs.start(
            self._principal,
            messages.copy_of(request),
            deadline_time_ns=None,
            trace=self._trace,
            evaluation=EvaluationRun(ref=ref),
        )
        if self._is_cancelled():  # while the run was created, unseen by what cancels the runs of the evaluation
            await self._dependencies.runs.cancel(self._principal, record.run.run_id)
        return record

    async def _wait_for_end(self, run_id: str) -> run_pb2.Run:
        """Wait until a run has ended and return it."""
        pages = self._dependencies.runs.follow(self._principal, run_id, until=follow_pb2.WATCH_UNTIL_TERMINAL)
        async with aclosing(pages):
            async for _ in pages:
                pass
        return (await self._dependencies.runs.get(self._principal, run_id)).run

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
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, invocations: Sequence[invocation_pb2.Invocation]
) -> list[llm_judge.Question]:
    return [
        question
        for judged in llm_judge.turns_of(case.turns, invocations)
        for question in llm_judge.questions(metric.llm_judge, judged)
    ]


def _request(question: llm_judge.Question) -> agent_service_pb2.RunRequest:
    """Return the request of a judgment; without its request id and its session, which only it has."""
    request = agent_service_pb2.RunRequest(
        agent=llm_judge.AGENT,
        definitions=[question.definition],
        input=messages.user(question.prompt),
        policy=policy_pb2.RunPolicy(background=True, on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE),
        on_missing_session=agent_service_pb2.MISSING_SESSION_POLICY_CREATE,
    )
    request.policy.limits.wall_duration.FromSeconds(TIMEOUT_SECONDS)
    return request
