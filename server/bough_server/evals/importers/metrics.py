"""Metrics of other tools: what each compares or asks, in the terms of eval sets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from bough.v1.eval_set_pb2 import ExpectedAnswer, ExpectedTool, JudgeRubric, LlmJudgeMetric, TrajectoryMode
from bough.v1.model_pb2 import ModelSettings
from bough_server.evals.importers.conversations import ImportedCall
from bough_server.evals.importers.values import JsonValue

_MOST_RUBRICS: Final = 64
_MOST_SAMPLES: Final = 25
_LONGEST_ID: Final = 128
_LONGEST_RUBRIC: Final = 16_384


class NoCounterpart(Exception):
    """A metric, or how it compares something, that has no counterpart; the message says what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparesTools:
    """A metric that compares tool calls."""

    mode: TrajectoryMode.ValueType
    expected: Callable[[ImportedCall], ExpectedTool]
    """The expected call of an imported one. Raises NoCounterpart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparesAnswers:
    """A metric that compares answers."""

    expected: Callable[[str | None], ExpectedAnswer]
    """The expected answer of an imported one. Raises NoCounterpart."""
    reads_answer: bool
    """Whether it compares with the file's answer; otherwise that is a reference for people and for other metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparesWords:
    """A metric that compares the words of answers with the file's: ROUGE-1."""

    bound: float | None = None
    """The F1 that the answer of each turn has to reach; None if the mean has to reach the metric's threshold."""
    note: str = ""
    """How the scores of the other tool differ, as a sentence; empty if they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsksJudge:
    """A metric that asks a model whether rubrics hold."""

    model: str
    """The configured model that is asked in place of the file's."""
    template: str
    rubrics: Sequence[tuple[str, str]] = ()
    """Ids and texts."""
    samples: int = 1
    settings: ModelSettings = field(default_factory=ModelSettings)

    @property
    def reads_answer(self) -> bool:
        """Whether the judge is shown the file's answer."""
        return "{{expected}}" in self.template

    def build(self) -> LlmJudgeMetric:
        """Return the metric. Raises NoCounterpart for rubrics or samples that it cannot have."""
        if not 1 <= len(self.rubrics) <= _MOST_RUBRICS:
            raise NoCounterpart(f"it has {len(self.rubrics) or 'no'} rubrics; a judge is asked 1 to {_MOST_RUBRICS}")
        if not 1 <= self.samples <= _MOST_SAMPLES:
            raise NoCounterpart(f"it asks {self.samples} times; a judge is asked 1 to {_MOST_SAMPLES} times")
        ids = [id for id, _ in self.rubrics]
        if len(set(ids)) < len(ids) or not all(id.isprintable() and 0 < len(id) <= _LONGEST_ID for id in ids):
            raise NoCounterpart(f"its rubrics need ids that differ, of 1 to {_LONGEST_ID} printable characters")
        if not all(0 < len(text) <= _LONGEST_RUBRIC for _, text in self.rubrics):
            raise NoCounterpart(f"its rubrics need texts of 1 to {_LONGEST_RUBRIC:,} characters")
        return LlmJudgeMetric(
            model=self.model,
            rubrics=[JudgeRubric(id=id, text=text) for id, text in self.rubrics],
            template=self.template,
            samples=self.samples,
            settings=self.settings if self.settings.ListFields() else None,
        )


Comparison: TypeAlias = ComparesTools | ComparesAnswers | ComparesWords | AsksJudge
"""What a metric compares or asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedMetric:
    """A metric of another tool, and what it compares or asks; a text says why it has no counterpart."""

    name: str
    threshold: float | None
    compares: Comparison | str
    config: JsonValue = None
    """The metric as the file has it."""
