"""The request of `bough eval run`, and its violations as problems of files and options."""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, Self

from bough import AsyncClient, InvalidRequest, NotFound
from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_pb2, policy_pb2
from bough_server.agents.definition import Source
from bough_server.cli.definitions import read_definitions
from bough_server.cli.eval.options import EvalArguments
from bough_server.cli.exit_codes import with_commands
from bough_server.cli.fork_changes import read_content
from bough_server.documents.yaml import parse_duration, suggestion
from bough_server.errors import ConfigurationError
from bough_server.evals.results.compare import baseline_of
from bough_server.evals.sets.eval_set import MAX_SET_BYTES, SetSource, parse_eval_set

_RESERVED_BYTES: Final = 64 * 1024
"""Bytes of a request that its other fields may take."""

_BUDGETS: Final = {
    "cost": "cost_nanos",
    "tokens": "tokens",
    "model_calls": "model_calls",
    "tool_calls": "tool_calls",
    "time": "wall_duration",
}
_INDEXED: Final = re.compile(r"(definitions|gates)\[(\d+)\]\.?(.*)")
_OPTIONS: Final = {
    "trials": "--trials",
    "max_concurrency": "--max-concurrency",
    "budget": "--budget",
    "labels": "--label",
    "baseline": "--baseline",
    "request_id": "--request-id",
    "rerun_suspects": "--rerun-suspects",
    "retry_crashed": "--retry-crashed",
    "matrix": "--matrix",
    "agent": "--agent",
}
"""Fields of a request, and the options that set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What a command line asks for, read from its files."""

    arguments: EvalArguments
    source: SetSource
    agents: Sequence[Source]
    budget: policy_pb2.Limits | None
    labels: dict[str, str]
    matrix: eval_set_pb2.EvalMatrix | None

    @classmethod
    def of(cls, arguments: EvalArguments) -> Self:
        """Read what the arguments of a command name. Raises ConfigurationError."""
        return cls(
            arguments=arguments,
            source=parse_eval_set(arguments.set_path),
            agents=read_definitions(arguments.agents) if arguments.agents else (),
            budget=budget_of(arguments.budget),
            labels=pairs_of(arguments.labels, "--label"),
            matrix=matrix_of(arguments.matrix),
        )

    def events(
        self, client: AsyncClient, before: eval_result_pb2.EvalResult | None
    ) -> AsyncIterator[evaluation_pb2.EvaluationEvent]:
        """Start the evaluation and follow it. Raises ConfigurationError if the request is too large to send."""
        arguments = self.arguments
        baseline = None if before is None else baseline_of(before)
        self._check_size(baseline)
        return client.evaluations.run(
            self.source.set,
            agent=arguments.agent,
            definitions=[one.definition for one in self.agents],
            trials=arguments.trials,
            max_concurrency=arguments.max_concurrency,
            gates=arguments.gates,
            budget=self.budget,
            baseline=baseline,
            allow_removed=arguments.allow_removed,
            rerun_suspects=arguments.rerun_suspects,
            retry_crashed=arguments.retry_crashed,
            matrix=self.matrix,
            allow_incomplete_baseline=arguments.allow_incomplete_baseline,
            labels=self.labels,
            request_id=arguments.request_id,
            without_trees=True,  # the result has them
        )

    def _check_size(self, baseline: eval_result_pb2.EvalResult | None) -> None:
        parts = [self.source.set, *(one.definition for one in self.agents), *([] if baseline is None else [baseline])]
        if (size := sum(part.ByteSize() for part in parts)) > MAX_SET_BYTES - _RESERVED_BYTES:
            raise ConfigurationError(
                f"{self.source.path}: The set is {size:,} bytes with the agents and the baseline that are sent with "
                f"it, and a request may be {MAX_SET_BYTES >> 20} MiB: split the set."
            )

    def locate_error(self, error: InvalidRequest | NotFound) -> ConfigurationError | InvalidRequest | NotFound:
        """Rewrite an error as "file:line: field: message", or "--option: message", for each thing that is wrong."""
        if isinstance(error, NotFound):
            if error.reason != "UNKNOWN_AGENT":
                return error
            return ConfigurationError(self._locate_problem("eval_set.agent", with_commands(error.message)))
        if not error.violations:
            return error
        violations = sorted(error.violations, key=lambda one: self._find_line(one.field))
        return ConfigurationError("\n".join(self._locate_problem(one.field, one.description) for one in violations))

    def _find_line(self, field: str) -> int:
        """Return the line of a field of the set; 0 for other fields of the request."""
        return self.source.problem(field.removeprefix("eval_set."), "").line if field.startswith("eval_set") else 0

    def _locate_problem(self, field: str, description: str) -> str:
        description = description.replace("rerun_suspects of", "--rerun-suspects")
        if field == "eval_set.agent" and self.arguments.agent:
            return f"--agent {self.arguments.agent}: {description}"
        if field == "eval_set" or field.startswith("eval_set."):
            return str(self.source.problem(field.removeprefix("eval_set").removeprefix("."), description))
        if match := _INDEXED.fullmatch(field):
            index = int(match[2])
            if match[1] == "definitions" and index < len(self.agents):
                return str(self.agents[index].problem(match[3], description))
            if match[1] == "gates" and index < len(self.arguments.gates):
                return f'--gate "{self.arguments.gates[index]}": {description}'
        option = _OPTIONS.get(re.split(r"[.\[]", field)[0], "")
        description = description.replace("set allow_incomplete_baseline", "add --allow-incomplete-baseline")
        named = "" if option[2:].replace("-", "_") == field else field
        return ": ".join(part for part in (option, named, description) if part)


