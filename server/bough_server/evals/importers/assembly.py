"""Build an eval set from the cases and metrics of another tool, with the same meaning as far as there is one.

Expectations are kept with the turns if one metric compares them, and in the metric itself if several metrics compare
them in different ways. What no metric compares is kept too, judged with the threshold 0, which always passes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from bough.v1 import message_pb2
from bough.v1.eval_set_pb2 import (
    EvalCase,
    EvalMetric,
    EvalSet,
    EvalTurn,
    ExpectedAnswer,
    ExpectedStateValue,
    ExpectedTool,
    FinalResponseMetric,
    RougeMetric,
    RunOutcomeMetric,
    SimulatedUser,
    ToolMocks,
    ToolTrajectoryMetric,
)
from bough.v1.invocation_pb2 import InvocationSource
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.conversations import Exchange
from bough_server.evals.importers.metrics import (
    AsksJudge,
    ComparesAnswers,
    ComparesTools,
    ComparesWords,
    ImportedMetric,
    NoCounterpart,
)
from bough_server.evals.importers.unplaced import build_unplaced_metric
from bough_server.evals.importers.values import JsonObject, Notes, as_json
from bough_server.evals.metrics.text_metrics import reference_mistake
from bough_server.log.session_state import is_key

_Expected = TypeVar("_Expected")

MAX_ID: Final = 256
_MAX_NAME: Final = 128
_MAX_DESCRIPTION: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCase:
    """A case of another tool."""

    id: str
    turns: Sequence[Exchange]
    metrics: Sequence[ImportedMetric]
    state_json: str = ""
    mocks: ToolMocks | None = None
    final_state: Sequence[ExpectedStateValue] = ()
    """What the conversation leaves in the session."""
    user: SimulatedUser | None = None
    """Who plays the user after the turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSet:
    """A set of another tool, named as the prefix of its metrics: "trpc" or "adk"."""

    tool: str
    path: str
    """The file."""
    name: str
    cases: Sequence[ImportedCase]
    description: str = ""
    default_tools: ComparesTools
    """How tool calls are kept that no metric compares."""


def assemble(source: ImportedSet, notes: Notes) -> EvalSet:
    """Return the set. Raises ConfigurationError if none of its cases can be imported."""
    ids = _unique([_id_text(case.id) or f"case-{number}" for number, case in enumerate(source.cases, start=1)], MAX_ID)
    named = [replace(case, id=id) for id, case in zip(ids, source.cases, strict=True)]
    for case, before in zip(named, source.cases, strict=True):
        if case.id != before.id:
            notes.add("A case without an id, or with an id that is taken or not valid, got a new id.", case.id)
    kept = [case for case in named if _has_turns(case, notes)]
    if not kept:
        why = " ".join(notes.about_cases)
        raise ConfigurationError(f"{source.path}: The set has no case that can be imported. {why}".strip())
    eval_set = EvalSet(name=eval_set_name(source.name), description=source.description[:_MAX_DESCRIPTION])
    eval_set.cases.extend(_Placement(source=source, case=case, notes=notes).build_case() for case in kept)
    _share_metrics(eval_set)
    return eval_set


