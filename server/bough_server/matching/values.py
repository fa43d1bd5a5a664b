"""Compare JSON values and texts with the matchers of eval sets, and say in a sentence how they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import Final, TypeAlias

from bough.v1 import eval_set_pb2
from bough_server.matching.placeholders import has_text, is_text, matches_anything, redact_like
from bough_server.matching.regexes import RegexProblem, check_pattern, is_found
from bough_server.matching.schemas import schema_mistakes, value_path, value_schema_problem
from bough_server.matching.secrets import REDACTED
from bough_server.matching.work import TooMuchWork, limit_work, spend

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_Steps: TypeAlias = tuple[str, ...]
"""The rest of an ignored path: names of members, or "*"."""

MAX_SENTENCE: Final = 600
"""The most characters of the sentences that say how a value differs."""

MOST_NAMED: Final = 5
"""The most differences that are named."""

_SHOWN: Final = 90
"""The most characters of a value, and of a path, in such a sentence."""

_CALL_STEPS: Final = 200
"""The steps of a comparison beside those for its bytes."""
MAX_SCHEMA_BYTES: Final = 64 * 1024
"""The most bytes of a JSON Schema."""
_SCHEMA_STEPS: Final = 200
"""The steps to check a byte of a schema itself."""

_ANY: Final = "*"
_TOO_DEEP: Final = "it is nested too deeply to be compared"


def mismatch(matcher: eval_set_pb2.ValueMatcher, value_json: str) -> str:
    """Return how a JSON text differs from what is expected, without a period; empty if it matches.

    The first differences are named, in the order of the expected value. A text that is not JSON is compared as a JSON
    string. So are texts with NaN or Infinity, which JSON does not have. Raises TooMuchWork.
    """
    # Each value is compared with each of the paths that lead to it.
    spend(_CALL_STEPS + (matcher.ByteSize() + len(value_json)) * (1 + len(matcher.ignore) // 8))
    try:
        return _truncate(_mismatch(matcher, value_json), MAX_SENTENCE)
    except RecursionError:
        return _TOO_DEEP


def answer_mismatch(expected: eval_set_pb2.ExpectedAnswer, text: str) -> str:
    """Return every way in which an answer differs from what is expected, without a period; empty if it matches."""
    return _truncate("; ".join(_answer_mismatches(expected, text)), MAX_SENTENCE)


def check_matcher(matcher: eval_set_pb2.ValueMatcher) -> str:
    """Return what is wrong with a matcher, as a sentence; empty if nothing is."""
    kind = matcher.WhichOneof("expected")
    if kind in ("equals_json", "subset_json"):
        problem = _json_problem(getattr(matcher, kind))
    elif kind == "schema_json":
        problem = _new_schema_problem(matcher.schema_json)
    elif kind == "regex":
        problem = regex_problem(matcher.regex) if matcher.regex else "is empty, so that every value matches it."
    else:
        problem = ""
    if problem:
        return f"{kind} {problem}"
    if not (isfinite(matcher.number_tolerance) and matcher.number_tolerance >= 0):
        return "number_tolerance must be a number from 0."
    wrong = next((path for path in matcher.ignore if not all(path.split("."))), None)
    return "" if wrong is None else f"ignore has {wrong!r}, which is not names separated by dots, such as items.*.id."


def check_answer(expected: eval_set_pb2.ExpectedAnswer) -> str:
    """Return what is wrong with an expected answer, as a sentence; empty if nothing is."""
    if problem := regex_problem(expected.regex):
        return f"regex {problem}"
    for name in ("contains", "excludes"):
        if "" in getattr(expected, name):
            return f"{name} has an empty text, which every answer contains."
    if any(REDACTED in part and not part.replace(REDACTED, "").strip() for part in expected.contains):
        return (
            f"contains has {REDACTED} alone, which is in every answer if members of JSON are redacted: "
            "write the text around it."
        )
    if expected.HasField("max_characters") and expected.min_characters > expected.max_characters:
        return f"max_characters must not be less than min_characters, which is {expected.min_characters:,}."
    return check_matcher(expected.json) if expected.HasField("json") else ""


def parse_json(text: str) -> JsonValue:
    """Return the value of a JSON text. Raises ValueError if it is none, also for NaN and Infinity."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _mismatch(matcher: eval_set_pb2.ValueMatcher, value_json: str) -> str:
    match matcher.WhichOneof("expected"):
        case "equals_json":
            return _difference(matcher, matcher.equals_json, value_json, is_subset=False)
        case "subset_json":
            return _difference(matcher, matcher.subset_json, value_json, is_subset=True)
        case "regex":
            return _regex_mismatch(matcher.regex, value_json)
        case "schema_json":
            with limit_work():  # apart: whether it is checked once more depends on what was compared before
                problem = _schema_problem(matcher.schema_json)
            if problem:
                return f"the expected schema_json {problem}".rstrip(".")
            return "; ".join(schema_mistakes(_parse_or_keep(value_json), matcher.schema_json, is_bounded=True))
        case None:
            return ""


