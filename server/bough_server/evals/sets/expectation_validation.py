"""Validation of what cases expect and of how they are judged: answers, tool calls, agents and metrics."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import eval_set_pb2, execution_pb2
from bough_server.documents.yaml import suggestion
from bough_server.evals.metrics import text_metrics
from bough_server.evals.metrics.judge_prompts import template_mistake
from bough_server.evals.metrics.rubrics import bounds_of, rubric_id
from bough_server.evals.metrics.turn import list_expectations
from bough_server.evals.sets.eval_set import metric_name
from bough_server.log.session_state import is_path
from bough_server.matching.values import check_answer, check_matcher, regex_problem

FieldProblem: TypeAlias = tuple[str, str]
"""A field's path and the problem with it."""


_END_STATES: Final = (
    execution_pb2.EXECUTION_STATE_UNSPECIFIED,
    execution_pb2.EXECUTION_STATE_SUCCEEDED,
    execution_pb2.EXECUTION_STATE_FAILED,
    execution_pb2.EXECUTION_STATE_CANCELLED,
)

MAX_DEPTH: Final = 64
"""The most levels of an expected tree. Parsers of protobuf read a hundred levels, and a log and a result wrap a case in
more of them than a request does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNames:
    """The names that a set may refer to; None for names that are unknown, which are not checked."""

    agents: frozenset[str] | None = None
    called_agents: frozenset[str] | None = None
    """The agents that some agent links to."""
    models: frozenset[str] | None = None
    tools: frozenset[str] | None = None
    """The tools that the operator registered."""
    metrics: Mapping[str, bool] | None = None
    """The functions that the operator registered with @metric, and whether each takes a configuration."""


def expectation_problems(expect: eval_set_pb2.EvalExpectation, place: str) -> Iterator[FieldProblem]:
    """Yield every problem of an expectation, which is at `place`."""
    if problem := check_answer(expect.answer):
        yield f"{place}.answer", problem
    yield from tools_problems(expect.tools, f"{place}.tools")
    for index, agent in enumerate(expect.agents):
        yield from _agent_problems(agent, f"{place}.agents[{index}]")
    yield from _run_problems(expect.run, f"{place}.run")


def _run_problems(run: eval_set_pb2.ExpectedRun, place: str) -> Iterator[FieldProblem]:
    yield from _state_problems(run.state, f"{place}.state")
    if run.reason and run.state != execution_pb2.EXECUTION_STATE_FAILED:
        yield f"{place}.reason", "is that of a run that failed: set state to FAILED."
    for index, value in enumerate(run.session_state):
        inner = f"{place}.session_state[{index}]"
        if not is_path(value.path):
            yield f"{inner}.path", "must be a key, then names of members and numbers of items, each after a dot."
        if value.absent and value.HasField("value_match"):
            yield f"{inner}.value_match", "excludes absent: set one of the two."
        if problem := check_matcher(value.value_match):
            yield f"{inner}.value_match", problem


def _state_problems(state: execution_pb2.ExecutionState.ValueType, place: str) -> Iterator[FieldProblem]:
    if state not in _END_STATES:
        yield place, "must be SUCCEEDED, FAILED or CANCELLED: in no other state anything ends."


def _agent_problems(agent: eval_set_pb2.ExpectedAgent, place: str, depth: int = 1) -> Iterator[FieldProblem]:
    least = agent.repeat.min if agent.repeat.HasField("min") else 1
    if agent.repeat.HasField("max") and least > agent.repeat.max:
        yield f"{place}.repeat.max", f"must not be less than min, which is {least}."
    yield from tools_problems(agent.tools, f"{place}.tools")
    yield from _state_problems(agent.state, f"{place}.state")
    if problem := check_matcher(agent.input_match):
        yield f"{place}.input_match", problem
    if agent.children and depth == MAX_DEPTH:
        yield f"{place}.children", f"must not be set: an expected tree has at most {MAX_DEPTH} levels."
        return
    for index, child in enumerate(agent.children):
        yield from _agent_problems(child, f"{place}.children[{index}]", depth + 1)


def tools_problems(tools: Sequence[eval_set_pb2.ExpectedTool], place: str) -> Iterator[FieldProblem]:
    """Yield every problem of expected tool calls, which are at `place`."""
    for index, tool in enumerate(tools):
        yield from _tool_problems(tool, f"{place}[{index}]")


def _tool_problems(tool: eval_set_pb2.ExpectedTool, place: str) -> Iterator[FieldProblem]:
    if not (tool.name or tool.name_regex):
        yield f"{place}.name", "is required: the tool's name, `*` for any, or `name_regex`."
    if tool.name and tool.name_regex:
        yield f"{place}.name_regex", "excludes name: set one of the two."
    yield from _state_problems(tool.state, f"{place}.state")
    if problem := regex_problem(tool.name_regex):
        yield f"{place}.name_regex", problem
    for name, text, matcher, is_matched in (
        ("arguments", tool.arguments_json, tool.arguments_match, tool.HasField("arguments_match")),
        ("result", tool.result_json, tool.result_match, tool.HasField("result_match")),
    ):
        if text and is_matched:
            yield f"{place}.{name}_match", f"excludes {name}: set one of the two."
        if problem := json_problem(text):
            yield f"{place}.{name}_json", problem
        if problem := check_matcher(matcher):
            yield f"{place}.{name}_match", problem


def json_problem(text: str, *, is_object: bool = False) -> str:
    """Return why a text is not JSON; empty if it is, or if the text is empty."""
    try:
        value = json.loads(text, parse_constant=_refuse) if text else {}
    except (ValueError, RecursionError) as error:
        return f"must be JSON text: {error}."
    return "must be one JSON object." if is_object and not isinstance(value, dict) else ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def metrics_problems(
    metrics: Sequence[eval_set_pb2.EvalMetric], place: str, known: KnownNames
) -> Iterator[FieldProblem]:
    """Yield every problem of the metrics at `place`, except missing expectations."""
    seen: set[str] = set()
    for index, metric in enumerate(metrics):
        inner, name = f"{place}[{index}]", metric_name(metric)
        if not name:
            yield inner, "needs a kind, such as `tool_trajectory: {}`."
        elif name in seen:
            field = f"{inner}.name" if metric.name else inner
            yield field, f"There are two metrics {name!r}: give each its own `name`."
        seen.add(name)
        yield from _kind_problems(metric, inner, known)


def _kind_problems(metric: eval_set_pb2.EvalMetric, place: str, known: KnownNames) -> Iterator[FieldProblem]:
    if not (metric.HasField("custom") or 0 <= metric.threshold <= 1):
        yield f"{place}.threshold", "must be from 0 to 1, as the scores of this metric are."
    match metric.WhichOneof("kind"):
        case "tool_trajectory":
            yield from tools_problems(metric.tool_trajectory.tools, f"{place}.tool_trajectory.tools")
        case "final_response":
            if problem := check_answer(metric.final_response.answer):
                yield f"{place}.final_response.answer", problem
        case "rouge_1" | "similarity" as kind if reference := text_metrics.find_reference(metric):
            if problem := text_metrics.reference_mistake(kind, reference):
                yield f"{place}.{kind}.reference", problem
        case "budget":
            yield from _budget_problems(metric.budget, f"{place}.budget")
        case "llm_judge":
            yield from _judge_problems(metric.llm_judge, f"{place}.llm_judge", known)
        case "custom":
            if "." not in metric.custom.name:  # else one of another project's, which an import has kept
                yield from unknown_name("metric", metric.custom.name, known.metrics, f"{place}.custom.name")
            if problem := json_problem(metric.custom.config_json, is_object=True):
                yield f"{place}.custom.config_json", problem
            elif metric.custom.config_json and known.metrics and not known.metrics.get(metric.custom.name, True):
                problem = f"must not be set: the function {metric.custom.name!r} takes no configuration."
                yield f"{place}.custom.config_json", f"{problem} Remove it, or give the function a third parameter."


def _budget_problems(budget: eval_set_pb2.BudgetMetric, place: str) -> Iterator[FieldProblem]:
    if budget.limits.HasField("concurrency"):
        yield f"{place}.limits.concurrency", "has no meaning here: a budget bounds the total that a run used."
    if not budget.limits.ListFields() and not budget.HasField("errors"):
        yield place, "bounds nothing: set `limits` or `errors`."


def _judge_problems(judge: eval_set_pb2.LlmJudgeMetric, place: str, known: KnownNames) -> Iterator[FieldProblem]:
    if not (judge.model or judge.models):
        yield f"{place}.model", "is required: the configured name of the model that judges, or `models`."
    elif judge.model and judge.models:
        yield f"{place}.models", "excludes model: set one of the two."
    yield from unknown_name("model", judge.model, known.models, f"{place}.model")
    for index, model in enumerate(judge.models):
        yield from unknown_name("model", model, known.models, f"{place}.models[{index}]")
    first: dict[str, int] = {}
    for index, rubric in enumerate(judge.rubrics):
        inner, name = f"{place}.rubrics[{index}]", rubric_id(rubric)
        yield from _rubric_problems(rubric, inner)
        if name in first:
            yield f"{inner}.id", f"{name!r} is also the id of {place}.rubrics[{first[name]}]."
        elif name:
            first[name] = index
    if judge.template and (problem := template_mistake(judge)):
        yield f"{place}.template", problem
    if problem := json_problem(judge.settings.extra_json, is_object=True):
        yield f"{place}.settings.extra_json", problem


def _rubric_problems(rubric: eval_set_pb2.JudgeRubric, place: str) -> Iterator[FieldProblem]:
    if rubric.text and rubric.ready:
        yield f"{place}.ready", "excludes text: set one of the two."
    elif not (rubric.text or rubric.ready):
        yield f"{place}.text", "is required: what has to be true of the answer, or `ready`."
    elif not rubric_id(rubric):
        yield f"{place}.id", "is required: the name of the rubric."
    least, most = bounds_of(rubric.scale)
    if least >= most:
        yield f"{place}.scale.max", f"must be more than min, which is {least}."


def unknown_name(kind: str, name: str, known: Iterable[str] | None, place: str) -> Iterator[FieldProblem]:
    """Yield the problem of a name that is set and not known; none if `known` is None."""
    if name and known is not None and name not in known:
        yield place, f"There is no {kind} {name!r}.{suggestion(name, known)}"


def reference_problems(
    case: eval_set_pb2.EvalCase, metrics: Iterable[eval_set_pb2.EvalMetric], place: str
) -> Iterator[FieldProblem]:
    """Yield every problem of expected answers, in the case at `place`, as references of its metrics."""
    merged = list(metrics)
    kinds = sorted(metric.WhichOneof("kind") or "" for metric in merged if text_metrics.has_expected_reference(metric))
    is_compared_exactly = any(metric.HasField("final_response") for metric in merged)
    for index, turn in enumerate(case.turns) if kinds else ():
        inner, answer = f"{place}.turns[{index}].expect.answer", turn.expect.answer
        if answer.HasField("exact"):
            mistakes = (text_metrics.reference_mistake(kind, answer.exact) for kind in kinds)
            yield from [(f"{inner}.exact", mistake) for mistake in filter(None, mistakes)][:1]
        others = [field.name for field, _ in answer.ListFields() if field.name != "exact"]
        if others and not is_compared_exactly:
            metric = f"`{kinds[0]}`, which compares `exact` alone"
            yield f"{inner}.{others[0]}", f"is scored by no metric: the case has {metric}. Set its `reference` instead."


def find_missing_expectation(metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase) -> str:
    """Return what a case would have to expect for the metric to score it; empty if it has that.

    A tool_trajectory judges that there are no calls in a turn that expects something, but none; other kinds need no
    expectation.
    """
    match metric.WhichOneof("kind"):
        case "tool_trajectory" if not (metric.tool_trajectory.tools or _expects_something(case)):
            return "tools, and a turn without `expect` is not scored"
        case "agent_trajectory" if not any(expect.agents for expect in list_expectations(case)):
            return "agents"
        case "run_outcome" if not any(expect.HasField("run") for expect in list_expectations(case)):
            return "run"
        case "final_response" if not metric.final_response.HasField("answer"):
            return "" if any(expect.HasField("answer") for expect in list_expectations(case)) else "answer"
        case "rouge_1" | "similarity" if not text_metrics.find_reference(metric):
            has_exact = any(expect.answer.HasField("exact") for expect in list_expectations(case))
            return "" if has_exact else "answer.exact"
    return ""


def _expects_something(case: eval_set_pb2.EvalCase) -> bool:
    return case.user.HasField("expect") or any(turn.HasField("expect") for turn in case.turns)