def eval_set_name(text: str) -> str:
    """Return a text as the name of a set: letters, digits, '.', '_' and '-', beginning with a letter."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_MAX_NAME]
    return name if re.match(r"[A-Za-z]", name) else f"set-{name}"[:_MAX_NAME].rstrip("-")


def session_state(source: JsonObject | None) -> str:
    """Return the state that a session begins with as JSON; empty for none. Raises ConfigurationError.

    What is not a key of a session's state stays unread.
    """
    if source is None:
        return ""
    state = source.child("state")
    members = {} if state is None else {key: state.take(key) for key in state if is_key(key)}
    return as_json(members) if members else ""


@dataclass(slots=True, kw_only=True)
class _Placement:
    """Gives one case its turns and metrics."""

    source: ImportedSet
    case: ImportedCase
    notes: Notes
    _tools: Sequence[Sequence[ExpectedTool]] | None = None
    _answers: Sequence[ExpectedAnswer | None] | None = None
    _scores_answers: bool = False
    """Whether a metric scores the answers that the turns expect."""
    _metrics: list[EvalMetric] = field(default_factory=list)

    def build_case(self) -> EvalCase:
        self._choose_answers()
        names = _unique([_metric_name(metric.name) for metric in self.case.metrics], _MAX_NAME)
        for name, metric in zip(names, self.case.metrics, strict=True):
            try:
                self._metrics.append(self._build_metric(name, metric))
            except NoCounterpart as error:
                self._metrics.append(self._build_unplaced_metric(name, metric, str(error)))
        self._keep_extra_expectations(names)
        case = EvalCase(id=self.case.id, session_state_json=self.case.state_json, metrics=self._metrics)
        if self.case.mocks is not None:
            case.mocks.CopyFrom(self.case.mocks)
        case.turns.extend(self._build_turn(index, turn) for index, turn in enumerate(self.case.turns))
        if self.case.user is not None:
            case.user.CopyFrom(self.case.user)
        if self.case.final_state:
            last = case.turns[-1].expect if self.case.user is None else case.user.expect
            last.run.session_state.extend(self.case.final_state)
        return case

    def _build_metric(self, name: str, metric: ImportedMetric) -> EvalMetric:
        turns = self.case.turns
        if self.case.user is not None and isinstance(metric.compares, ComparesTools | ComparesAnswers | ComparesWords):
            raise NoCounterpart("a model plays the user, so that nothing is expected of the turns")
        match metric.compares:
            case ComparesTools(mode=mode, expected=expected):
                calls = [[expected(call) for call in turn.calls] for turn in turns]
                wanted = ToolTrajectoryMetric(mode=mode)
                if self._tools is None:
                    self._tools = calls
                elif calls != self._tools:
                    wanted.tools.extend(_require_one_turn(calls))
                return EvalMetric(name=name, threshold=metric.threshold, tool_trajectory=wanted)
            case ComparesAnswers() as compares:
                return self._build_answer_metric(name, metric, compares)
            case ComparesWords() as compares:
                return self._build_word_metric(name, metric, compares)
            case AsksJudge() as judge:
                return EvalMetric(name=name, threshold=metric.threshold, llm_judge=judge.build())
            case str(reason):
                raise NoCounterpart(reason)

    def _choose_answers(self) -> None:
        """Choose the answers that the turns expect: those that a metric compares with the file's, else the file's.

        A metric that only bounds the answers of several turns has no other place for that.
        """
        compared = [metric.compares for metric in self.case.metrics if isinstance(metric.compares, ComparesAnswers)]
        others = [metric.compares for metric in self.case.metrics]
        needs_answers = any(
            isinstance(other, ComparesWords) or (isinstance(other, AsksJudge) and other.reads_answer)
            for other in others
        )
        read = self._expect_answers(compares for compares in compared if compares.reads_answer)
        bounds = self._expect_answers(compares for compares in compared if not compares.reads_answer)
        if read is not None:
            self._answers = read
        elif not any(turn.answer for turn in self.case.turns):
            self._answers = bounds
        elif len(self.case.turns) == 1 or not any(answer.ListFields() for answer in bounds or ()) or needs_answers:
            self._answers = self._reference_answers()
        else:
            self._answers = bounds
            self.notes.add(
                "The expected answers were left out: a metric bounds the answers of several turns instead.",
                self.case.id,
            )

    def _reference_answers(self) -> Sequence[ExpectedAnswer | None]:
        return [ExpectedAnswer(exact=turn.answer) if turn.answer else None for turn in self.case.turns]

    def _expect_answers(self, metrics: Iterable[ComparesAnswers]) -> Sequence[ExpectedAnswer] | None:
        """Return what the first of the metrics that has a counterpart expects; None if there is none."""
        for compares in metrics:
            with suppress(NoCounterpart):
                return [compares.expected(turn.answer) for turn in self.case.turns]
        return None

    def _build_answer_metric(self, name: str, metric: ImportedMetric, compares: ComparesAnswers) -> EvalMetric:
        answers = [compares.expected(turn.answer) for turn in self.case.turns]
        built = EvalMetric(name=name, threshold=metric.threshold, final_response=FinalResponseMetric())
        if answers == self._answers:
            self._scores_answers = True
        elif not any(answer.ListFields() for answer in answers):
            self._scores_answers = True
            built.threshold = 0
            self.notes.add(f"The metric {metric.name!r} compares nothing: it is kept with the threshold 0.")
        else:
            built.final_response.answer.CopyFrom(_require_one_turn(answers))
        return built

    def _build_word_metric(self, name: str, metric: ImportedMetric, compares: ComparesWords) -> EvalMetric:
        references = [turn.answer for turn in self.case.turns if turn.answer]
        if not references:
            raise NoCounterpart("no answer is expected whose words it could compare")
        for reference in references:
            if problem := reference_mistake("rouge_1", reference):
                raise NoCounterpart(f"an expected answer {problem.rstrip('.')}")
        built = EvalMetric(name=name, threshold=metric.threshold, rouge_1=RougeMetric())
        if compares.note:
            self.notes.add(compares.note)
        if compares.bound is not None:
            built.threshold = compares.bound if metric.threshold else 0
            if len(self.case.turns) > 1:
                self.notes.add(
                    f"The metric {metric.name!r} bounds the mean of the turns instead of each.", self.case.id
                )
        if self._answers == self._reference_answers():
            self._scores_answers = True
        else:
            built.rouge_1.reference = _require_one_turn([turn.answer or "" for turn in self.case.turns])
        return built

    def _build_unplaced_metric(self, name: str, metric: ImportedMetric, why: str) -> EvalMetric:
        self.notes.add(
            f"The metric {metric.name!r} has no counterpart: {why}. Its cases are not scored until it is removed.",
            self.case.id,
        )
        return build_unplaced_metric(
            self.source.tool,
            metric.name,
            metric_name=name,
            threshold=metric.threshold,
            config=metric.config,
            notes=self.notes,
        )

    def _keep_extra_expectations(self, taken: Sequence[str]) -> None:
        """Keep expectations that no metric compares, judged with the threshold 0."""
        turns = self.case.turns
        if self._tools is None and any(turn.calls for turn in turns):
            default = self.source.default_tools
            self._tools = [[default.expected(call) for call in turn.calls] for turn in turns]
            trajectory = ToolTrajectoryMetric(mode=default.mode)
            self._metrics.append(
                EvalMetric(name=_free_name("expected_tools", taken), threshold=0, tool_trajectory=trajectory)
            )
            self.notes.add("No metric compares the expected tool calls: they are kept with the threshold 0.")
        if not self._scores_answers and any(answer is not None for answer in self._answers or ()):
            name = _free_name("expected_answer", taken)
            self._metrics.append(EvalMetric(name=name, threshold=0, final_response=FinalResponseMetric()))
            self.notes.add("No metric compares the expected answers: they are kept with the threshold 0.")
        if self.case.final_state:
            name = _free_name("final_session_state", taken)
            self._metrics.append(EvalMetric(name=name, threshold=0, run_outcome=RunOutcomeMetric()))
            self.notes.add("No metric compares the final state of sessions: it is kept with the threshold 0.")

    def _build_turn(self, index: int, turn: Exchange) -> EvalTurn:
        made = _build_user_turn(turn)
        if self._tools is not None:
            made.expect.SetInParent()  # without expected calls a metric has none to expect, but judges the turn
            made.expect.tools.extend(self._tools[index])
        if self._answers is not None and (answer := self._answers[index]) is not None:
            made.expect.answer.CopyFrom(answer)
        return made


def _build_user_turn(turn: Exchange) -> EvalTurn:
    if turn.recorded is not None:
        return EvalTurn(recorded=InvocationSource(invocation=turn.recorded))
    if all(part.HasField("text") for part in turn.user.parts):
        return EvalTurn(user="\n".join(part.text for part in turn.user.parts))
    return EvalTurn(input=turn.user)


def _require_one_turn(expected: Sequence[_Expected]) -> _Expected:
    """Return what a metric expects that cannot be kept with the turns. Raises NoCounterpart."""
    if len(expected) != 1 or not expected[0]:
        raise NoCounterpart("another metric of the set compares the same turns in another way")
    return expected[0]


def _has_turns(case: ImportedCase, notes: Notes) -> bool:
    """Return whether a case can be run or judged, and note why it cannot."""
    if not case.turns and case.user is None:
        notes.add("A case without a conversation was left out.", case.id)
        return False
    if any(turn.recorded is None and not _has_content(turn.user) for turn in case.turns):
        notes.add("A case with a turn in which the user says nothing was left out.", case.id)
        return False
    return True


def _has_content(message: message_pb2.Message) -> bool:
    return any(part.text.strip() or not part.HasField("text") for part in message.parts)


def _share_metrics(eval_set: EvalSet) -> None:
    """Move the metrics that every case has into the set's defaults."""
    shared = [metric for metric in eval_set.cases[0].metrics if all(metric in case.metrics for case in eval_set.cases)]
    eval_set.defaults.metrics.extend(shared)
    for case in eval_set.cases:
        own = [metric for metric in case.metrics if metric not in shared]
        del case.metrics[:]
        case.metrics.extend(own)
    if not shared:
        eval_set.ClearField("defaults")


def _metric_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_MAX_NAME]
    return name if re.match(r"[A-Za-z]", name) else f"metric-{name}"[:_MAX_NAME].rstrip("-")


def _id_text(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "-", text)[:MAX_ID]


def _free_name(name: str, taken: Sequence[str]) -> str:
    return _unique([*taken, name], _MAX_NAME)[-1]


def _unique(names: Iterable[str], longest: int) -> list[str]:
    """Return names of which no two are equal: the later ones get a number."""
    taken: set[str] = set()
    numbers: Counter[str] = Counter()
    unique: list[str] = []
    for name in names:
        free = name
        while free in taken:
            numbers[name] += 1
            number = numbers[name] + 1
            free = f"{name[: longest - len(str(number)) - 1]}-{number}"
        unique.append(free)
        taken.add(free)
    return unique
