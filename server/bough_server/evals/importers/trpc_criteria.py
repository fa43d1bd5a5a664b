"""Criteria of trpc-agent-go: how it compares names, texts and JSON, in the terms of eval sets.

A criterion with a member that this module does not know has no counterpart: it may compare in another way.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Final

from bough.v1.eval_set_pb2 import (
    TRAJECTORY_MODE_ANY_ORDER,
    TRAJECTORY_MODE_EXACT,
    TRAJECTORY_MODE_IN_ORDER,
    TRAJECTORY_MODE_SUPERSET,
    ExpectedAnswer,
    ExpectedTool,
    TrajectoryMode,
    ValueMatcher,
)
from bough_server.evals.importers.conversations import ImportedCall
from bough_server.evals.importers.metrics import ComparesAnswers, ComparesTools, ComparesWords, NoCounterpart
from bough_server.evals.importers.values import JsonObject, JsonValue, Notes, as_json, empty_object, object_at
from bough_server.evals.metrics.tool_names import ANY
from bough_server.matching.regexes import RegexProblem, check_pattern, escape
from bough_server.matching.values import check_matcher

NUMBER_TOLERANCE: Final = 1e-6
"""How far numbers may be apart if the criterion does not say."""

_COMPARISON: Final = ("onlyTree", "ignoreTree", "numberTolerance")
"""The members by which equal values are compared."""

_MOST_CHARACTERS: Final = 2**31 - 1

_MODES: Final[Mapping[tuple[bool, bool], TrajectoryMode.ValueType]] = {
    (True, False): TRAJECTORY_MODE_EXACT,
    (True, True): TRAJECTORY_MODE_IN_ORDER,
    (False, False): TRAJECTORY_MODE_ANY_ORDER,
    (False, True): TRAJECTORY_MODE_SUPERSET,
}
"""The mode by orderSensitive and subsetMatching."""

_DEFAULT_STRATEGY: Final[JsonValue] = {part: {"matchStrategy": "exact"} for part in ("name", "arguments", "result")}


def compares_tools(criterion: JsonObject | None, notes: Notes) -> ComparesTools:
    """Return how a tool trajectory criterion compares calls; without one exactly, in any order.

    Without a criterion a result that the file does not have is any result: older files have none. Raises
    NoCounterpart, and ConfigurationError for values of a wrong type.
    """
    source = criterion or empty_object()
    refuse_unknown(source, "defaultStrategy", "toolStrategy", "orderSensitive", "subsetMatching")
    default = source.child("defaultStrategy") or object_at(source.document, _DEFAULT_STRATEGY)
    by_tool = source.child("toolStrategy") or empty_object()
    strategies = {name: strategy for name in by_tool.list_keys() if (strategy := by_tool.child(name)) is not None}
    for strategy in (default, *strategies.values()):
        _check_strategy(strategy)

    def expect_call(call: ImportedCall) -> ExpectedTool:
        tool = _build_expected_tool(call, strategies.get(call.name, default), notes)
        if criterion is None and call.result is None:
            tool.ClearField("result_match")
        return tool

    mode = _MODES[source.flag("orderSensitive"), source.flag("subsetMatching")]
    return ComparesTools(mode=mode, expected=expect_call)


def compares_answers(criterion: JsonObject) -> ComparesAnswers | ComparesWords:
    """Return how a final response criterion compares answers.

    Raises NoCounterpart, and ConfigurationError for values of a wrong type.
    """
    if (rouge := criterion.child("rouge")) is not None and not rouge.flag("ignore"):
        if others := criterion.unknown("rouge"):
            raise NoCounterpart(f"it has {', '.join(map(repr, sorted(others)))} beside 'rouge'")
        return _compares_words(rouge)
    refuse_unknown(criterion, "text", "json", "rouge")
    text, value = criterion.child("text"), criterion.child("json")
    if text is None and value is None:
        raise NoCounterpart("it says neither text nor json")
    reads_answer = _compares(text) or _compares(value)
    # What skips the comparison may still ask for JSON.
    has_json = _compares(value) or (value is not None and (value.flag("valid") or value.has("schema")))

    def expect_answer(answer: str | None) -> ExpectedAnswer:
        if answer is None and reads_answer:
            return ExpectedAnswer(exact="")  # no answer is expected: both missing is a pass
        wanted = ExpectedAnswer() if text is None else _text_expectation(text, answer or "")
        if value is not None and has_json and not value.flag("ignore"):
            wanted.json.CopyFrom(value_matcher(value, _parse_answer(answer or "") if _compares(value) else None))
        return wanted

    expect_answer("null")  # what is wrong with the criterion itself shows with any answer
    return ComparesAnswers(expected=expect_answer, reads_answer=reads_answer)


def _compares_words(rouge: JsonObject) -> ComparesWords:
    """Return how a ROUGE criterion compares answers: by F1, which has the least that precision and recall imply."""
    known = ("ignore", "rougeType", "measure", "splitSummaries", "threshold", "useStemmer")
    if unknown := rouge.unknown(*known):
        raise NoCounterpart(f"its rouge has {', '.join(map(repr, sorted(unknown)))}")
    if (kind := rouge.text("rougeType")) != "rouge1":
        raise NoCounterpart(f"it counts by {kind!r}, and rouge_1 counts words")
    for name in ("measure", "splitSummaries"):
        rouge.raw(name)  # neither decides what passes
    bounds = rouge.child("threshold") or empty_object()
    precision, recall = (float(bounds.peek_number(name)) for name in ("precision", "recall"))
    implied = 2 * precision * recall / (precision + recall) if precision > 0 and recall > 0 else 0.0
    return ComparesWords(bound=max(bounds.number("f1"), implied))


def _compares(criterion: JsonObject | None) -> bool:
    """Return whether a criterion compares with what is expected."""
    return criterion is not None and not criterion.flag("ignore") and criterion.text("matchStrategy") != "skip"


def value_matcher(criterion: JsonObject, expected: JsonValue) -> ValueMatcher:
    """Return a matcher that compares as a JSON criterion does. Raises NoCounterpart and ConfigurationError."""
    refuse_unknown(criterion, "ignore", *_COMPARISON, "matchStrategy", "valid", "schema")
    if criterion.flag("ignore"):
        return ValueMatcher()
    schema, strategy = criterion.raw("schema"), criterion.text("matchStrategy")
    if strategy == "skip":
        return ValueMatcher() if schema is None else _check(ValueMatcher(schema_json=as_json(schema)))
    if strategy not in ("", "exact"):
        raise NoCounterpart(f"it compares JSON by {strategy!r}")
    if schema is not None:
        raise NoCounterpart("it has a schema beside a value")
    return equal_matcher(criterion, expected, NUMBER_TOLERANCE)


def equal_matcher(criterion: JsonObject, expected: JsonValue, default_tolerance: float) -> ValueMatcher:
    """Return a matcher of values that are equal, but for what trees select or ignore. Raises as value_matcher does."""
    only, ignored = _tree(criterion, "onlyTree"), _tree(criterion, "ignoreTree")
    if only and ignored:
        raise NoCounterpart("it has both onlyTree and ignoreTree, which fails in trpc-agent-go")
    tolerance = criterion.number("numberTolerance", default_tolerance)
    if tolerance < 0:
        raise NoCounterpart("its numberTolerance is less than 0")
    if only:
        return ValueMatcher(schema_json=as_json(_only_schema(only, expected, tolerance)))
    paths = [".".join(path) for path in _find_ignored_paths(ignored)]
    return ValueMatcher(equals_json=as_json(expected), number_tolerance=tolerance, ignore=paths)


def _tree(criterion: JsonObject, name: str) -> Mapping[str, JsonValue]:
    tree = criterion.child(name)
    return {} if tree is None else tree.take_all()


def _check(matcher: ValueMatcher) -> ValueMatcher:
    if problem := check_matcher(matcher):
        raise NoCounterpart(f"its matcher has no counterpart: {problem}")
    return matcher


def _build_expected_tool(call: ImportedCall, strategy: JsonObject, notes: Notes) -> ExpectedTool:
    name = strategy.child("name")
    tool = ExpectedTool(name=call.name) if name is None else _build_expected_name(call.name, name)
    if name is None:
        notes.add(
            f"The strategy of the tool {call.name!r} compares no names, so trpc-agent-go also accepts calls "
            "of other tools; here the name has to be equal."
        )
    if (arguments := strategy.child("arguments")) is not None:
        expected = {} if call.arguments is None else call.arguments  # no arguments are none, however they are written
        _set_matcher(tool.arguments_match, value_matcher(arguments, expected))
    if (result := strategy.child("result")) is not None:
        _set_matcher(tool.result_match, value_matcher(result, call.result))
    return tool


def _build_expected_name(name: str, criterion: JsonObject) -> ExpectedTool:
    """Return the expectation of a name, compared as a text criterion does."""
    how = criterion.text("matchStrategy")
    if criterion.flag("ignore") or how == "skip" or (how == "contains" and not name):
        return ExpectedTool(name=ANY)
    is_folded = criterion.flag("caseInsensitive")
    if how in ("", "exact") and not is_folded:
        return ExpectedTool(name=name)
    pattern = name if how == "regex" else escape(name)
    if how in ("", "exact"):
        pattern = rf"\A{pattern}\z"
    return ExpectedTool(name_regex=_regex(f"(?i){pattern}" if is_folded else pattern))


def _set_matcher(target: ValueMatcher, matcher: ValueMatcher) -> None:
    """Set a matcher, unless it takes any value: a matcher of results would refuse failed calls."""
    if matcher.WhichOneof("expected") is not None:
        target.CopyFrom(matcher)


def _check_strategy(strategy: JsonObject) -> None:
    """Raise NoCounterpart for a strategy that cannot be kept, whatever the calls are."""
    refuse_unknown(strategy, "name", "arguments", "result")
    name = strategy.child("name")
    if name is not None:
        refuse_unknown(name, "ignore", "caseInsensitive", "matchStrategy")
        how = name.text("matchStrategy")
        if not name.flag("ignore") and how not in ("", "exact", "contains", "regex", "skip"):
            raise NoCounterpart(f"it compares names of tools by {how!r}")
    for part in ("arguments", "result"):
        criterion = strategy.child(part)
        if criterion is not None:
            value_matcher(criterion, {})


def _text_expectation(criterion: JsonObject, expected: str) -> ExpectedAnswer:
    refuse_unknown(criterion, "ignore", "caseInsensitive", "matchStrategy", "length")
    if criterion.flag("ignore"):
        return ExpectedAnswer()
    wanted = ExpectedAnswer(ignore_case=criterion.flag("caseInsensitive"))
    match criterion.text("matchStrategy"):
        case "" | "exact":
            wanted.exact = expected
        case "contains":
            wanted.contains.extend([expected] if expected else [])
        case "regex":
            wanted.regex = _regex(expected)
        case "skip":
            pass
        case other:
            raise NoCounterpart(f"it compares texts by {other!r}")
    _set_length(wanted, criterion.child("length"))
    return wanted


def _set_length(wanted: ExpectedAnswer, length: JsonObject | None) -> None:
    if length is None or length.flag("ignore"):
        return
    refuse_unknown(length, "ignore", "min", "max")
    least, most = length.number("min"), length.number("max", -1.0)
    has_most = length.has("max")
    if not (length.has("min") or has_most) or least < 0 or (has_most and most < least):
        raise NoCounterpart("its length has no valid bounds")
    if length.has("min"):
        wanted.min_characters = math.ceil(min(least, _MOST_CHARACTERS))
    if has_most:
        wanted.max_characters = math.floor(min(most, _MOST_CHARACTERS))


def _regex(pattern: str) -> str:
    try:
        check_pattern(pattern)
    except RegexProblem as problem:
        raise NoCounterpart(f"the pattern {pattern[:80]!r} {problem}") from problem
    return pattern


def _find_ignored_paths(tree: Mapping[str, JsonValue]) -> Iterator[tuple[str, ...]]:
    """Yield the paths to what a tree says to ignore. Raises NoCounterpart for names that a path cannot have."""
    for name, value in tree.items():
        if value is False or value is None:
            continue
        if value is not True and not isinstance(value, dict):
            raise NoCounterpart(f"its ignoreTree has {value!r} for {name!r}, which is neither a boolean nor an object")
        if not name or "." in name or name == "*":
            raise NoCounterpart(f"its ignoreTree has the name {name!r}")
        if isinstance(value, dict):
            yield from ((name, *path) for path in _find_ignored_paths(value))
        else:
            yield (name,)


def _only_schema(tree: Mapping[str, JsonValue], expected: JsonValue, tolerance: float) -> JsonValue:
    """Return the JSON Schema of values that are equal to an expected one in what a tree selects."""
    if not isinstance(expected, dict):
        return _equal_schema(expected, tolerance)
    chosen = {name: value for name, value in tree.items() if value is not False}
    properties: dict[str, JsonValue] = {}
    for name, value in chosen.items():
        if name not in expected:
            properties[name] = False  # trpc-agent-go fails too if the expected value lacks it
        elif value is True:
            properties[name] = _equal_schema(expected[name], tolerance)
        elif isinstance(value, dict):
            properties[name] = _only_schema(value, expected[name], tolerance)
        else:
            raise NoCounterpart(f"its onlyTree has {value!r} for {name!r}, which fails in trpc-agent-go")
    return {"type": "object", "required": list(chosen), "properties": properties}


def _equal_schema(expected: JsonValue, tolerance: float) -> JsonValue:
    """Return the JSON Schema of values that are equal to an expected one."""
    if isinstance(expected, dict):
        return {
            "type": "object",
            "required": list(expected),
            "properties": {name: _equal_schema(value, tolerance) for name, value in expected.items()},
            "additionalProperties": False,
        }
    if isinstance(expected, list):
        items = [_equal_schema(value, tolerance) for value in expected]
        # An empty list of schemas is not valid.
        some: dict[str, JsonValue] = {"prefixItems": items} if items else {}
        return {"type": "array", **some, "minItems": len(items), "maxItems": len(items)}
    if isinstance(expected, bool) or not isinstance(expected, int | float):
        return {"const": expected}
    try:
        return {"type": "number", "minimum": expected - tolerance, "maximum": expected + tolerance}
    except OverflowError:  # a whole number beyond the largest float
        return {"const": expected}


def _parse_answer(answer: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(answer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise NoCounterpart("it compares answers as JSON, and the expected answer is none") from error
    return value


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def refuse_unknown(criterion: JsonObject, *known: str) -> None:
    """Raise NoCounterpart for an unknown member; the known ones count as read, whether or not they matter here."""
    if unknown := criterion.unknown(*known):
        raise NoCounterpart(f"it has {', '.join(map(repr, sorted(unknown)))}")
    for name in known:
        criterion.raw(name)