def _difference(matcher: eval_set_pb2.ValueMatcher, expected_json: str, value_json: str, *, is_subset: bool) -> str:
    try:
        expected = parse_json(expected_json)
    except ValueError as error:
        return f"the expected value is not JSON: {error}"
    ignored = [tuple(path.split(".")) for path in matcher.ignore]
    comparison, wanted = (
        _Comparison(is_subset=is_subset, tolerance=matcher.number_tolerance),
        _without(expected, ignored),
    )
    found: list[str] = []
    for text in dict.fromkeys((value_json, redact_like(expected_json, value_json))):
        differences = comparison.differences(wanted, _without(_parse_or_keep(text), ignored), ())
        # One more says whether there are more; to count them all would be to write them all.
        found = list(islice(differences, MOST_NAMED + 1))
        if not found:
            break
    return "; ".join([*found[:MOST_NAMED], *(["and more"] if len(found) > MOST_NAMED else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """How two values are compared."""

    is_subset: bool
    tolerance: float

    def differences(self, expected: JsonValue, actual: JsonValue, path: tuple[str | int, ...]) -> Iterator[str]:
        """Yield the differences in the order of the expected value, then those of members that are not expected."""
        if isinstance(expected, dict) and isinstance(actual, dict):
            yield from self._of_objects(expected, actual, path)
        elif isinstance(expected, list) and isinstance(actual, list):
            yield from self._of_lists(expected, actual, path)
        elif not self._are_equal(expected, actual):
            yield f"{_place(path)} is {_excerpt(actual)}, expected {_excerpt(expected)}"

    def _of_objects(
        self, expected: Mapping[str, JsonValue], actual: Mapping[str, JsonValue], path: tuple[str | int, ...]
    ) -> Iterator[str]:
        for name, value in expected.items():
            if name in actual:
                yield from self.differences(value, actual[name], (*path, name))
            else:
                yield f"{_place((*path, name))} is missing, expected {_excerpt(value)}"
        extra = [] if self.is_subset else [name for name in actual if name not in expected]
        for name in extra:
            yield f"{_place((*path, name))} is {_excerpt(actual[name])}, which is not expected"

    def _of_lists(
        self, expected: Sequence[JsonValue], actual: Sequence[JsonValue], path: tuple[str | int, ...]
    ) -> Iterator[str]:
        if len(expected) != len(actual):
            yield f"{_place(path)} has {_items(len(actual))}, expected {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=False)):
            yield from self.differences(one, other, (*path, index))

    def _are_equal(self, expected: JsonValue, actual: JsonValue) -> bool:
        if matches_anything(expected):
            return True
        if isinstance(expected, str) and isinstance(actual, str):
            return is_text(expected, actual)
        # Python takes True for 1; in JSON a boolean is not a number.
        if isinstance(expected, bool) or isinstance(actual, bool):
            return expected is actual
        if isinstance(expected, int | float) and isinstance(actual, int | float):
            return expected == actual or _are_near(expected, actual, self.tolerance)
        return expected == actual


def _are_near(one: int | float, other: int | float, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        return abs(one - other) <= tolerance
    except OverflowError:  # a whole number beyond the largest float
        return False


def _without(value: JsonValue, ignored: Sequence[_Steps]) -> JsonValue:
    """Return a value without what the ignored paths lead to."""
    if not ignored:
        return value
    if isinstance(value, dict):
        members = ((name, one, _below(name, ignored)) for name, one in value.items())
        return {name: _without(one, below) for name, one, below in members if () not in below}
    if isinstance(value, list):
        below = _below(None, ignored)
        return [] if () in below else [_without(one, below) for one in value]
    return value


def _below(name: str | None, ignored: Sequence[_Steps]) -> list[_Steps]:
    """Return the rests of the paths that lead to a member, or with None to an item of a list."""
    return [steps[1:] for steps in ignored if steps[0] in (name, _ANY)]


def _answer_mismatches(expected: eval_set_pb2.ExpectedAnswer, text: str) -> Iterator[str]:
    folded = _fold_case(text, expected)
    if expected.HasField("exact") and not _is_answer(expected.exact, text, expected):
        yield f"the answer is {_excerpt(text.strip())}, expected {_excerpt(expected.exact.strip())}"
    if missing := [part for part in expected.contains if not _has_part(part, text, expected)]:
        yield f"the answer {_excerpt(text)} does not contain {_list_excerpts(missing)}"
    if excluded := [part for part in expected.excludes if _fold_case(part, expected) in folded]:
        yield f"the answer contains {_list_excerpts(excluded)}, which {'is' if len(excluded) == 1 else 'are'} excluded"
    if expected.regex and (wrong := _search(expected.regex, text, ignore_case=expected.ignore_case)):
        yield wrong
    if expected.HasField("min_characters") and len(text) < expected.min_characters:
        yield f"the answer's length is {len(text):,}, expected at least {expected.min_characters:,} characters"
    if expected.HasField("max_characters") and len(text) > expected.max_characters:
        yield f"the answer's length is {len(text):,}, expected at most {expected.max_characters:,} characters"
    if expected.HasField("json"):
        yield from _json_mismatch(expected.json, text)


def _is_answer(exact: str, text: str, expected: eval_set_pb2.ExpectedAnswer) -> bool:
    wanted = _fold_case(exact, expected).strip()
    return any(is_text(wanted, _fold_case(each, expected).strip()) for each in (text, redact_like(exact, text)))


def _has_part(part: str, text: str, expected: eval_set_pb2.ExpectedAnswer) -> bool:
    wanted = _fold_case(part, expected)
    return any(has_text(wanted, _fold_case(each, expected)) for each in (text, redact_like(part, text)))


def _list_excerpts(texts: Sequence[str]) -> str:
    return ", ".join(map(_excerpt, texts))


def _json_mismatch(matcher: eval_set_pb2.ValueMatcher, text: str) -> Iterator[str]:
    try:
        parse_json(text)
    except ValueError:
        yield f"the answer {_excerpt(text)} is not JSON"
        return
    if wrong := mismatch(matcher, text):
        yield f"in the answer's JSON {wrong}"


def _fold_case(text: str, expected: eval_set_pb2.ExpectedAnswer) -> str:
    return text.casefold() if expected.ignore_case else text


def _regex_mismatch(pattern: str, value_json: str) -> str:
    value = _parse_or_keep(value_json)
    return _search(pattern, value if isinstance(value, str) else value_json)


def _search(pattern: str, text: str, *, ignore_case: bool = False) -> str:
    """Return that a pattern matches nowhere in a text; empty if it does."""
    try:
        found = is_found(pattern, text, ignore_case=ignore_case)
    except RegexProblem as error:
        return f"the expected regex {error}"
    return "" if found else f"{_excerpt(text)} does not match the regex {_truncate(pattern, _SHOWN)}"


def regex_problem(pattern: str) -> str:
    """Return what is wrong with a pattern, as the end of a sentence; empty if nothing is."""
    try:
        check_pattern(pattern)
    except RegexProblem as error:
        return f"{error}."
    return ""


def _json_problem(text: str) -> str:
    try:
        parse_json(text)
    except ValueError as error:
        return f"is not JSON: {error}."
    return ""


def _new_schema_problem(text: str) -> str:
    """Return what is wrong with a schema of a set that is being checked, which can have many."""
    try:
        spend(_SCHEMA_STEPS * min(len(text), MAX_SCHEMA_BYTES))
        return _schema_problem(text)
    except TooMuchWork:
        return "cannot be checked: all schemas of the set together take too long. Use fewer or smaller ones."


@lru_cache(maxsize=256)
def _schema_problem(text: str) -> str:
    if len(text) > MAX_SCHEMA_BYTES:
        return f"is larger than {MAX_SCHEMA_BYTES // 1024} KiB."
    try:
        schema = parse_json(text)
        if isinstance(schema, bool):
            return ""
        if not isinstance(schema, dict):
            return "is not a JSON Schema: it is no object."
        return value_schema_problem(schema, is_bounded=True)
    except ValueError as error:
        return f"is not JSON: {error}."
    except RecursionError:
        return "is nested too deeply."


def _parse_or_keep(text: str) -> JsonValue:
    """Return the value of a JSON text, else the text itself."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _place(path: Sequence[str | int]) -> str:
    text = _unicode(value_path(path))
    # The end of a long path says more than its beginning.
    return f"…{text[1 - _SHOWN :]}" if len(text) > _SHOWN else text or "the value"


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _excerpt(value: JsonValue) -> str:
    return _truncate(_unicode(json.dumps(value, ensure_ascii=False)), _SHOWN)


def _unicode(text: str) -> str:
    """Replace unpaired surrogates, which JSON can escape and results cannot hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
