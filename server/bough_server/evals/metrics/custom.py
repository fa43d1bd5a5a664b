"""Custom metrics: functions of the operator's Python modules that judge a turn, registered by @metric."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from numbers import Real
from pathlib import Path
from typing import Final, TypeAlias, overload

import structlog

from bough.v1 import eval_result_pb2
from bough.v1.eval_set_pb2 import EvalCase, EvalMetric
from bough.v1.invocation_pb2 import Invocation
from bough_server.agents.loading import load_values
from bough_server.errors import text_of_error
from bough_server.evals.metrics.turn import TurnScore, mean_score, no_score, no_turn_score
from bough_server.functions import NAME
from bough_server.matching.values import parse_json
from bough_server.messages import copy_of
from bough_server.observability.logs import get_code_stack

MetricValue: TypeAlias = float | bool | tuple[float | bool, str]
"""A score, or a score and the reason for it. True is 1, False is 0."""

_Function: TypeAlias = Callable[[Invocation, EvalCase], MetricValue]
_Configured: TypeAlias = Callable[[Invocation, EvalCase, Mapping[str, object]], MetricValue]

_TAKES_CONFIGURATION: Final = 3

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFunction:
    """A function that judges one turn of a case, made by `@metric`; callable like the wrapped function."""

    name: str
    function: Callable[..., MetricValue]
    takes_configuration: bool
    """Whether its third parameter is the configuration of the metric that calls it."""

    def __call__(self, invocation: Invocation, case: EvalCase, *configuration: Mapping[str, object]) -> MetricValue:
        return self.function(invocation, case, *configuration)


@overload
def metric(function: _Function | _Configured, /) -> MetricFunction: ...


@overload
def metric(*, name: str) -> Callable[[_Function | _Configured], MetricFunction]: ...


def metric(
    function: _Function | _Configured | None = None, /, *, name: str = ""
) -> MetricFunction | Callable[[_Function | _Configured], MetricFunction]:
    """Make `def name(invocation, case)` a metric that the `custom` metrics of eval sets can name.

    It returns the score of a turn, a number or True or False, or a score and the reason for it. With a third parameter
    it gets the metric's configuration. Raises TypeError.
    """

    def make(function: _Function | _Configured) -> MetricFunction:
        return _build_metric_function(function, name)

    return make if function is None else make(function)


def load_metrics(module_names: Iterable[str], folder: Path) -> Mapping[str, MetricFunction]:
    """Return the functions that modules register, by name.

    Raises ConfigurationError with the module and the line if an import fails, and if two have the same name.
    """
    return load_values(MetricFunction, module_names, folder, what="metrics")


def score_custom(
    metric: EvalMetric, function: MetricFunction, case: EvalCase, invocations: Sequence[Invocation]
) -> eval_result_pb2.MetricScore:
    """Return the mean of a function over all turns; not judged if it raises, or returns no score, for one of them.

    The function runs in the calling thread, on copies.
    """
    try:
        configuration = _configuration(metric, function)
    except ValueError as error:
        return no_score(metric, str(error))
    scores: dict[int, TurnScore] = {}
    for index, invocation in enumerate(invocations):
        with structlog.contextvars.bound_contextvars(case_id=case.id, run_id=invocation.run_id):
            scores[index] = _turn_score(function, invocation, case, configuration)
        if scores[index].value is None:
            break
    return mean_score(metric, case, scores) or no_score(metric, "No turn was run.")


def _configuration(metric: EvalMetric, function: MetricFunction) -> Sequence[Mapping[str, object]]:
    """Return what a function gets beside the turn and the case. Raises ValueError with a sentence."""
    text = metric.custom.config_json
    if not function.takes_configuration:
        if text:
            message = f"The metric {function.name!r} takes no configuration: give its function a third parameter."
            raise ValueError(message)
        return ()
    configuration = parse_json(text or "{}")
    if not isinstance(configuration, dict):
        raise ValueError(f"The configuration of the metric {function.name!r} must be one JSON object.")
    return (configuration,)


def _turn_score(
    function: MetricFunction, invocation: Invocation, case: EvalCase, configuration: Sequence[Mapping[str, object]]
) -> TurnScore:
    try:
        found: object = function(copy_of(invocation), copy_of(case), *configuration)
        value, reason = found if isinstance(found, tuple) and len(found) == 2 else (found, "")
        number = float(value) if isinstance(value, Real) else nan
    except BaseException as error:  # whatever its class: a function must not end the server
        _log.error("metric failed", exc_info=get_code_stack(error), metric=function.name)
        text = f"{type(error).__name__}: {text_of_error(error)}".removesuffix(": ")
        return no_turn_score(_unicode(f"The metric {function.name!r} raised {text[:500]}"))
    if not isfinite(number) or not isinstance(reason, str):
        if inspect.iscoroutine(found):
            found.close()  # else Python warns that it was never awaited
        words = "it must return a number, True or False, or one of them with a text"
        return no_turn_score(f"The metric {function.name!r} returned {_describe_value(found)}; {words}.")
    return TurnScore(value=number, reason=_unicode(reason))


def _build_metric_function(function: _Function | _Configured, name: str) -> MetricFunction:
    if not callable(function):
        raise TypeError(f"@metric takes a function, not a {type(function).__name__}.")
    name = name or getattr(function, "__name__", "")
    if not NAME.fullmatch(name):
        raise TypeError(
            f"{name!r} is not a valid name of a metric: use a letter, then up to 63 letters, digits, _ or -, or pass "
            "name=."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name!r} must be a plain `def`: metrics run in a thread, where they may wait for anything.")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{name!r} must return its result, not yield it.")
    parameters = next((count for count in (2, _TAKES_CONFIGURATION) if _takes(function, count)), 0)
    if not parameters:
        raise TypeError(f"{name!r} must be `def {name}(invocation, case)` or `def {name}(invocation, case, config)`.")
    return MetricFunction(name=name, function=function, takes_configuration=parameters == _TAKES_CONFIGURATION)


def _takes(function: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _describe_value(found: object) -> str:
    return str(found) if isinstance(found, float) else type(found).__name__


def _unicode(text: str) -> str:
    """Replace unpaired surrogates, which a result cannot hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()
