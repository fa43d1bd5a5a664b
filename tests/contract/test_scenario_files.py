"""The files of scenarios: what is wrong with one is said with its place, and the laws that comparisons follow."""

from pathlib import Path

import pytest

from tests.contract.matching import differences, event_differences, filled, found
from tests.contract.play import plays
from tests.contract.scenario_files import ExpectedEvent, ScenarioError, read_group, read_groups

SMALLEST = """
server: {agents: []}
scenarios:
  - name: one
    steps: [{STEP}]
"""


def error_of(text: str, tmp_path: Path) -> str:
    """Read a file of this text, which must not be valid; return what is said about it."""
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        read_group(path)
    return str(caught.value)


def step_error(step: str, tmp_path: Path) -> str:
    """The same of a step."""
    return error_of(SMALLEST.replace("STEP", step), tmp_path)


def test_there_are_enough_scenarios_and_each_has_a_name_of_its_own() -> None:
    names = [scenario.name for group in read_groups() for scenario in group.scenarios]
    assert len(names) >= 25
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("call: AgentService.GetRun, expects: {}", ".expects: Extra inputs are not permitted"),
        (
            "call: AgentService.GetRun, expect: {end: {rejoins: maybe}}",
            ".expect.end.rejoins: Input should be 'none', 'some' or 'any'",
        ),
        (
            "call: AgentService.Run, request: {}",
            ": Value error, a call that streams events needs expect.events",
        ),
        ("tree: a, call: AgentService.GetRun", ": Value error, exactly one of call, tree and do is needed"),
        ("do: [{cut: true, kill: true}]", ".do.0: Value error, exactly one action is needed"),
    ],
)
def test_what_is_wrong_with_a_step_is_said_with_its_place(step: str, error: str, tmp_path: Path) -> None:
    assert step_error(step, tmp_path) == f"bad.yaml: scenario 'one'.steps.0{error}"


def test_every_error_of_a_file_is_said(tmp_path: Path) -> None:
    text = "server: {}\nscenarios:\n  - {name: one, steps: []}\n  - {steps: [{}], nme: two}\n"
    assert [line.partition(": ")[2].split(": ")[0] for line in error_of(text, tmp_path).splitlines()] == [
        "scenario 'one'.steps",
        "scenario 1.name",
        "scenario 1.steps.0",
        "scenario 1.nme",
    ]


def test_a_scenario_can_be_of_some_languages_only() -> None:
    group = next(group for group in read_groups() if group.name == "waiting")
    scenario = next(one for one in group.scenarios if list(one.languages) == ["python", "go", "typescript"])
    played = [parameters.values[1] for parameters in plays([group]) if parameters.values[2] == scenario]
    assert played == ["python", "go", "typescript"]


def test_a_file_that_is_no_yaml_or_empty_or_repeats_a_name_is_an_error(tmp_path: Path) -> None:
    assert "line 2" in error_of("a: [\n}", tmp_path)
    assert error_of("", tmp_path).splitlines()[0] == "bad.yaml: server: Field required"
    twice = SMALLEST.replace("STEP", "tree: a") + "  - name: one\n    steps: [{tree: b}]\n"
    assert error_of(twice, tmp_path) == "bad.yaml: several scenarios have the name 'one'"


@pytest.mark.parametrize(
    ("expected", "actual", "problems"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, []),
        ({"a": 1}, {"a": "1"}, []),
        ({"a": 1}, {"a": 2}, ["a is 2 instead of 1"]),
        ({"a": True}, {"a": 1}, ["a is 1 instead of True"]),
        ({"a": 0, "b": "", "c": False}, {}, []),
        ({"a": [1]}, {"a": [1, 2]}, ["a is [1, 2] instead of 1 items: [1]"]),
        ({"a": [{"b": "~ ^x"}]}, {"a": [{"b": "yx"}]}, ["a.0.b is 'yx', which '^x' does not match"]),
        ({"a": {"b": 1}}, {"a": 1}, ["a is 1 instead of a mapping"]),
        ({"a": "any"}, {}, []),
    ],
)
def test_an_expectation_names_what_must_be_there(expected: object, actual: object, problems: list[str]) -> None:
    assert list(differences(expected, actual)) == problems


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        (["a", "b", "c"], ""),
        (["...", "c"], ""),
        (["a", "..."], ""),
        (["a", "...", {"is": "c", "of": "lead", "with": {"text": "hi"}}], ""),
        (["a", "b"], "events follow that are not expected: c"),
        (["a", "c"], "event 2: it is b instead of c"),
        (["a", "b", "c", "d"], "event 4: no further event"),
        (["...", "d"], "no event fits 'd'"),
        (["...", {"is": "c", "of": "helper"}], "no event fits"),
        (["c", "..."], "event 1: it is a instead of c"),
    ],
)
def test_events_are_expected_in_order_with_gaps_where_there_are_dots(expected: list[object], problem: str) -> None:
    events = [{"agent": "lead", "a": {}}, {"agent": "lead", "b": {}}, {"agent": "lead", "c": {"text": "hi"}}]
    wanted = [one if isinstance(one, str) else ExpectedEvent.model_validate(one) for one in expected]
    problems = list(event_differences(wanted, events, ["a", "b", "c"]))
    assert "".join(problems).startswith(problem)
    assert bool(problems) == bool(problem)


def test_variables_are_filled_in_and_values_are_found_by_their_paths() -> None:
    assert filled({"a": ["${n}", "x-${n}"]}, {"n": 3}) == {"a": [3, "x-3"]}
    assert found("events.-1.n", {"events": [{"n": 1}, {"n": 2}]}) == 2
    with pytest.raises(KeyError, match=r"nothing at a\.b"):
        found("a.b", {"a": {}})
