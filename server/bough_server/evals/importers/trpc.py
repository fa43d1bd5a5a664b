"""Import eval sets, metrics and results of trpc-agent-go."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bough.v1.eval_set_pb2 import EvalSet
from bough.v1.invocation_pb2 import Invocation
from bough.v1.message_pb2 import ROLE_ASSISTANT
from bough_server.evals.importers.assembly import (
    ComparesAnswers,
    ComparesTools,
    ImportedCase,
    ImportedMetric,
    ImportedSet,
    NoCounterpart,
    assemble,
    session_state,
)
from bough_server.evals.importers.conversations import Exchange, read_exchange, read_invocation
from bough_server.evals.importers.trpc_criteria import compares_answers, compares_tools
from bough_server.evals.importers.values import JsonObject, JsonValue, Notes, object_of, objects_of

TOOL: Final = "trpc"

_TOOL_TRAJECTORY: Final = "tool_trajectory_avg_score"
_FINAL_RESPONSE: Final = "final_response_avg_score"
_METRIC_MEMBERS: Final = (
    "metricName",
    "evaluatorName",
    "threshold",
    "criterion",
    # What a result says about a metric beside its definition.
    "score",
    "evalStatus",
    "details",
)


def import_set(value: JsonValue, metrics: JsonValue, *, name: str, notes: Notes) -> EvalSet:
    """Return the set of an eval set file; `metrics` is that of a metrics file, None if there is none.

    Raises ConfigurationError for a file that is not of the format, or that has no case that can be imported.
    """
    source = object_of(value, "")
    if metrics is None:
        shared = [_default_metric(notes)]
        notes.add("There is no metrics file: tool calls are compared exactly, in any order.")
    else:
        shared = read_metrics(objects_of(metrics, ""), notes)
    cases = [_case(case, shared, notes) for case in source.children("evalCases")]
    return assemble(_set(source, cases, name, notes), notes)


def import_result(value: JsonValue, *, name: str, notes: Notes) -> EvalSet:
    """Return the conversations of a result file as a set of recorded cases. Raises ConfigurationError."""
    source = object_of(value, "")
    results = source.children("evalCaseResults")
    notes.add("The scores of the result were left out: the recorded conversations can be scored again.")
    runs = Counter(result.text("evalId") for result in results)
    cases = [_result_case(result, runs, notes) for result in results]
    return assemble(_set(source, cases, name, notes), notes)


def read_metrics(sources: Sequence[JsonObject], notes: Notes) -> list[ImportedMetric]:
    """Return metrics as they are defined in a file. Raises ConfigurationError."""
    return [_metric(source, notes) for source in sources]


def _set(source: JsonObject, cases: Sequence[ImportedCase], name: str, notes: Notes) -> ImportedSet:
    return ImportedSet(
        tool=TOOL,
        name=source.text("evalSetId") or source.text("name") or name,
        description=source.text("description"),
        cases=cases,
        default_tools=compares_tools(None, notes),
    )


def _metric(source: JsonObject, notes: Notes) -> ImportedMetric:
    name = source.text("metricName") or "metric"
    if unread := source.unknown(*_METRIC_MEMBERS):
        notes.add(f"The metric {name!r} has {', '.join(map(repr, sorted(unread)))}, which has no place.")
    kept = {key: value for key, value in source.members.items() if key not in ("score", "evalStatus", "details")}
    try:
        compares: ComparesTools | ComparesAnswers | str = _comparison(source, name, notes)
    except NoCounterpart as error:
        compares = str(error)
    # A threshold of zero is left out of the file.
    return ImportedMetric(name=name, threshold=source.number("threshold"), compares=compares, config=kept)


def _comparison(source: JsonObject, name: str, notes: Notes) -> ComparesTools | ComparesAnswers:
    """Return what a metric compares: by its evaluator, else by the only criterion that it has."""
    criterion = source.child("criterion") or JsonObject(members={}, place=source.at("criterion"))
    trajectory, answer = criterion.child("toolTrajectory"), criterion.child("finalResponse")
    evaluator = source.text("evaluatorName") or name
    if evaluator == _TOOL_TRAJECTORY:
        return compares_tools(trajectory, notes)
    if evaluator == _FINAL_RESPONSE and answer is not None:
        return compares_answers(answer)
    others = criterion.unknown("toolTrajectory", "finalResponse")
    if "llmJudge" in others or evaluator.startswith("llm_"):
        raise NoCounterpart("it asks a judge by its provider, address and key; llm_judge asks a configured model")
    if others:
        raise NoCounterpart(f"its criterion has {', '.join(map(repr, sorted(others)))}")
    if trajectory is not None and answer is None:
        return compares_tools(trajectory, notes)
    if answer is not None and trajectory is None:
        return compares_answers(answer)
    raise NoCounterpart("its criterion is neither toolTrajectory nor finalResponse")


def _default_metric(notes: Notes) -> ImportedMetric:
    return ImportedMetric(name=_TOOL_TRAJECTORY, threshold=1.0, compares=compares_tools(None, notes))


def _case(source: JsonObject, metrics: Sequence[ImportedMetric], notes: Notes) -> ImportedCase:
    case_id = source.text("evalId")
    if source.has("contextMessages"):
        notes.add("contextMessages have no place: the agent does not see them.", case_id)
    if source.has("conversationScenario"):
        notes.add("conversationScenario has no place: no model plays the user.", case_id)
    if source.flag("expectedRunnerEnabled"):
        notes.add("expectedRunnerEnabled has no place: only the expectations of the file are used.", case_id)
    if source.has("rubrics"):
        notes.add("Rubrics of cases have no place: no metric asks them.", case_id)
    expected, actual = source.children("conversation"), source.children("actualConversation")
    is_trace = source.text("evalMode") == "trace"
    if actual and not is_trace:
        notes.add(
            "A case that is not a trace has actualConversation: that conversation is scored, and nothing runs.", case_id
        )
    if is_trace and not actual:
        # An older form of the file: the conversation is the record, and nothing is expected.
        expected, actual = [], expected
        notes.add(
            "A trace has no actualConversation: its conversation is the record, and nothing is expected.", case_id
        )
    state = session_state(source.child("sessionInput"), case_id, notes)
    if not actual:
        turns = [read_exchange(turn, case_id, notes) for turn in expected]
        return ImportedCase(id=case_id, turns=turns, metrics=metrics, state_json=state)
    exchanges = [read_exchange(turn, case_id, notes) for turn in expected]
    records = [read_invocation(turn, case_id, notes) for turn in actual]
    return _build_recorded_case(case_id, exchanges, records, metrics)


def _build_recorded_case(
    case_id: str, exchanges: Sequence[Exchange], invocations: Sequence[Invocation], metrics: Sequence[ImportedMetric]
) -> ImportedCase:
    if exchanges and len(exchanges) != len(invocations):
        why = f"{len(invocations)} turns are recorded and {len(exchanges)} are expected"
        metrics = [*metrics, ImportedMetric(name="actualConversation", threshold=None, compares=why)]
    missing = [Exchange(user=record.user_content) for record in invocations[len(exchanges) :]]
    turns = [_attach_invocation(one, record) for one, record in zip([*exchanges, *missing], invocations, strict=False)]
    # The session of a record has no state to begin with.
    return ImportedCase(id=case_id, turns=turns, metrics=metrics)


def _attach_invocation(exchange: Exchange, invocation: Invocation) -> Exchange:
    """Return a turn that is judged by its record. Without an answer on both sides the answers are equal."""
    if exchange.answer is None and not invocation.HasField("final_response"):
        invocation.final_response.role = ROLE_ASSISTANT
    return replace(exchange, recorded=invocation)


def _result_case(source: JsonObject, runs: Counter[str], notes: Notes) -> ImportedCase:
    """Return a run of a case of a result, with the metrics that judged it."""
    eval_id = source.text("evalId")
    run_id = source.number("runId")
    case_id = f"{eval_id} run {run_id:g}" if runs[eval_id] > 1 and run_id else eval_id
    turns: list[Exchange] = []
    for invocation in source.children("evalMetricResultPerInvocation"):
        actual, expected = invocation.child("actualInvocation"), invocation.child("expectedInvocation")
        if actual is None:
            notes.add("A turn of the result without an actual invocation was left out.", case_id)
            continue
        record = read_invocation(actual, case_id, notes)
        exchange = Exchange(user=record.user_content)
        if expected is not None:
            exchange = read_exchange(expected, case_id, notes)
        turns.append(_attach_invocation(exchange, record))
    metrics = read_metrics(source.children("overallEvalMetricResults"), notes)
    return ImportedCase(id=case_id, turns=turns, metrics=metrics)
