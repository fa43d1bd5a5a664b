"""Evaluations and their events to put into a store; nothing here knows an implementation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, evaluation_pb2, usage_pb2
from bough_server.identity import Principal
from bough_server.log import evaluation_events
from bough_server.log.evaluation_events import EvaluationEvent
from bough_server.store.ports.log import EvaluationLogEvent, NewEvaluation
from tests.store.logs import ANNE, SECOND, START_NS

PASSED, FAILED = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
CANCELLED = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_CANCELLED, message="Cancelled.")


def fact(event: EvaluationEvent, sequence: int) -> EvaluationLogEvent:
    """An event at its place in a log, a second after the one before."""
    event.sequence = sequence
    event.record_time.FromNanoseconds(START_NS + sequence * SECOND)
    data = event.SerializeToString(deterministic=True)
    return EvaluationLogEvent(sequence=sequence, kind=evaluation_events.kind_of(event), data=data, event=event)


def facts(batch: Sequence[EvaluationEvent], *, after: int) -> list[EvaluationLogEvent]:
    """Events at consecutive places."""
    return [fact(event, sequence) for sequence, event in enumerate(batch, after + 1)]


def began(case_id: str = "one") -> EvaluationEvent:
    """The start of a run of a case."""
    return EvaluationEvent(case_trial_started=evaluation_pb2.CaseTrialStarted(case_id=case_id))


def scored(
    status: eval_result_pb2.Verdict.ValueType = PASSED,
    *,
    usage: usage_pb2.Usage | None = None,
    judge_usage: usage_pb2.Usage | None = None,
    user_usage: usage_pb2.Usage | None = None,
) -> EvaluationEvent:
    """The verdict on a run of a case."""
    result = eval_result_pb2.CaseTrialResult(
        case_id="one", verdict=status, usage=usage, judge_usage=judge_usage, user_usage=user_usage
    )
    return EvaluationEvent(case_trial_scored=evaluation_pb2.CaseTrialScored(result=result))


def totaled(totals: eval_result_pb2.EvalTotals) -> EvaluationEvent:
    """The numbers over all cases."""
    return EvaluationEvent(evaluation_totaled=evaluation_pb2.EvaluationTotaled(verdict=PASSED, totals=totals))


def passed() -> EvaluationEvent:
    """The end of an evaluation that went well."""
    return EvaluationEvent(evaluation_completed=evaluation_pb2.EvaluationCompleted(verdict=PASSED))


def cancelled(totals: eval_result_pb2.EvalTotals | None = None) -> EvaluationEvent:
    """The end of an evaluation that was cancelled."""
    ended = evaluation_pb2.EvaluationCancelled(error=CANCELLED, totals=totals)
    return EvaluationEvent(evaluation_cancelled=ended)


@dataclass(kw_only=True)
class MadeEvaluation:
    """An evaluation of which a test appends the rest."""

    number: int = 1
    principal: Principal = ANNE
    request_id: str = ""
    request_digest: str = ""
    eval_set_name: str = "desk"
    agent: str = "lead"
    labels: dict[str, str] = field(default_factory=dict)
    cases: Sequence[str] = ("one", "two")
    owner: str = ""
    last_sequence: int = 0

    def __post_init__(self) -> None:
        self.last_sequence = len(self.cases) + 1

    @property
    def evaluation_id(self) -> str:
        """The evaluation's id; a later number is a later id."""
        return f"01890000-0000-7000-a000-{self.number:012d}"

    def first(self) -> list[EvaluationLogEvent]:
        """What the evaluation is created with."""
        planned = evaluation_pb2.EvaluationPlanned(
            eval_set=eval_set_pb2.EvalSet(name=self.eval_set_name),
            agent=self.agent,
            case_count=len(self.cases),
            trial_count=2 * len(self.cases),
            labels=self.labels,
            request_id=self.request_id,
            request_digest=self.request_digest,
        )
        cases = [evaluation_pb2.CasePlanned(eval_case=eval_set_pb2.EvalCase(id=name), trials=2) for name in self.cases]
        batch = [EvaluationEvent(evaluation_planned=planned), *(EvaluationEvent(case_planned=case) for case in cases)]
        return facts(batch, after=0)

    def new(self) -> NewEvaluation:
        """The evaluation as a log is asked to create it."""
        return NewEvaluation(
            evaluation_id=self.evaluation_id,
            principal=self.principal,
            eval_set_name=self.eval_set_name,
            agent=self.agent,
            labels=self.labels,
            request_id=self.request_id,
            request_digest=self.request_digest,
            create_time_ns=START_NS + self.number * 60 * SECOND,
            log_events=self.first(),
            owner=self.owner,
        )

    def next(self, *batch: EvaluationEvent) -> list[EvaluationLogEvent]:
        """The next facts of the evaluation."""
        made = facts(batch, after=self.last_sequence)
        self.last_sequence += len(made)
        return made
