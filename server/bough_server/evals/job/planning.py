"""Check a request for an evaluation, and build the first events of its log."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import eval_result_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2
from bough_server.agents.definition import drop_unknown_fields
from bough_server.distribution import version
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.evals.job.baseline_agents import explain_missing_pins, pin_agents
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.results.compare import baseline_of
from bough_server.evals.results.gates import explain_unmissable, explain_unreachable, parse_gate
from bough_server.evals.sets.eval_set import is_recorded, plan_cases, set_digest
from bough_server.evals.sets.unknown_names import unknown_names
from bough_server.evals.sets.validation import request_problems
from bough_server.identity import Principal
from bough_server.messages import copy_of
from bough_server.runtime.agent import Resolver
from bough_server.threads import run_in_thread

DEFAULT_CONCURRENCY: Final = 4

MAX_BASELINE_BYTES: Final = 2 * 1024 * 1024
"""The most bytes of a baseline without its trees, which becomes part of an event."""

BUDGET_FIELDS: Final = ("model_calls", "tool_calls", "tokens", "cost_nanos", "wall_duration")
"""The bounds of Limits that an evaluation as a whole can have."""

MAX_DEFINITIONS_BYTES: Final = 1024 * 1024
"""The most bytes of a request's definitions, which become part of the same event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The first events of an evaluation: `started`, then one for each case."""

    started: evaluation_pb2.EvaluationPlanned
    cases: Sequence[evaluation_pb2.CasePlanned]

    def events(self) -> list[evaluation_pb2.EvaluationEvent]:
        """Return the events, in order, without their sequences and times."""
        first = evaluation_pb2.EvaluationEvent(evaluation_planned=self.started)
        return [first, *(evaluation_pb2.EvaluationEvent(case_planned=one) for one in self.cases)]


def request_digest(request: eval_service_pb2.EvaluateRequest) -> str:
    """Return a SHA-256 hex digest of a request's content, without the field that only concerns following it."""
    content = copy_of(request)
    content.ClearField("follow")
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()


async def plan(
    dependencies: EvaluationDependencies,
    principal: Principal,
    request: eval_service_pb2.EvaluateRequest,
    *,
    baseline: eval_result_pb2.EvalResult | None,
    digest: str,
) -> EvaluationPlan:
    """Check a request as a whole and plan its evaluation.

    Raises InvalidRequest with every problem, NotFound and AgentUnusable.
    """
    agent = request.agent or request.eval_set.agent
    trials = request.trials if request.HasField("trials") else None
    # In a thread: a set of 8 MiB takes seconds to check.
    wrong = await run_in_thread(
        request_problems, request.eval_set, agent=request.agent, known=dependencies.collect_known_names(), trials=trials
    )
    violations = [FieldViolation(field=_in_set(path), description=text) for path, text in wrong]
    violations += [*_large_definitions(request), *_meaningless_bounds(request)]
    violations += _meaningless_reruns(request, has_baseline=baseline is not None)
    if baseline is not None:
        violations += _unusable_baseline(baseline, request.eval_set)
    if violations:
        raise InvalidRequest(violations)
    cases = await run_in_thread(plan_cases, request.eval_set, trials=trials)
    fresh = request.rerun_suspects
    cannot_rerun = ""
    if baseline is not None:
        cannot_rerun = await explain_missing_pins(dependencies, principal, baseline.pins)
    _refuse_gates(request, cases, baseline=baseline, has_baseline_reruns=not cannot_rerun)
    pins = eval_result_pb2.EvalPins(
        eval_set_digest=set_digest(request.eval_set), server_version=version(), code_digest=dependencies.code_digest
    )
    if agent:
        resolver, versions = await dependencies.agents.for_run(principal.tenant_id, agent, request.definitions)
        await run_in_thread(_refuse_unknown_names, request.eval_set, resolver)
        pin_agents(pins, agent, resolver, versions)
    for planned in cases:
        for metric in planned.eval_case.metrics:
            if metric.HasField("llm_judge"):
                model = metric.llm_judge.model
                pins.judges[model] = dependencies.models.get(model, "")
        if planned.eval_case.HasField("user"):
            model = planned.eval_case.user.model
            pins.users[model] = dependencies.models.get(model, "")
    started = _build_first_event(request, principal, agent=agent, cases=cases, pins=pins, digest=digest)
    if baseline is not None:
        started.baseline.CopyFrom(_reduce_baseline(baseline))
        started.rerun_suspects, started.baseline_not_rerun_reason = fresh, cannot_rerun if fresh else ""
    return EvaluationPlan(started=started, cases=cases)