def budget_of(texts: Sequence[str]) -> policy_pb2.Limits | None:
    """Return the limits that options such as cost=2 and time=10m name. Raises ConfigurationError."""
    if not texts:
        return None
    limits = policy_pb2.Limits()
    for name, value in pairs_of(texts, "--budget").items():
        if name not in _BUDGETS:
            known = ", ".join(_BUDGETS)
            raise ConfigurationError(
                f"--budget {name}: There is no such budget.{suggestion(name, _BUDGETS)} There are {known}."
            )
        try:
            _set_limit(limits, name, value)
        except (ValueError, OverflowError):
            what = "a duration such as 10m" if name == "time" else "a number"
            raise ConfigurationError(f"--budget {name}={value}: must be {what}, and more than 0.") from None
    return limits


def _set_limit(limits: policy_pb2.Limits, name: str, value: str) -> None:
    """Set the limit of a budget. Raises ValueError or OverflowError for a value that is none, or not above 0."""
    if name == "time":
        amount = parse_duration(value)
        limits.wall_duration.FromNanoseconds(amount)
    else:
        amount = round(float(value) * 1e9) if name == "cost" else int(value)
        setattr(limits, _BUDGETS[name], amount)
    if amount <= 0:
        raise ValueError(value)


def matrix_of(texts: Sequence[str]) -> eval_set_pb2.EvalMatrix | None:
    """Return the matrix that options such as model=a,b and instruction=@FILE name. Raises ConfigurationError."""
    if not texts:
        return None
    matrix = eval_set_pb2.EvalMatrix()
    for text in texts:
        axis, sign, values = text.partition("=")
        match axis:
            case "model":
                matrix.model.extend(value.strip() for value in values.split(","))
            case "temperature":
                try:
                    matrix.temperature.extend(map(float, values.split(",")))
                except ValueError:
                    raise ConfigurationError(f"--matrix {text}: must be numbers, as in temperature=0,0.7.") from None
            case "instruction":
                matrix.instruction.append(read_content(values))
            case "agent":
                matrix.agent = values
            case _:
                known = [field.name for field in matrix.DESCRIPTOR.fields]
                raise ConfigurationError(f"--matrix {text}: There is no axis {axis!r}.{suggestion(axis, known)}")
        if not sign or not values:
            raise ConfigurationError(f"--matrix {text}: must be AXIS=VALUES, such as model=small,large.")
    return matrix


def pairs_of(texts: Sequence[str], option: str) -> dict[str, str]:
    """Return the pairs that options such as key=value name. Raises ConfigurationError."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigurationError(f"{option} {text}: must be NAME=VALUE.")
        if name in pairs:
            raise ConfigurationError(f"{option} {text}: There are two values of {name!r}.")
        pairs[name] = value
    return pairs
