"""Check a request for an evaluation, and build the first events of its log."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_pb2, eval_result_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2
from bough_server.agents.definition import drop_unknown_fields
from bough_server.distribution import version
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.evals.job.baseline_agents import explain_missing_pins, pin_agents
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.metrics.llm_judge import models_of
from bough_server.evals.results.compare import baseline_of
from bough_server.evals.results.gates import explain_unmissable, explain_unreachable, parse_gate
from bough_server.evals.sets.eval_set import is_recorded, plan_cases, set_digest
from bough_server.evals.sets.matrix import fill_cells, list_cells, plan_cells
from bough_server.evals.sets.unknown_names import find_root_mocks, list_called_agents, unknown_names
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

_MATRIX_BASELINE: Final = "The evaluation has a matrix, and what a cell ran with before is not stored."

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
    if request.HasField("matrix"):
        request.eval_set.matrix.CopyFrom(request.matrix)
    trials = request.trials if request.HasField("trials") else None
    # In a thread: a set of 8 MiB takes seconds to check.
    wrong = await run_in_thread(
        request_problems,
        request.eval_set,
        agent=request.agent,
        known=dependencies.collect_known_names(principal.tenant_id),
        trials=trials,
    )
    violations = [FieldViolation(field=_in_request(path, request), description=text) for path, text in wrong]
    violations += [*_large_definitions(request), *_meaningless_bounds(request)]
    violations += _meaningless_reruns(request, has_baseline=baseline is not None)
    if violations:
        raise InvalidRequest(violations)
    cells = list_cells(request.eval_set.matrix)
    planned_cases = await run_in_thread(plan_cases, request.eval_set, trials=trials)
    cases = await run_in_thread(plan_cells, planned_cases, cells)
    if baseline is not None and (unusable := list(_unusable_baseline(baseline, cases))):
        raise InvalidRequest(unusable)
    fresh = request.rerun_suspects
    cannot_rerun = _MATRIX_BASELINE if cells else ""
    if baseline is not None and not cells:
        cannot_rerun = await explain_missing_pins(dependencies, principal, baseline.pins)
    _refuse_gates(request, cases, baseline=baseline, has_baseline_reruns=not cannot_rerun)
    pins = eval_result_pb2.EvalPins(
        eval_set_digest=set_digest(request.eval_set), server_version=version(), code_digest=dependencies.code_digest
    )
    if agent:
        resolver, versions = await dependencies.agents.for_run(principal.tenant_id, agent, request.definitions)
        await run_in_thread(_refuse_wrong_names, request.eval_set, agent, resolver)
        pin_agents(pins, agent, resolver, versions)
        if why := fill_cells(cells, request.eval_set.matrix, agent, resolver):
            raise InvalidRequest([FieldViolation(field=_in_request("matrix.agent", request), description=why)])
        await _pin_cells(dependencies, principal, request, agent, cells=cells, pins=pins)
    for planned in cases:
        for metric in planned.eval_case.metrics:
            if metric.HasField("llm_judge"):
                for model in models_of(metric.llm_judge):
                    pins.judges[model] = dependencies.models.get(model, "")
        if planned.eval_case.HasField("user"):
            model = planned.eval_case.user.model
            pins.users[model] = dependencies.models.get(model, "")
    started = _build_first_event(request, principal, agent=agent, cases=cases, pins=pins, digest=digest)
    started.cells.extend(cells)
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
    holder = request if request.HasField("retry_crashed") else request.eval_set.defaults
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
        retry_crashed=holder.retry_crashed,
    )
    started.eval_set.CopyFrom(request.eval_set)
    # Each case is an event: a set may be larger than an event.
    del started.eval_set.cases[:]
    if request.HasField("budget"):
        started.budget.CopyFrom(request.budget)
    return started


def definitions_of_cell(
    definitions: Iterable[agent_pb2.AgentDefinition], cell: evaluation_pb2.EvalCell
) -> list[agent_pb2.AgentDefinition]:
    """Return what the runs of a cell look up before the catalog: the request's definitions, one of them changed."""
    return [cell.definition, *(one for one in definitions if one.name != cell.definition.name)]


async def _pin_cells(
    dependencies: EvaluationDependencies,
    principal: Principal,
    request: eval_service_pb2.EvaluateRequest,
    agent: str,
    *,
    cells: Sequence[evaluation_pb2.EvalCell],
    pins: eval_result_pb2.EvalPins,
) -> None:
    """Check that each cell can run, and pin the models of all. Raises InvalidRequest."""
    definitions = [*request.definitions, *(cell.definition for cell in cells)]
    size = request.eval_set.matrix.ByteSize() + sum(one.ByteSize() for one in definitions)
    if cells and size > MAX_DEFINITIONS_BYTES:
        description = (
            f"is {size:,} bytes with the definitions of its cells and of the request, and may be "
            f"{MAX_DEFINITIONS_BYTES:,}"
        )
        raise InvalidRequest([FieldViolation(field=_in_request("matrix", request), description=description)])
    for cell in cells:
        definitions = definitions_of_cell(request.definitions, cell)
        try:
            _, versions = await dependencies.agents.for_run(principal.tenant_id, agent, definitions)
        except InvalidRequest as error:
            wrong = error.violations[0]
            description = f"The cell {cell.name!r} cannot run: {wrong.field}: {wrong.description}"
            raise InvalidRequest(
                [FieldViolation(field=_in_request("matrix", request), description=description)]
            ) from None
        pins.models.update(versions.models)


def _refuse_wrong_names(eval_set: eval_set_pb2.EvalSet, agent: str, resolver: Resolver) -> None:
    called = list_called_agents(each.definition for each in resolver.agents.values())
    found = (
        *unknown_names(eval_set, agents=resolver.agents, tools=resolver.tools),
        *find_root_mocks(eval_set, agent=agent, called=called),
    )
    wrong = [FieldViolation(field=_in_set(path), description=text) for path, text in found]
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
    baseline: eval_result_pb2.EvalResult, cases: Sequence[evaluation_pb2.CasePlanned]
) -> Iterator[FieldViolation]:
    """Refuse what nothing would be worse than: a baseline without cases, and one of another set."""
    if not baseline.cases:
        yield FieldViolation(field="baseline.result.cases", description="must have at least one case")
    elif {case.case_id for case in baseline.cases}.isdisjoint(one.eval_case.id for one in cases):
        description = f"is a result of the set {baseline.eval_set_name!r}, which has no case of this set"
        if any(one.cell for one in cases):
            description += " in a cell of this matrix"
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


def _in_request(path: str, request: eval_service_pb2.EvaluateRequest) -> str:
    """Return the path of a field of the set, whose matrix may be that of the request."""
    is_of_request = request.HasField("matrix") and (path == "matrix" or path.startswith(("matrix.", "matrix[")))
    return path if is_of_request else _in_set(path)


def _in_set(path: str) -> str:
    return f"eval_set.{path}" if path else "eval_set"