def _build_first_event(
    request: eval_service_pb2.EvaluateRequest,
    principal: Principal,
    *,
    agent: str,
    cases: Sequence[evaluation_pb2.CasePlanned],
    pins: eval_result_pb2.EvalPins,
    digest: str,
) -> evaluation_pb2.EvaluationPlanned:
    started = evaluation_pb2.EvaluationPlanned(
        agent=agent,
        case_count=len(cases),
        trial_count=sum(one.trials for one in cases),
        max_concurrency=request.max_concurrency if request.HasField("max_concurrency") else DEFAULT_CONCURRENCY,
        gates=request.gates,
        definitions=[drop_unknown_fields(one) for one in request.definitions],
        pins=pins,
        allow_removed=request.allow_removed,
        labels=dict(request.labels),
        request_id=request.request_id,
        request_digest=digest if request.request_id else "",
        user_id=principal.user_id,
    )
    started.eval_set.CopyFrom(request.eval_set)
    # Each case is an event: a set may be larger than an event.
    del started.eval_set.cases[:]
    if request.HasField("budget"):
        started.budget.CopyFrom(request.budget)
    return started


def _refuse_unknown_names(eval_set: eval_set_pb2.EvalSet, resolver: Resolver) -> None:
    wrong = [
        FieldViolation(field=_in_set(path), description=text)
        for path, text in unknown_names(eval_set, agents=resolver.agents, tools=resolver.tools)
    ]
    if wrong:
        raise InvalidRequest(wrong)


def _refuse_gates(
    request: eval_service_pb2.EvaluateRequest,
    cases: Sequence[evaluation_pb2.CasePlanned],
    *,
    baseline: eval_result_pb2.EvalResult | None,
    has_baseline_reruns: bool,
) -> None:
    """Raise InvalidRequest for gates that cannot be read, that no result could reach, or that none could miss."""
    wrong: list[FieldViolation] = []
    for index, text in enumerate(request.gates):
        field = f"gates[{index}]"
        try:
            gate = parse_gate(text)
        except ValueError as error:
            wrong.append(FieldViolation(field=field, description=str(error)))
            continue
        if gate.needs_baseline and baseline is None:
            wrong.append(FieldViolation(field=field, description="needs a baseline"))
        elif (why := explain_unreachable(gate, cases)) or (
            baseline is not None
            and (
                why := explain_unmissable(
                    gate, cases, baseline, reruns=request.rerun_suspects, has_baseline_reruns=has_baseline_reruns
                )
            )
        ):
            wrong.append(FieldViolation(field=field, description=why))
    if wrong:
        raise InvalidRequest(wrong)


def _unusable_baseline(
    baseline: eval_result_pb2.EvalResult, eval_set: eval_set_pb2.EvalSet
) -> Iterator[FieldViolation]:
    """Refuse what nothing would be worse than: a baseline without cases, and one of another set."""
    if not baseline.cases:
        yield FieldViolation(field="baseline.result.cases", description="must have at least one case")
    elif {case.case_id for case in baseline.cases}.isdisjoint(case.id for case in eval_set.cases):
        description = f"is a result of the set {baseline.eval_set_name!r}, which has no case of this set"
        yield FieldViolation(field="baseline", description=description)


def _reduce_baseline(baseline: eval_result_pb2.EvalResult) -> eval_result_pb2.EvalResult:
    kept = baseline_of(baseline)
    if kept.ByteSize() > MAX_BASELINE_BYTES:
        description = f"is {kept.ByteSize():,} bytes without its trees and may be {MAX_BASELINE_BYTES:,}"
        raise InvalidRequest([FieldViolation(field="baseline", description=description)])
    return kept


def _large_definitions(request: eval_service_pb2.EvaluateRequest) -> Iterator[FieldViolation]:
    size = sum(one.ByteSize() for one in request.definitions)
    if size > MAX_DEFINITIONS_BYTES:
        description = f"are {size:,} bytes and may be {MAX_DEFINITIONS_BYTES:,}"
        yield FieldViolation(field="definitions", description=description)


def _meaningless_bounds(request: eval_service_pb2.EvaluateRequest) -> Iterator[FieldViolation]:
    for bound, _ in request.budget.ListFields():
        if bound.name not in BUDGET_FIELDS:
            names = ", ".join(BUDGET_FIELDS)
            description = f"has no meaning for all runs together; a budget may have {names}"
            yield FieldViolation(field=f"budget.{bound.name}", description=description)


def _meaningless_reruns(request: eval_service_pb2.EvaluateRequest, *, has_baseline: bool) -> Iterator[FieldViolation]:
    if not request.rerun_suspects:
        return
    if not has_baseline:
        yield FieldViolation(field="rerun_suspects", description="needs a baseline to compare the fresh trials with")
    if all(map(is_recorded, request.eval_set.cases)):
        yield FieldViolation(field="rerun_suspects", description="has no meaning: every case of the set is recorded")


def _in_set(path: str) -> str:
    return f"eval_set.{path}" if path else "eval_set"
