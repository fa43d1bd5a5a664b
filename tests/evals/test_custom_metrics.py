"""Custom metrics: functions of the operator's, what they may be, and what becomes of what they raise or return."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import structlog

import bough_server
from bough.v1.eval_result_pb2 import (
    VERDICT_FAILED,
    VERDICT_NOT_EVALUATED,
    VERDICT_PASSED,
    MetricScore,
)
from bough.v1.eval_set_pb2 import CustomMetric, EvalCase, EvalMetric
from bough.v1.invocation_pb2 import Invocation
from bough_server.agents.loading import load_python
from bough_server.errors import ConfigurationError
from bough_server.evals.metrics.custom import MetricFunction, MetricValue, load_metrics, metric, score_custom
from bough_server.observability.logs import get_code_stack
from tests.evals.records import case_of, did, record


def judge(
    function: Callable[..., object] | MetricFunction, *runs: Invocation, config_json: str = "", threshold: float = 1
) -> MetricScore:
    made = function if isinstance(function, MetricFunction) else metric(name="judge")(function)  # type: ignore[arg-type]
    configured = EvalMetric(
        name="mine", threshold=threshold, custom=CustomMetric(name=made.name, config_json=config_json)
    )
    case = case_of(*[None] * len(runs), metrics=[configured])
    return score_custom(configured, made, case, runs)


def test_a_function_keeps_its_name_and_is_still_callable() -> None:
    @metric
    def calls_little(invocation: Invocation, case: EvalCase) -> bool:
        return len(invocation.tools) < 2

    @metric(name="other")
    def described(invocation: Invocation, case: EvalCase, config: Mapping[str, object]) -> tuple[float, str]:
        return float(len(config)), case.id

    assert (calls_little.name, described.name) == ("calls_little", "other")
    assert calls_little(record(), EvalCase()) is True
    assert described(record(), EvalCase(id="a"), {"n": 1}) == (1.0, "a")
    assert bough_server.metric is metric


@pytest.mark.parametrize(
    ("returned", "value", "reason"),
    [(True, 1, ""), (False, 0, ""), (0.25, 0.25, ""), (3, 3, ""), ((0.5, "Half of it."), 0.5, "Half of it.")],
)
def test_a_score_is_a_number_or_a_claim_with_or_without_a_reason(returned: object, value: float, reason: str) -> None:
    found = judge(lambda invocation, case: returned, record())
    assert (found.name, found.score, found.reason) == ("mine", value, reason)
    assert found.verdict == (VERDICT_PASSED if value >= 1 else VERDICT_FAILED)


def test_the_score_is_the_mean_over_all_turns() -> None:
    def share(invocation: Invocation, case: EvalCase) -> MetricValue:
        return len(invocation.tools) / 4, f"{len(invocation.tools)} calls in {case.id}"

    found = judge(share, record(did("a")), record(did("a"), did("b")), threshold=0.375)
    assert (found.score, found.verdict, found.threshold) == (0.375, VERDICT_PASSED, 0.375)
    assert found.reason == "turns[0]: 1 calls in one. turns[1]: 2 calls in one."


def test_a_function_gets_copies_and_its_configuration() -> None:
    def spoil(invocation: Invocation, case: EvalCase, config: Mapping[str, object]) -> bool:
        invocation.Clear()
        case.Clear()
        return config == {"words": ["a"]}

    run = record(did("a"))
    before = run.SerializeToString(deterministic=True)
    assert judge(spoil, run, config_json='{"words": ["a"]}').score == 1
    assert judge(lambda invocation, case, config: config == {}, run).score == 1
    assert run.SerializeToString(deterministic=True) == before


def test_a_configuration_that_a_function_does_not_take_is_not_scored() -> None:
    found = judge(lambda invocation, case: 1, record(), config_json='{"a": 1}')
    assert (found.verdict, found.HasField("score")) == (VERDICT_NOT_EVALUATED, False)
    assert found.reason == "The metric 'judge' takes no configuration: give its function a third parameter."


@pytest.mark.parametrize(("config", "words"), [("[]", "must be one JSON object."), ("{", "Expecting property name")])
def test_a_configuration_that_is_no_object_is_not_scored(config: str, words: str) -> None:
    found = judge(lambda invocation, case, config: 1, record(), config_json=config)
    assert found.verdict == VERDICT_NOT_EVALUATED
    assert words in found.reason


@pytest.mark.parametrize("error", [ValueError("no \ud800 luck"), SystemExit(3), KeyboardInterrupt(), RecursionError()])
def test_an_exception_is_not_scored_and_logged_whole(error: BaseException) -> None:
    def fails(invocation: Invocation, case: EvalCase) -> bool:
        raise error

    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        found = judge(fails, record(), record())
    text = f"{type(error).__name__}: {error}".removesuffix(": ").encode(errors="replace").decode()
    assert (found.verdict, found.HasField("score")) == (VERDICT_NOT_EVALUATED, False)
    assert found.reason == f"turns[0]: The metric 'judge' raised {text}."
    expected = {
        "event": "metric failed",
        "exc_info": get_code_stack(error),
        "metric": "judge",
        "case_id": "one",
        "run_id": "",
    }
    assert lines == [{**expected, "log_level": "error"}]


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, "NoneType"),
        ("1", "str"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ((1,), "tuple"),
        ((1, 2), "tuple"),
        (1j, "complex"),
    ],
)
def test_what_is_no_score_is_not_scored(returned: object, shown: str) -> None:
    found = judge(lambda invocation, case: returned, record())
    assert (found.verdict, found.HasField("score")) == (VERDICT_NOT_EVALUATED, False)
    words = "it must return a number, True or False, or one of them with a text."
    assert found.reason == f"The metric 'judge' returned {shown}; {words}"


def test_a_trial_without_turns_is_not_scored() -> None:
    assert judge(lambda invocation, case: 1).reason == "No turn was run."


def test_a_number_beyond_floats_and_a_coroutine_are_not_scored() -> None:
    async def waits() -> float:
        return 1

    assert judge(lambda invocation, case: 10**400, record()).verdict == VERDICT_NOT_EVALUATED
    assert "returned coroutine" in judge(lambda invocation, case: waits(), record()).reason


async def _waits(invocation: Invocation, case: EvalCase) -> float:
    return 1


def _yields(invocation: Invocation, case: EvalCase):  # type: ignore[no-untyped-def]
    yield 1


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (_waits, "", "'_waits' must be a plain `def`: metrics run in a thread, where they may wait for anything."),
        (_yields, "", "'_yields' must return its result, not yield it."),
        (
            lambda case: 1,
            "short",
            "'short' must be `def short(invocation, case)` or `def short(invocation, case, config)`.",
        ),
        (lambda invocation, case: 1, "", "'<lambda>' is not a valid name of a metric"),
        (7, "seven", "@metric takes a function, not a int."),
    ],
)
def test_what_cannot_be_a_metric_is_refused(function: Callable[..., MetricValue], name: str, words: str) -> None:
    with pytest.raises(TypeError) as refused:
        metric(name=name)(function)
    assert str(refused.value).startswith(words)


def test_metrics_are_found_in_the_operators_modules(tmp_path: Path) -> None:
    code = "from bough_server import metric\n\n@metric\ndef polite(invocation, case):\n    return 'please' in case.id\n"
    (tmp_path / "desk_metrics.py").write_text(code)
    (tmp_path / "desk_again.py").write_text("from desk_metrics import polite\nother = polite\n")
    found = load_metrics(["desk_metrics", "desk_again"], tmp_path)
    assert list(found) == ["polite"]
    assert found["polite"](record(), EvalCase(id="please")) is True
    assert load_python(["desk_metrics"], tmp_path).functions == ()
    (tmp_path / "desk_twice.py").write_text(code)
    with pytest.raises(ConfigurationError, match=r"desk_twice: There are two metrics named 'polite'\."):
        load_metrics(["desk_metrics", "desk_twice"], tmp_path)
