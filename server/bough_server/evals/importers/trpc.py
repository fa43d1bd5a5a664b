"""Import eval sets, metrics and results of trpc-agent-go."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bough.v1.eval_set_pb2 import EvalSet
from bough.v1.invocation_pb2 import Invocation
from bough.v1.message_pb2 import ROLE_ASSISTANT
from bough_server.evals.importers.assembly import ImportedCase, ImportedSet, assemble, session_state
from bough_server.evals.importers.conversations import Exchange, read_exchange, read_invocation
from bough_server.evals.importers.judges import (
    ANSWER_TEMPLATE,
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
    Comparison,
    ImportedMetric,
    NoCounterpart,
)
from bough_server.evals.importers.scenarios import MOST_TURNS, read_scenario
from bough_server.evals.importers.trpc_criteria import compares_answers, compares_tools
from bough_server.evals.importers.trpc_mocks import read_mocks
from bough_server.evals.importers.values import JsonObject, Notes, empty_object

TOOL: Final = "trpc"

_TOOL_TRAJECTORY: Final = "tool_trajectory_avg_score"
_FINAL_RESPONSE: Final = "final_response_avg_score"
_MATCHES_REFERENCE: Final = "llm_final_response"
_RESULT_MEMBERS: Final = ("score", "evalStatus", "details")
"""What a result says about a metric beside its definition."""

_JUDGES: Final[Mapping[str, str]] = {
    _MATCHES_REFERENCE: REFERENCE_TEMPLATE,
    "llm_rubric_response": ANSWER_TEMPLATE,
    "llm_rubric_critic": REFERENCE_TEMPLATE,
    "llm_rubric_reference_critic": REFERENCE_TEMPLATE,
    "llm_rubric_knowledge_recall": TOOLS_TEMPLATE,
}
"""The evaluators that ask a judge about rubrics, and what it is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrpcImporter:
    """Imports files of trpc-agent-go. Raises ConfigurationError for one that has no case that can be imported."""

    notes: Notes
    judge: str = ""
    """The configured model that judges; empty for none."""
    user: str = ""
    """The configured model that plays users; empty for none."""

    def import_set(self, source: JsonObject, metrics: Sequence[JsonObject] | None, *, name: str) -> EvalSet:
        """Return the set of an eval set file; `metrics` are those of a metrics file, None if there is none."""
        if metrics is None:
            shared = [_default_metric(self.notes)]
            self.notes.add("There is no metrics file: tool calls are compared exactly, in any order.")
        else:
            shared = self._read_metrics(metrics)
        cases = [self._read_case(case, shared) for case in source.children("evalCases")]
        return assemble(self._build_set(source, cases, name), self.notes)

    def import_result(self, source: JsonObject, *, name: str) -> EvalSet:
        """Return the conversations of a result file as a set of recorded cases."""
        results = source.children("evalCaseResults")
        self.notes.add("The scores of the result were left out: the recorded conversations can be scored again.")
        runs = Counter(result.text("evalId") for result in results)
        cases = [self._read_result_case(result, runs) for result in results]
        return assemble(self._build_set(source, cases, name), self.notes)

    def _build_set(self, source: JsonObject, cases: Sequence[ImportedCase], name: str) -> ImportedSet:
        return ImportedSet(
            tool=TOOL,
            path=source.document.path,
            name=source.text("evalSetId") or source.text("name") or name,
            description=source.text("description"),
            cases=cases,
            default_tools=compares_tools(None, self.notes),
        )

    def _read_metrics(self, sources: Iterable[JsonObject]) -> list[ImportedMetric]:
        return [self._read_metric(source) for source in sources]

    def _read_metric(self, source: JsonObject) -> ImportedMetric:
        name = source.text("metricName") or "metric"
        # A threshold of zero is left out of the file.
        threshold = source.number("threshold")
        try:
            compares: Comparison | str = self._read_comparison(source, name)
        except NoCounterpart as error:
            compares = str(error)
        kept = {key: value for key, value in source.members.items() if key not in _RESULT_MEMBERS}
        if isinstance(compares, str):
            source.take_all()
        return ImportedMetric(name=name, threshold=threshold, compares=compares, config=kept)

    def _read_comparison(self, source: JsonObject, name: str) -> Comparison:
        """Return what a metric compares: by its evaluator, else by the only criterion that it has."""
        criterion = source.child("criterion") or empty_object()
        trajectory, answer = criterion.child("toolTrajectory"), criterion.child("finalResponse")
        evaluator = source.text("evaluatorName") or name
        if evaluator == _TOOL_TRAJECTORY:
            return compares_tools(trajectory, self.notes)
        if evaluator == _FINAL_RESPONSE and answer is not None:
            return compares_answers(answer)
        others = criterion.unknown("toolTrajectory", "finalResponse")
        if "llmJudge" in others or evaluator.startswith("llm_"):
            return self._read_judge(criterion.child("llmJudge"), evaluator, name)
        if others:
            raise NoCounterpart(f"its criterion has {', '.join(map(repr, sorted(others)))}")
        if trajectory is not None and answer is None:
            return compares_tools(trajectory, self.notes)
        if answer is not None and trajectory is None:
            return compares_answers(answer)
        raise NoCounterpart("its criterion is neither toolTrajectory nor finalResponse")

    def _read_judge(self, source: JsonObject | None, evaluator: str, name: str) -> AsksJudge:
        """Return a metric that asks the model of the importer instead of the file's."""
        if source is None or evaluator not in _JUDGES:
            raise NoCounterpart(f"no metric asks a judge as its evaluator {evaluator!r} does")
        if not self.judge:
            raise NoCounterpart(NO_MODEL)
        known = ("rubrics", "judgeModel", "sampleParallelism", "sampleParallelismEnabled")
        if unknown := source.unknown(*known):
            raise NoCounterpart(f"its judge has {', '.join(map(repr, sorted(unknown)))}")
        model = source.child("judgeModel") or empty_object()
        for address in ("providerName", "variant", "baseURL", "apiKey"):
            model.raw(address)
        replaced = f" instead of {model.text('modelName')!r}" if model.has("modelName") else ""
        self.notes.add(f"The metric {name!r} asks the configured model {self.judge!r}{replaced}.")
        rubrics = read_rubrics(source.children("rubrics"), id="id", content="content", text="text")
        return AsksJudge(
            model=self.judge,
            template=_JUDGES[evaluator],
            rubrics=[MATCHES_REFERENCE] if evaluator == _MATCHES_REFERENCE else rubrics,
            samples=read_samples(model, 1),
            settings=read_settings(model.child("generationConfig"), max_tokens="maxTokens"),
        )

    def _read_case(self, source: JsonObject, metrics: Sequence[ImportedMetric]) -> ImportedCase:
        case_id = source.text("evalId")
        expected, actual = source.children("conversation"), source.children("actualConversation")
        is_trace = source.text("evalMode") == "trace"
        if source.text("evalMode") not in ("", "trace"):
            raise source.wrong("evalMode", "must be trace or empty")
        if actual and not is_trace:
            self.notes.add(
                "A case that is not a trace has actualConversation: that conversation is scored, and nothing runs.",
                case_id,
            )
        if is_trace and not actual:
            # An older form of the file: the conversation is the record, and nothing is expected.
            expected, actual = [], expected
            self.notes.add(
                "A trace has no actualConversation: its conversation is the record, and nothing is expected.", case_id
            )
        state = session_state(source.child("sessionInput"))
        metrics = _add_rubrics(source.children("rubrics"), metrics)
        exchanges = [read_exchange(turn) for turn in expected]
        if actual:
            return _build_recorded_case(case_id, exchanges, [read_invocation(turn) for turn in actual], metrics)
        scenario = source.child("conversationScenario") if self.user and not expected else None
        user = None
        if scenario is not None:
            exchanges, user = read_scenario(scenario, model=self.user, max_turns=MOST_TURNS)
        mocks = read_mocks(expected)
        if mocks.are_wider:
            self.notes.add("A mock of a turn answers calls in the other turns of its case too.", case_id)
        problems = [ImportedMetric(name="toolMock", threshold=None, compares=problem) for problem in mocks.problems]
        return ImportedCase(
            id=case_id, turns=exchanges, metrics=[*metrics, *problems], state_json=state, mocks=mocks.mocks, user=user
        )

    def _read_result_case(self, source: JsonObject, runs: Counter[str]) -> ImportedCase:
        """Return a run of a case of a result, with the metrics that judged it."""
        eval_id = source.text("evalId")
        run_id = source.number("runId")
        case_id = f"{eval_id} run {run_id:g}" if runs[eval_id] > 1 and run_id else eval_id
        turns: list[Exchange] = []
        for invocation in source.children("evalMetricResultPerInvocation"):
            actual, expected = invocation.child("actualInvocation"), invocation.child("expectedInvocation")
            if actual is None:
                self.notes.add("A turn of the result without an actual invocation was left out.", case_id)
                continue
            record = read_invocation(actual)
            exchange = Exchange(user=record.user_content) if expected is None else read_exchange(expected)
            turns.append(_attach_invocation(exchange, record))
        metrics = self._read_metrics(source.children("overallEvalMetricResults"))
        return ImportedCase(id=case_id, turns=turns, metrics=metrics)


def _default_metric(notes: Notes) -> ImportedMetric:
    return ImportedMetric(name=_TOOL_TRAJECTORY, threshold=1.0, compares=compares_tools(None, notes))


def _add_rubrics(sources: Sequence[JsonObject], metrics: Sequence[ImportedMetric]) -> Sequence[ImportedMetric]:
    """Return the metrics of a case, with the rubrics that the case adds to them."""
    added: list[ImportedMetric] = []
    for metric in metrics:
        judge = metric.compares
        own = [source for source in sources if source.peek("metricName") == metric.name]
        if isinstance(judge, AsksJudge) and own:
            rubrics = read_rubrics(own, id="id", content="content", text="text")
            for source in own:
                source.raw("metricName")
            metric = replace(metric, compares=replace(judge, rubrics=[*judge.rubrics, *rubrics]))
        added.append(metric)
    return added


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
