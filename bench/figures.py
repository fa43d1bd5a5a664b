"""What a case measured: figures of several rounds beside their floor, whether they are as aimed; it runs nothing."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypedDict

Comparison = Literal["at most", "under", "more than"]

_COMPARE = {"at most": operator.le, "under": operator.lt, "more than": operator.gt}


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound of a figure's ratio to its floor, or of its median."""

    comparison: Comparison
    limit: float
    of: Literal["ratio", "median"] = "ratio"

    def is_met_by(self, value: float) -> bool:
        """Whether a value keeps to it."""
        return bool(_COMPARE[self.comparison](value, self.limit))

    def __str__(self) -> str:
        return f"{self.comparison} {self.limit:,g}{' x' if self.of == 'ratio' else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, round by round. `floor` names what the same rounds measured beside it; empty for none."""

    case: str
    what: str
    unit: str
    rounds: Sequence[float]
    floor: str = ""
    floor_rounds: Sequence[float] = ()
    aim: Aim | None = None

    @property
    def median(self) -> float:
        """The median of its rounds."""
        return median(self.rounds)

    @property
    def floor_median(self) -> float | None:
        """The median of its floor's rounds."""
        return median(self.floor_rounds) if self.floor_rounds else None

    @property
    def ratio(self) -> float | None:
        """Its median over its floor's."""
        floor = self.floor_median
        return self.median / floor if floor else None

    @property
    def is_met(self) -> bool | None:
        """Whether its aim is reached; None where it has none."""
        if self.aim is None:
            return None
        value = self.ratio if self.aim.of == "ratio" else self.median
        return value is not None and self.aim.is_met_by(value)

    def written(self) -> "WrittenFigure":
        """The figure as `bench.json` has it."""
        return WrittenFigure(
            case=self.case,
            what=self.what,
            unit=self.unit,
            rounds=list(self.rounds),
            median=self.median,
            floor=self.floor,
            floor_rounds=list(self.floor_rounds),
            floor_median=self.floor_median,
            ratio=self.ratio,
            aim=str(self.aim or ""),
            is_met=self.is_met,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case's figures and what went wrong in it; a failure is a sentence."""

    figures: Sequence[Figure]
    failures: Sequence[str] = ()
    seconds: float = field(default=0.0, compare=False)


class WrittenFigure(TypedDict):
    """A figure in JSON."""

    case: str
    what: str
    unit: str
    rounds: list[float]
    median: float
    floor: str
    floor_rounds: list[float]
    floor_median: float | None
    ratio: float | None
    aim: str
    is_met: bool | None


class Report(TypedDict):
    """`bench.json`: one run of the benchmarks."""

    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    figures: list[WrittenFigure]
    failures: list[str]
    seconds: dict[str, float]
