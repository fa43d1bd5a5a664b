"""Import eval sets and test files of ADK, with the criteria of its configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bough.v1 import eval_set_pb2
from bough.v1.eval_set_pb2 import (
    TRAJECTORY_MODE_EXACT,
    TRAJECTORY_MODE_IN_ORDER,
    TRAJECTORY_MODE_SUPERSET,
    EvalSet,
    ExpectedStateValue,
    ExpectedTool,
    TrajectoryMode,
    ValueMatcher,
)
from bough.v1.message_pb2 import ROLE_USER, Message, Part
from bough_server.documents.yaml import Document
from bough_server.evals.importers.assembly import ImportedCase, ImportedSet, assemble, session_state
from bough_server.evals.importers.conversations import Exchange, ImportedCall, read_exchange
from bough_server.evals.importers.judges import (
    ANSWER_AND_TOOLS_TEMPLATE,
    MATCHES_REFERENCE,
    NO_MODEL,
    REFERENCE_TEMPLATE,
    TOOLS_TEMPLATE,
    read_rubrics,
    read_samples,
    read_settings,
)
from bough_server.evals.importers.metrics import (
    AsksJudge,
    ComparesTools,
    ComparesWords,
    Comparison,
    ImportedMetric,
    NoCounterpart,
)
from bough_server.evals.importers.scenarios import read_scenario
from bough_server.evals.importers.values import JsonObject, JsonValue, Notes, as_json, empty_object, object_at
from bough_server.log.session_state import is_key, is_path

TOOL: Final = "adk"

DEFAULT_CRITERIA: Final[JsonValue] = {
    "criteria": {"tool_trajectory_avg_score": 1.0, "response_match_score": 0.8},
}
"""The configuration of a set that has none."""

_TOOL_TRAJECTORY: Final = "tool_trajectory_avg_score"
_WORDS: Final = "response_match_score"
_MATCHES_REFERENCE: Final = "final_response_match_v2"
_MODES: Final[Sequence[tuple[str, TrajectoryMode.ValueType]]] = (
    ("EXACT", TRAJECTORY_MODE_EXACT),
    ("IN_ORDER", TRAJECTORY_MODE_IN_ORDER),
    # ADK allows other calls here.
    ("ANY_ORDER", TRAJECTORY_MODE_SUPERSET),
)
"""The modes by the numbers and names of match types."""

_JUDGES: Final[Mapping[str, str]] = {
    _MATCHES_REFERENCE: REFERENCE_TEMPLATE,
    "rubric_based_final_response_quality_v1": ANSWER_AND_TOOLS_TEMPLATE,
    "rubric_based_tool_use_quality_v1": TOOLS_TEMPLATE,
}
"""The criteria that ask a judge, and what it is shown."""

_SAMPLES: Final = 5
"""How often a judge is asked that has no number of samples."""

_MAX_TURNS: Final = 20
"""How many turns a conversation has at most in which a model plays the user."""

_REASONS: Final = {
    "response_evaluation_score": "a service of its vendor judges it",
    "safety_v1": "a service of its vendor judges it",
    "hallucinations_v1": "no metric looks for hallucinations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdkImporter:
    """Imports files of ADK. Raises ConfigurationError for one that has no case that can be imported."""

    notes: Notes
    judge: str = ""
    """The configured model that judges; empty for none."""
    user: str = ""
    """The configured model that plays users; empty for none."""

    def import_set(self, source: JsonObject, config: JsonObject | None, *, name: str) -> EvalSet:
        """Return the set of an eval set file; `config` is a configuration file, None if there is none."""
        metrics = self._read_criteria(config)
        max_turns = self._read_max_turns(config)
        cases = [self._read_case(case, metrics, max_turns) for case in source.children("evalCases")]
        name = source.text("evalSetId") or source.text("name") or name
        return self._assemble(cases, name, source.document.path, source.text("description"))

    def import_tests(
        self, sources: Sequence[JsonObject], config: JsonObject | None, *, name: str, path: str
    ) -> EvalSet:
        """Return the set of a test file in its older form: a list of turns, one case, or of cases with `data`."""
        metrics = self._read_criteria(config)
        if not any(source.has("data") for source in sources):
            return self._assemble([self._read_older_case(name, sources, metrics)], name, path)
        cases: list[ImportedCase] = []
        for source in sources:
            case = self._read_older_case(source.text("name"), source.children("data"), metrics)
            cases.append(replace(case, state_json=session_state(source.child("initialSession"))))
        return self._assemble(cases, name, path)

    def _assemble(self, cases: Sequence[ImportedCase], name: str, path: str, description: str = "") -> EvalSet:
        imported = ImportedSet(
            tool=TOOL,
            path=path,
            name=name,
            description=description,
            cases=cases,
            default_tools=_compares_tools(TRAJECTORY_MODE_EXACT, ignores_arguments=False),
        )
        return assemble(imported, self.notes)

    def _read_criteria(self, config: JsonObject | None) -> list[ImportedMetric]:
        if config is None:
            config = object_at(Document(path="", value=None, lines={}), DEFAULT_CRITERIA)
            self.notes.add("There is no configuration: the criteria are those that ADK takes then.")
        criteria = config.child("criteria") or empty_object()
        custom = config.child("customMetrics") or empty_object()
        return [self._read_metric(name, criteria, custom.take(name)) for name in criteria.list_keys()]

    def _read_metric(self, name: str, criteria: JsonObject, custom: JsonValue) -> ImportedMetric:
        """Return a criterion, which is a threshold or an object that has one."""
        value = criteria.peek(name)
        criterion = criteria.child(name) if isinstance(value, dict) else None
        if criterion is None:
            threshold = criteria.require_number(name)
            criterion = empty_object()
        else:
            threshold = criterion.require_number("threshold")
        config: dict[str, JsonValue] = {"criterion": value}
        if custom is not None:
            config["custom_metric"] = custom
        try:
            if custom is not None:
                raise NoCounterpart("a function of the agent's project judges it")
            compares: Comparison | str = self._read_comparison(name, criterion)
        except NoCounterpart as error:
            criterion.take_all()
            compares = str(error)
        return ImportedMetric(name=name, threshold=threshold, compares=compares, config=config)

    def _read_comparison(self, name: str, criterion: JsonObject) -> Comparison:
        if name == _TOOL_TRAJECTORY:
            return _compares_tools(_mode(criterion), ignores_arguments=criterion.flag("ignoreArgs"))
        if name == _WORDS:
            note = f"The metric {name!r} compares whole words, ADK their stems: scores may be lower here."
            return ComparesWords(note=note)
        if name not in _JUDGES:
            raise NoCounterpart(_REASONS.get(name, "no metric here judges the same"))
        if not self.judge:
            raise NoCounterpart(NO_MODEL)
        options = criterion.child("judgeModelOptions") or empty_object()
        replaced = f" instead of {options.text('judgeModel')!r}" if options.has("judgeModel") else ""
        self.notes.add(f"The metric {name!r} asks the configured model {self.judge!r}{replaced}.")
        rubrics = [MATCHES_REFERENCE]
        if name != _MATCHES_REFERENCE:
            rubrics = read_rubrics(
                criterion.children("rubrics"), id="rubricId", content="rubricContent", text="textProperty"
            )
        return AsksJudge(
            model=self.judge,
            template=_JUDGES[name],
            rubrics=rubrics,
            samples=read_samples(options, _SAMPLES),
            settings=read_settings(options.child("judgeModelConfig"), max_tokens="maxOutputTokens"),
        )

    def _read_max_turns(self, config: JsonObject | None) -> int:
        """Return how many turns a conversation has in which a model plays the user."""
        simulator = config.child("userSimulatorConfig") if config is not None and self.user else None
        if simulator is None:
            return _MAX_TURNS
        if simulator.has("model"):
            self.notes.add(f"The configured model {self.user!r} plays the user instead of {simulator.text('model')!r}.")
        return round(simulator.number("maxAllowedInvocations", _MAX_TURNS))

    def _read_case(self, source: JsonObject, metrics: Sequence[ImportedMetric], max_turns: int) -> ImportedCase:
        # ADK does not compare results, so they stay unread.
        turns = [read_exchange(turn, with_results=False) for turn in source.children("conversation")]
        scenario = source.child("conversationScenario") if self.user and not turns else None
        user = None
        if scenario is not None:
            turns, user = read_scenario(scenario, model=self.user, max_turns=max_turns)
        return ImportedCase(
            id=source.text("evalId"),
            turns=turns,
            metrics=metrics,
            state_json=session_state(source.child("sessionInput")),
            final_state=_read_final_state(source.child("finalSessionState")),
            user=user,
        )

    def _read_older_case(
        self, case_id: str, sources: Sequence[JsonObject], metrics: Sequence[ImportedMetric]
    ) -> ImportedCase:
        # Calls of other tools run them.
        mocks = eval_set_pb2.ToolMocks(strict=False)
        turns: list[Exchange] = []
        for source in sources:
            calls = [_read_older_call(use, mocks) for use in source.children("expectedToolUse")]
            query = source.text("query")
            user = Message(role=ROLE_USER, parts=[Part(text=query)] if query else [])
            answer = source.text("reference") if source.has("reference") else None
            turns.append(Exchange(user=user, answer=answer, calls=calls))
        if mocks.tools:
            self.notes.add("mock_tool_output answers the calls in place of the tools.", case_id)
        return ImportedCase(id=case_id, turns=turns, metrics=metrics, mocks=mocks if mocks.tools else None)


def _read_final_state(source: JsonObject | None) -> list[ExpectedStateValue]:
    """Return what is expected of a session's values; what cannot be a key of one stays unread."""
    if source is None:
        return []
    return [
        ExpectedStateValue(path=key, value_match=ValueMatcher(equals_json=as_json(source.take(key))))
        for key in source
        if is_key(key) and is_path(key)
    ]


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


def _read_older_call(use: JsonObject, mocks: eval_set_pb2.ToolMocks) -> ImportedCall:
    call = ImportedCall(name=use.require_text("toolName"), arguments=use.raw("toolInput"))
    if use.has("mockToolOutput"):
        mock = mocks.tools.add(name=call.name, result_json=as_json(use.raw("mockToolOutput")))
        mock.arguments_match.equals_json = "{}" if call.arguments is None else as_json(call.arguments)
    return call
