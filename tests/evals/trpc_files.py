"""Eval sets, metrics and calls as trpc-agent-go writes them, and what they are imported as."""

import json
from pathlib import Path

from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.evals.importers.files import Imported, import_documents, import_files
from bough_server.evals.importers.values import JsonValue, document_of
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import problems_of

FILES = Path(__file__).parents[1] / "golden" / "imports"
EXACT: JsonValue = {"matchStrategy": "exact"}


def import_json(
    value: JsonValue, metrics: JsonValue = None, *, path: Path, judge: str = "", user: str = ""
) -> Imported:
    """Import values as files of JSON with a member on each line."""
    documents = [document_of(json.dumps(value, indent=1), path)]
    if metrics is not None:
        documents.append(document_of(json.dumps(metrics, indent=1), Path("metrics.json")))
    return import_documents(documents, judge=judge, user=user)


def say(imported: Imported) -> list[str]:
    """Return what an import says: its decisions, then what it left out that can change what is run or scored."""
    lost = (f"{each.field} ({each.places}): {each.reason}" for each in imported.left_out if each.reason)
    return [*imported.sentences, *lost]


def import_values(
    value: JsonValue, metrics: JsonValue = None, *, path: Path, judge: str = "", user: str = ""
) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    found = import_json(value, metrics, path=path, judge=judge, user=user)
    return found.set, say(found)


def import_paths(paths: list[Path]) -> tuple[eval_set_pb2.EvalSet, list[str]]:
    found = import_files(paths)
    return found.set, say(found)


def set_of(members: dict[str, object]) -> eval_set_pb2.EvalSet:
    return json_format.ParseDict(members, eval_set_pb2.EvalSet())


def trpc_set(*cases: JsonValue) -> JsonValue:
    return {"evalSetId": "basic", "evalCases": list(cases)}


def trpc_case(*turns: JsonValue, **members: JsonValue) -> JsonValue:
    return {"evalId": "one", "conversation": list(turns), **members}


def turn(answer: str | None = None, tools: JsonValue = None, user: str = "hello") -> JsonValue:
    made: dict[str, JsonValue] = {"userContent": {"role": "user", "content": user}}
    if answer is not None:
        made["finalResponse"] = {"role": "assistant", "content": answer}
    return {**made, "tools": tools}


def tool(name: str, arguments: JsonValue = None, result: JsonValue = None) -> JsonValue:
    return {"id": "1", "name": name, "arguments": arguments, "result": result}


def metric(criterion: JsonValue, name: str = "m", **members: JsonValue) -> JsonValue:
    return {"metricName": name, "criterion": criterion, **members}


def imported(source: JsonValue, *metrics: JsonValue, judge: str = "") -> tuple[eval_set_pb2.EvalSet, list[str]]:
    """Import a set, and check that nothing in it but its agent is missing or wrong."""
    eval_set, sentences = import_values(source, list(metrics), path=Path("basic.evalset.json"), judge=judge)
    assert [problem for problem in problems_of(eval_set, known=KnownNames()) if problem[0] != "agent"] == []
    return eval_set, sentences


def only_metric(source: JsonValue, *metrics: JsonValue) -> eval_set_pb2.EvalMetric:
    eval_set, _ = imported(source, *metrics)
    return eval_set.defaults.metrics[0]


def expected_tools(source: JsonValue, *metrics: JsonValue) -> list[eval_set_pb2.ExpectedTool]:
    eval_set, _ = imported(source, *metrics)
    return list(eval_set.cases[0].turns[0].expect.tools)


def expected_answer(criterion: JsonValue, answer: str | None) -> eval_set_pb2.ExpectedAnswer:
    eval_set, _ = imported(trpc_set(trpc_case(turn(answer))), metric({"finalResponse": criterion}, threshold=1))
    assert eval_set.defaults.metrics[0].HasField("final_response")
    return eval_set.cases[0].turns[0].expect.answer


def matcher(value: JsonValue, *ignore: str, tolerance: float = 1e-6) -> dict[str, object]:
    return {
        "equals_json": json.dumps(value, separators=(",", ":")),
        "number_tolerance": tolerance,
        "ignore": list(ignore),
    }


def mapped(member: str, criterion: JsonValue, call: JsonValue) -> eval_set_pb2.ExpectedTool:
    """Return an expected call whose arguments or result are compared by a criterion."""
    strategy: JsonValue = {"name": EXACT, member: criterion}
    found = expected_tools(
        trpc_set(trpc_case(turn(tools=[call]))), metric({"toolTrajectory": {"defaultStrategy": strategy}})
    )
    return found[0]


def members_of(value: JsonValue) -> dict[str, JsonValue]:
    assert isinstance(value, dict)
    return value
