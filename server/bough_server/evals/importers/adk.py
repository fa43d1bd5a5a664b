"""Import eval sets and test files of ADK, with the criteria of its configuration."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from bough.v1 import eval_set_pb2
from bough.v1.eval_set_pb2 import (
    TRAJECTORY_MODE_EXACT,
    TRAJECTORY_MODE_IN_ORDER,
    TRAJECTORY_MODE_SUPERSET,
    EvalSet,
    ExpectedTool,
    TrajectoryMode,
)
from bough.v1.message_pb2 import ROLE_USER, Message, Part
from bough_server.evals.importers.assembly import (
    ComparesTools,
    ImportedCase,
    ImportedMetric,
    ImportedSet,
    assemble,
    session_state,
)
from bough_server.evals.importers.conversations import Exchange, ImportedCall, read_exchange
from bough_server.evals.importers.values import (
    JsonObject,
    JsonValue,
    Notes,
    as_json,
    number_of,
    object_of,
    objects_of,
)

TOOL: Final = "adk"

DEFAULT_CRITERIA: Final[JsonValue] = {
    "criteria": {"tool_trajectory_avg_score": 1.0, "response_match_score": 0.8},
}
"""The configuration of a set that has none."""

_TOOL_TRAJECTORY: Final = "tool_trajectory_avg_score"
_MODES: Final[Sequence[tuple[str, TrajectoryMode.ValueType]]] = (
    ("EXACT", TRAJECTORY_MODE_EXACT),
    ("IN_ORDER", TRAJECTORY_MODE_IN_ORDER),
    # ADK allows other calls here.
    ("ANY_ORDER", TRAJECTORY_MODE_SUPERSET),
)
"""The modes by the numbers and names of match types."""

_REASONS: Final = {
    "response_match_score": "it is ROUGE-1, which compares words and not meanings",
    "response_evaluation_score": "a service of its vendor judges it",
    "safety_v1": "a service of its vendor judges it",
    "final_response_match_v2": "it asks a judge by its model's name; llm_judge asks a configured model",
    "hallucinations_v1": "no metric looks for hallucinations",
}


def import_set(value: JsonValue, config: JsonValue, *, name: str, notes: Notes) -> EvalSet:
    """Return the set of an eval set or test file; `config` is that of a configuration file, None if there is none.

    Raises ConfigurationError for a file that is not of the format, or that has no case that can be imported.
    """
    if config is None:
        config = DEFAULT_CRITERIA
        notes.add("There is no configuration: the criteria are those that ADK takes then.")
    metrics = read_criteria(object_of(config, ""), notes)
    if isinstance(value, list):
        return assemble(_set(JsonObject(members={}), _older_cases(value, metrics, name, notes), name), notes)
    source = object_of(value, "")
    cases = [_case(case, metrics, notes) for case in source.children("evalCases")]
    return assemble(_set(source, cases, name), notes)


def read_criteria(config: JsonObject, notes: Notes) -> list[ImportedMetric]:
    """Return the criteria of a configuration as metrics. Raises ConfigurationError."""
    if unread := config.unknown("criteria", "customMetrics"):
        notes.add(f"{', '.join(sorted(unread))} of the configuration has no place.")
    criteria = config.child("criteria") or JsonObject(members={})
    custom = config.child("customMetrics") or JsonObject(members={})
    return [
        _metric(name, value, custom.members.get(name), notes)
        for name, value in criteria.members.items()
        if value is not None
    ]


def _set(source: JsonObject, cases: Sequence[ImportedCase], name: str) -> ImportedSet:
    return ImportedSet(
        tool=TOOL,
        name=source.text("evalSetId") or source.text("name") or name,
        description=source.text("description"),
        cases=cases,
        default_tools=_compares_tools(TRAJECTORY_MODE_EXACT, ignores_arguments=False),
    )


def _metric(name: str, value: JsonValue, custom: JsonValue, notes: Notes) -> ImportedMetric:
    """Return a criterion, which is a threshold or an object that has one."""
    criterion = JsonObject(members=value if isinstance(value, dict) else {"threshold": value}, place=f"criteria.{name}")
    threshold = number_of(criterion.raw("threshold"), criterion.at("threshold"))
    if name == _TOOL_TRAJECTORY and custom is None:
        if unread := criterion.unknown("threshold", "matchType", "ignoreArgs", "includeIntermediateResponsesInFinal"):
            notes.add(f"The metric {name!r} has {', '.join(map(repr, sorted(unread)))}, which has no place.")
        compares = _compares_tools(_mode(criterion), ignores_arguments=criterion.flag("ignoreArgs"))
        return ImportedMetric(name=name, threshold=threshold, compares=compares)
    config: dict[str, JsonValue] = {"criterion": value}
    if custom is not None:
        config["custom_metric"] = custom
        why = "a function of the agent's project judges it"
    else:
        why = _REASONS.get(name, "no metric here judges the same")
    return ImportedMetric(name=name, threshold=threshold, compares=why, config=config)


def _mode(criterion: JsonObject) -> TrajectoryMode.ValueType:
    value = criterion.raw("matchType")
    if value is None:
        return TRAJECTORY_MODE_EXACT
    if isinstance(value, str):
        value = value.strip().upper().replace("-", "_").replace(" ", "_")
    for number, (name, mode) in enumerate(_MODES):
        if value == name or (value == number and not isinstance(value, bool)):
            return mode
    raise criterion.wrong("matchType", "must be EXACT, IN_ORDER or ANY_ORDER")


def _compares_tools(mode: TrajectoryMode.ValueType, *, ignores_arguments: bool) -> ComparesTools:
    def expect_call(call: ImportedCall) -> ExpectedTool:
        if ignores_arguments:
            return ExpectedTool(name=call.name)
        return ExpectedTool(name=call.name, arguments_json="{}" if call.arguments is None else as_json(call.arguments))

    return ComparesTools(mode=mode, expected=expect_call)


def _case(source: JsonObject, metrics: Sequence[ImportedMetric], notes: Notes) -> ImportedCase:
    case_id = source.text("evalId")
    if source.has("conversationScenario"):
        notes.add("conversation_scenario has no place: no model plays the user.", case_id)
    if source.has("rubrics"):
        notes.add("Rubrics of cases have no place: no metric asks them.", case_id)
    if source.raw("finalSessionState"):
        notes.add("final_session_state has no place: no metric compares the state of sessions.", case_id)
    turns = [read_exchange(turn, case_id, notes) for turn in source.children("conversation")]
    if any(call.result is not None for turn in turns for call in turn.calls):
        notes.add("Results of expected tool calls were left out: ADK does not compare them.", case_id)
    state = session_state(source.child("sessionInput"), case_id, notes)
    return ImportedCase(id=case_id, turns=turns, metrics=metrics, state_json=state)


def _older_cases(value: JsonValue, metrics: Sequence[ImportedMetric], name: str, notes: Notes) -> list[ImportedCase]:
    """Return the cases of the older form: a list of turns, which is one case, or of cases with turns as `data`."""
    sources = objects_of(value, "")
    if not any(source.has("data") for source in sources):
        return [_older_case(name, sources, metrics, notes)]
    cases: list[ImportedCase] = []
    for source in sources:
        case = _older_case(source.text("name"), source.children("data"), metrics, notes)
        cases.append(replace(case, state_json=session_state(source.child("initialSession"), case.id, notes)))
    return cases


def _older_case(
    case_id: str, sources: Sequence[JsonObject], metrics: Sequence[ImportedMetric], notes: Notes
) -> ImportedCase:
    mocks = eval_set_pb2.ToolMocks()
    turns: list[Exchange] = []
    for source in sources:
        if source.children("expectedIntermediateAgentResponses"):
            notes.add("Intermediate responses that are expected have no place: no metric compares them.", case_id)
        calls = [_older_call(use, mocks) for use in source.children("expectedToolUse")]
        query = source.text("query")
        user = Message(role=ROLE_USER, parts=[Part(text=query)] if query else [])
        answer = source.text("reference") if source.has("reference") else None
        turns.append(Exchange(user=user, answer=answer, calls=calls))
    if mocks.tools:
        notes.add("mock_tool_output answers the calls in place of the tools.", case_id)
    return ImportedCase(id=case_id, turns=turns, metrics=metrics, mocks=mocks if mocks.tools else None)


def _older_call(use: JsonObject, mocks: eval_set_pb2.ToolMocks) -> ImportedCall:
    call = ImportedCall(name=use.require_text("toolName"), arguments=use.raw("toolInput"))
    if use.has("mockToolOutput"):
        mock = mocks.tools.add(name=call.name, result_json=as_json(use.raw("mockToolOutput")))
        mock.arguments_match.equals_json = "{}" if call.arguments is None else as_json(call.arguments)
    return call
