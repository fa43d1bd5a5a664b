"""What an import leaves out: every member that it does not read is listed with its file, line and path."""

import copy
import json
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from bough_server.errors import ConfigurationError
from bough_server.evals.importers.files import import_documents
from bough_server.evals.importers.left_out import LeftOut, list_lines
from bough_server.evals.importers.values import JsonValue, document_of
from tests.evals.trpc_files import FILES, import_json, metric, trpc_case, trpc_set, turn
from tests.support.examples import examples

MARK = "novelMember"


def source_of(name: str) -> JsonValue:
    value: JsonValue = json.loads((FILES / name).read_text())
    return value


ADK = source_of("elicitation_flow.test.json")
CONFIG: JsonValue = {
    "criteria": {
        "tool_trajectory_avg_score": {"threshold": 1, "match_type": "IN_ORDER"},
        "response_match_score": {"threshold": 0.8},
        "safety_v1": 0.5,
    },
}
TRACE = source_of("trace-basic.evalset.json")
TRAJECTORY = source_of("tooltrajectory-basic.evalset.json")
METRICS = source_of("tooltrajectory-basic.metrics.json")
OLDER: JsonValue = [
    {"query": "Hi", "expected_tool_use": [{"tool_name": "now", "tool_input": {}}], "reference": "Hello"}
]
FULL = trpc_set(
    trpc_case(
        {"userContent": {"content": "Hi"}, "toolMock": {"actual": [{"name": "now", "result": 1}]}},
        sessionInput={"appName": "a", "state": {"n": 1}},
        rubrics=[{"metricName": "q", "id": "2", "content": {"text": "It is kind."}}],
    )
)
JUDGE: JsonValue = [
    {
        "metricName": "q",
        "evaluatorName": "llm_rubric_response",
        "criterion": {
            "llmJudge": {
                "judgeModel": {"modelName": "m", "generationConfig": {"temperature": 0}},
                "rubrics": [{"id": "1", "content": {"text": "It is brief."}}],
            }
        },
    }
]
SETS: list[tuple[JsonValue, JsonValue]] = [
    (ADK, CONFIG),
    (TRACE, None),
    (TRAJECTORY, METRICS),
    (OLDER, None),
    (FULL, JUDGE),
]


def objects_in(value: JsonValue) -> list[dict[str, JsonValue]]:
    """Return the objects in a value, but for those that the project's tools write, which a criterion may ignore."""
    members = value.items() if isinstance(value, dict) else ()
    inner = value if isinstance(value, list) else [each for key, each in members if key not in ("arguments", "result")]
    return [*([value] if isinstance(value, dict) else []), *(found for each in inner for found in objects_in(each))]


@examples(80)
@given(st.sampled_from(range(len(SETS))), st.data(), st.sampled_from([1, "text", {"a": {"b": 2}}, [1]]))
def test_a_member_that_no_importer_knows_is_kept_listed_or_refused(
    number: int, data: st.DataObject, value: JsonValue
) -> None:
    source, metrics = copy.deepcopy(SETS[number])
    data.draw(st.sampled_from([*objects_in(source), *objects_in(metrics)]))[MARK] = value
    try:
        found = import_json(source, metrics, path=Path("a.evalset.json"), judge="m")
        said = [json_format.MessageToJson(found.set), *(each.field for each in found.left_out)]
    except ConfigurationError as error:
        said = [error.message]
    assert any(MARK in text for text in said), said


@pytest.mark.parametrize(("source", "metrics"), [(ADK, CONFIG), (FULL, JUDGE)])
def test_what_an_import_knows_leaves_out_nothing_that_matters(source: JsonValue, metrics: JsonValue) -> None:
    found = import_json(source, metrics, path=Path("a.evalset.json"), judge="m")
    assert [str(each) for each in found.left_out if each.reason] == []


def test_members_of_one_path_are_one_line_with_the_first_place() -> None:
    case = trpc_case({"userContent": {"content": "Hi", "role": "user"}, "contextMessages": [{"content": "x"}]})
    found = import_json(trpc_set(case, case), [], path=Path("a.evalset.json"))
    turn_place = "evalCases[0].conversation[0]"
    assert list(found.left_out) == [
        LeftOut(
            path="a.evalset.json",
            line=12,
            field=f"{turn_place}.contextMessages",
            places=2,
            reason="the agent does not see these messages",
        ),
        LeftOut(path="a.evalset.json", line=10, field=f"{turn_place}.userContent.role", places=2, reason=""),
    ]
    assert list_lines(found.left_out) == [
        "Left out, which can change what is run or scored:",
        f"  a.evalset.json:12: {turn_place}.contextMessages (and 1 more): the agent does not see these messages",
        "Left out with no effect on runs and scores:",
        f"  a.evalset.json:10: {turn_place}.userContent.role (and 1 more)",
    ]


def test_what_is_null_or_empty_is_not_listed() -> None:
    empty: dict[str, JsonValue] = {"rubrics": [], "novel": None, "other": {}, "text": ""}
    found = import_json(trpc_set(trpc_case(turn(), **empty)), [], path=Path("a.evalset.json"))
    assert [each.field for each in found.left_out if "role" not in each.field] == []


def test_the_lines_of_many_unknown_members_are_bounded_and_cannot_control_a_terminal() -> None:
    names = {f"novel{number}": 1 for number in range(60)}
    case = trpc_case(turn(), **{"a\x1b[2J\n\u202e" + "b" * 500: 1}, **names)
    found = import_json(trpc_set(case), [], path=Path("a.evalset.json"))
    lines = list_lines([each for each in found.left_out if each.reason])
    assert lines[1] == (
        "  a.evalset.json:15: evalCases[0].a\\u001b[2J\\n\\u202e" + "b" * 169 + "…: the importer does not know it"
    )
    assert (len(lines), lines[-1]) == (52, "  and 11 more")


def test_a_member_in_both_spellings_is_read_once() -> None:
    text = '{"evalCases": [{"evalId": "one",\n"eval_id": "two", "conversation": [{"userContent": {"content": "Hi"}}]}]}'
    found = import_documents([document_of(text, Path("a.evalset.json"))])
    assert [case.id for case in found.set.cases] == ["one"]
    assert [str(each) for each in found.left_out] == [
        "a.evalset.json:2: evalCases[0].eval_id: the importer does not know it"
    ]


@pytest.mark.parametrize("criterion", [{"text": {"ignore": True, "length": {"min": 1}}}, {"json": {"ignore": True}}])
def test_what_a_criterion_overrules_is_read(criterion: JsonValue) -> None:
    found = import_json(trpc_set(trpc_case(turn())), [metric({"finalResponse": criterion})], path=Path("a.json"))
    assert [each.field for each in found.left_out] == ["evalCases[0].conversation[0].userContent.role"]
