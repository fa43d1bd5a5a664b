"""Run the judges of llm_judge metrics: ordinary runs, each question asked once however often it comes up."""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from bough.v1 import (
    agent_service_pb2,
    eval_result_pb2,
    eval_set_pb2,
    execution_pb2,
    follow_pb2,
    invocation_pb2,
    policy_pb2,
)
from bough_server import messages
from bough_server.errors import CallError, RunError, ServerStopping, StorageFailed
from bough_server.evals.dependencies import EvaluationDependencies
from bough_server.evals.folding import WHOLE, TreeBuilder
from bough_server.evals.metrics import llm_judge
from bough_server.runs.admission import CaseRun
from bough_server.store.ports import Principal
from bough_server.telemetry import Parent
from bough_server.tree.fold import Tree
from bough_server.usage import Sums

_WITHOUT_ANSWER: Final = (execution_pb2.EXECUTION_STATE_FAILED, execution_pb2.EXECUTION_STATE_CANCELLED)


class Judges:
    """Asks the judges of one run of a case, and sums what they used.

    A question that was answered before, in this evaluation or another, is not asked again: its run is found by its
    request id. Such a run is not charged again either.
    """

    def __init__(
        self, dependencies: EvaluationDependencies, principal: Principal, *, evaluation_id: str, case_id: str
    ) -> None:
        self._dependencies, self._principal = dependencies, principal
        self._case = CaseRun(evaluation_id=evaluation_id, case_id=case_id, mocks=None)
        self.used = Sums()

    async def score(
        self,
        metric: eval_set_pb2.Metric,
        case: eval_set_pb2.EvalCase,
        invocations: Sequence[invocation_pb2.Invocation],
    ) -> eval_result_pb2.MetricScore:
        """Return a metric's score. Raises ServerStopping and StorageFailed."""
        said: list[eval_result_pb2.Judgement] = []
        try:
            for number, (turn, invocation) in enumerate(zip(case.turns, invocations, strict=False)):
                for question in llm_judge.questions(metric.llm_judge, turn, invocation, number):
                    answer = await self._ask(question)
                    said += llm_judge.judgements(metric.llm_judge, question, answer)
        except (ServerStopping, StorageFailed):
            raise
        except (CallError, RunError) as error:
            return llm_judge.score(metric, said, problem=f"The judge was not asked: {error.message}")
        return llm_judge.score(metric, said)

    async def _name(self, digest: str) -> str:
        """Return the request id of a question; one that has failed so far is asked again, under another."""
        number = 0
        while True:
            name = f"judge-{digest}-{number}"
            record = await self._dependencies.store.runs.find_request(self._principal, name)
            if record is None or record.run.state not in _WITHOUT_ANSWER:
                return name
            number += 1

    async def _ask(self, question: llm_judge.Question) -> invocation_pb2.Invocation:
        runs = self._dependencies.runs
        name = await self._name(question.digest)
        record = await runs.start(
            self._principal,
            agent_service_pb2.RunRequest(
                request_id=name,
                agent=llm_judge.AGENT,
                definitions=[question.definition],
                session_id=hashlib.sha256(name.encode()).hexdigest()[:32],
                input=messages.user(question.prompt),
                policy=policy_pb2.RunPolicy(background=True, on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE),
                on_missing_session=agent_service_pb2.MISSING_SESSION_POLICY_CREATE,
            ),
            deadline_time_ns=None,
            trace=Parent.of_call(()),
            case=self._case,
        )
        run_id = record.run.run_id
        builder = TreeBuilder(Tree(WHOLE, run_id=run_id, session_id=record.run.session_id))
        pages = runs.follow(self._principal, run_id, until=follow_pb2.WATCH_UNTIL_TERMINAL)
        async with aclosing(pages):
            async for page in pages:
                await builder.add_stored(page)
        invocation = await builder.invocation()
        run = (await runs.get(self._principal, run_id)).run
        if run.evaluation_id == self._case.evaluation_id and run.case_id == self._case.case_id:
            self.used.add(Sums.of(invocation.tree_usage))
        return invocation
