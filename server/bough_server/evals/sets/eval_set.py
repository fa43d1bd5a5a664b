"""Eval sets: read from files, written, digested, and their cases with the set's defaults."""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import eval_set_pb2, evaluation_pb2
from bough_server.documents.messages import FieldLines, message_yaml, read_message
from bough_server.documents.yaml import DocumentBounds, raise_problems, read_documents
from bough_server.errors import Problem
from bough_server.evals.metrics.rubrics import fill_rubrics
from bough_server.evals.sets.cases_from import KEY, CaseLines, read_cases

MAX_SET_BYTES: Final = 8 * 1024 * 1024
"""The most bytes of a set, as a file and as a message: the largest request."""

_CASE: Final = re.compile(r"cases\[(\d+)\]\.?")

_BOUNDS: Final = DocumentBounds(file_bytes=MAX_SET_BYTES, values=1_000_000)
_DEFAULT_TIMEOUT: Final = Duration(seconds=600)
_DEFAULT_MAX_TURNS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSource(FieldLines):
    """An eval set of a file, and the line of each of its fields."""

    set: eval_set_pb2.EvalSet
    rows: CaseLines | None = None
    """The lines of the cases that come from a file of rows; None if the set names no such file."""

    def problem(self, field_path: str, description: str) -> Problem:
        """Return a problem at a field, located in the file of rows if it is of a case that comes from there."""
        found = _CASE.match(field_path)
        if found and self.rows is not None and (line := self.rows.find(int(found[1]))):
            inner = field_path[found.end() :]
            return Problem(path=self.rows.path, line=line, field=inner, description=description)
        return FieldLines.problem(self, field_path, description)


def read_eval_set(path: Path) -> tuple[SetSource, list[Problem]]:
    """Return the set of a file, as far as it can be read, and every problem with how it is written.

    The cases include those of the rows that `cases_from` names. Raises ConfigurationError for a file that is missing,
    too large, or neither YAML nor JSON.
    """
    documents = read_documents(path, _BOUNDS)
    eval_set = eval_set_pb2.EvalSet()
    if len(documents) != 1:
        held = f"{len(documents)} documents; a file holds one eval set" if documents else "no eval set"
        problem = Problem(path=str(path), line=1, field="", description=f"The file has {held}.")
        return SetSource(set=eval_set, path=str(path)), [problem]
    required = "must be a mapping with `name`, `agent` and `cases`"
    document, value = documents[0], documents[0].value
    has_rows = isinstance(value, dict) and KEY in value
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if name != KEY}
    lines, problems = read_message(replace(document, value=value), eval_set, required=required, null_is_json=True)
    rows = None
    if has_rows:
        lines.setdefault("cases", document.line((KEY,)))
        rows, found = read_cases(document, eval_set, max_bytes=MAX_SET_BYTES)
        problems += found
    return SetSource(set=eval_set, path=str(path), lines=lines, rows=rows), problems


def parse_eval_set(path: Path) -> SetSource:
    """Return the set of a file. Raises ConfigurationError with every problem of how it is written."""
    source, problems = read_eval_set(path)
    raise_problems(problems)
    return source


def eval_set_yaml(eval_set: eval_set_pb2.EvalSet) -> str:
    """Return a set as YAML, as an author would write it."""
    return message_yaml(eval_set)


def set_digest(eval_set: eval_set_pb2.EvalSet) -> str:
    """Return the SHA-256 hex digest of a set's content; equal content has equal digests."""
    return hashlib.sha256(eval_set.SerializeToString(deterministic=True)).hexdigest()


def plan_cases(eval_set: eval_set_pb2.EvalSet, *, trials: int | None) -> list[evaluation_pb2.CasePlanned]:
    """Return the cases with the set's defaults: metrics, timeouts, and how many trials each has.

    `trials` takes precedence over what the set says. A case of recorded invocations is scored once: nothing
    runs, and to score the same record again would prove nothing more.
    """
    return [_plan_case(case, eval_set.defaults, trials) for case in eval_set.cases]


def is_recorded(case: eval_set_pb2.EvalCase) -> bool:
    """Return whether a case is scored by recorded invocations instead of runs."""
    return any(turn.HasField("recorded") for turn in case.turns)


def max_turns_of(user: eval_set_pb2.SimulatedUser) -> int:
    """Return how many turns a conversation with a simulated user has at most, the opening ones included."""
    return user.max_turns if user.HasField("max_turns") else _DEFAULT_MAX_TURNS


def metric_name(metric: eval_set_pb2.EvalMetric) -> str:
    """Return the name of a metric, by default that of its function, else of its kind; empty without a kind."""
    return metric.name or metric.custom.name or metric.WhichOneof("kind") or ""


def merge_metrics(
    case: eval_set_pb2.EvalCase, defaults: eval_set_pb2.EvalDefaults
) -> dict[str, eval_set_pb2.EvalMetric]:
    """Return the metrics of a case by name: the defaults, of which the case's own replace those of the same name."""
    return {metric_name(metric): metric for metric in (*defaults.metrics, *case.metrics)}


def _plan_case(
    case: eval_set_pb2.EvalCase, defaults: eval_set_pb2.EvalDefaults, trials: int | None
) -> evaluation_pb2.CasePlanned:
    merged = eval_set_pb2.EvalCase()
    merged.CopyFrom(case)
    del merged.metrics[:]
    merged.metrics.extend(merge_metrics(case, defaults).values())
    for metric in merged.metrics:
        if metric.HasField("llm_judge"):
            fill_rubrics(metric.llm_judge)
    if not merged.HasField("timeout"):
        merged.timeout.CopyFrom(defaults.timeout if defaults.HasField("timeout") else _DEFAULT_TIMEOUT)
    if not (merged.faults or is_recorded(case)):
        merged.faults.extend(defaults.faults)
    if (merged.mocks.tools or merged.mocks.run_id) and not merged.mocks.HasField("strict"):
        merged.mocks.strict = True
    return evaluation_pb2.CasePlanned(eval_case=merged, trials=count_trials(case, defaults, trials=trials))


def count_trials(case: eval_set_pb2.EvalCase, defaults: eval_set_pb2.EvalDefaults, *, trials: int | None = None) -> int:
    """Return how many trials a case has; `trials` takes precedence over what the set says."""
    if is_recorded(case):
        return 1
    if trials is not None:
        return trials
    return next((holder.trials for holder in (case, defaults) if holder.HasField("trials")), 1)
