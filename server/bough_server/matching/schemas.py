"""JSON Schemas that callers bring to judge values by: checking takes a bounded time, whatever the schema."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import referencing.exceptions
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from bough_server.matching.regexes import RegexProblem, check_pattern, is_found
from bough_server.matching.work import spend

MAX_REFERENCES: Final = 20_000
"""The most references that are followed to check one value: with n of them a schema can ask for 2^n."""

LONGEST_MISTAKE: Final = 300
"""The most characters of a mistake's text."""
_MAX_ERRORS: Final = 20
"""The most errors of a value: each may quote all of it."""
_RULE_STEPS: Final = 150
"""The steps of a rule beside those for what it goes through."""
_MEMBER_STEPS: Final = 20

_followed: ContextVar[list[int]] = ContextVar("bough_followed_references")

_Rule = Callable[[Any, Any, Any, Any], Iterator[ValidationError]]


class TooCostly(ValueError):
    """A schema that cannot be checked in a bounded time; the message is a sentence without a period."""


def find_errors(value: Any, schema_json: str) -> list[ValidationError]:
    """Return how a value violates a schema, at most 20 errors.

    Raises TooCostly, TooMuchWork, and what following a broken reference raises.
    """
    token = _followed.set([0])
    try:
        return list(islice(_validator(schema_json).iter_errors(value), _MAX_ERRORS))
    except RegexProblem as error:
        raise TooCostly(f"a pattern of the schema {error}") from None
    finally:
        _followed.reset(token)


def build_check(schema: Any) -> Callable[[Any], bool]:
    """Return what says whether a value fits a schema. It counts its steps, and raises as `find_errors` does."""
    validator = _Bounded(schema, registry=Registry())

    def check(value: Any) -> bool:
        token = _followed.set([0])
        try:
            return bool(validator.is_valid(value))
        except RegexProblem as error:
            raise TooCostly(f"a pattern of the schema {error}") from None
        finally:
            _followed.reset(token)

    return check


def schema_mistakes(value: Any, schema_json: str, *, is_bounded: bool = False) -> list[str]:
    """Return how a JSON value violates a schema, each mistake with its path; empty if it is valid.

    `is_bounded`: a schema that would take long to check is a mistake, and its patterns are RE2's.
    """
    try:
        found = find_errors(value, schema_json) if is_bounded else _linear_validator(schema_json).iter_errors(value)
        errors = sorted(found, key=lambda error: [str(p) for p in error.path])
    except (RecursionError, referencing.exceptions.Unresolvable):
        return ["the tool's schema cannot be followed to its end"]
    except TooCostly as error:
        return [str(error)]
    except RegexProblem as error:
        return [f"a pattern of the schema {error}"]
    # jsonschema reports every missing name, and _mistakes() lists all of them each time: the dict drops duplicates.
    return list(dict.fromkeys(mistake for error in errors for mistake in _mistakes(error)))


def value_schema_problem(schema: Mapping[str, Any], *, is_bounded: bool = False) -> str:
    """Return what is wrong with a schema of any JSON value, as a sentence; empty if nothing is.

    `is_bounded`: its patterns have to be RE2's.
    """
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for mistake in meta.iter_errors(schema):
        return f"is not a JSON Schema: {value_path(mistake.path) or 'it'}: {mistake.message[:LONGEST_MISTAKE]}."
    try:
        _resolve_references(schema)
        if is_bounded:
            find_errors({}, json.dumps(schema))
            return pattern_problem(schema)
        _linear_validator(json.dumps(schema)).is_valid({})  # a reference that leads back to itself shows only in use
    except (RecursionError, referencing.exceptions.Unresolvable):
        return "must hold only references to its own parts, such as #/$defs/name, and none that leads back to itself."
    except TooCostly as error:
        return f"cannot be used: {error}."
    return ""


def value_path(path: Sequence[str | int]) -> str:
    """Return a path in JSON in readable form, such as `items[0].name`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def pattern_problem(schema: object) -> str:
    """Return what is wrong with the patterns of a schema, as a sentence; empty if nothing is."""
    try:
        for pattern in _patterns(schema):
            check_pattern(pattern)
    except RegexProblem as error:
        return f"has a pattern that {error}."
    return ""


def caller_pattern_problem(schema_json: str) -> str:
    """Return why matching a caller's schema might never end, as a sentence; empty if it ends, or if it is not JSON."""
    if "attern" not in schema_json:
        return ""
    try:
        schema = json.loads(schema_json)
    except (ValueError, RecursionError):
        return ""
    if '"patternProperties"' in schema_json and '"unevaluatedProperties"' in schema_json:
        return "has unevaluatedProperties beside patternProperties, which is not supported in a request."
    return pattern_problem(schema)


@lru_cache(maxsize=512)
def _linear_validator(schema_json: str) -> Any:
    # With an empty registry a reference to another address is never fetched.
    return LinearPatterns(json.loads(schema_json), registry=Registry())


def _resolve_references(schema: Mapping[str, Any]) -> None:
    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(dict(schema)))
    pending: list[Any] = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("$ref", "$dynamicRef") and isinstance(inner, str):
                    resolver.lookup(inner)
                pending.append(inner)
        elif isinstance(value, list):
            pending.extend(value)


def _mistakes(error: ValidationError) -> list[str]:
    path = value_path(list(error.absolute_path))
    if error.validator == "required" and isinstance(error.instance, dict):
        required: list[str] = list(error.schema["required"]) if isinstance(error.schema, dict) else []
        missing = [name for name in required if name not in error.instance]
        return [f"{path}.{name} is missing" if path else f"{name} is missing" for name in missing]
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = error.schema.get("properties", {}) if isinstance(error.schema, dict) else {}
        extra = [name for name in error.instance if name not in known]
        return [f"{path}.{name} is not known" if path else f"{name} is not known" for name in extra]
    # jsonschema's message repeats the whole value, which may be long.
    message = (
        error.message if len(error.message) <= LONGEST_MISTAKE else f"the value breaks the rule {error.validator!r}"
    )
    return [f"{path}: {message}" if path else message]


def _patterns(schema: object) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        if not isinstance(one, dict):
            continue
        if isinstance(pattern := one.get("pattern"), str):
            yield pattern
        if isinstance(named := one.get("patternProperties"), dict):
            yield from named
        waiting.extend(inner for name, inner in one.items() if name not in ("const", "enum", "default", "examples"))


def matches(pattern: str, text: str) -> bool:
    """Match a pattern by RE2; one that it does not have, which only an operator's schema can hold, as Python does.

    Raises RegexProblem if RE2 has the pattern and the search is too costly.
    """
    try:
        check_pattern(pattern)
    except RegexProblem:
        return re.search(pattern, text) is not None
    return is_found(pattern, text)


def _pattern_rules(found: Callable[[str, str], bool]) -> Mapping[str, _Rule]:
    """Return the rules that match patterns: `found` searches a pattern in a text."""

    def pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not found(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def properties(validator: Any, rules: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for pattern, rule in rules.items():
                for name in filter(lambda name: found(pattern, name), instance):
                    yield from validator.descend(instance[name], rule, path=name, schema_path=pattern)

    def additional(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties", {})
        if isinstance(instance, dict) and patterns:
            # What a pattern matches is not additional; the rest is left to the package's rule, without patterns.
            instance = {
                name: value for name, value in instance.items() if not any(found(one, name) for one in patterns)
            }
            schema = {name: value for name, value in schema.items() if name != "patternProperties"}
        yield from _OWN["additionalProperties"](validator, rule, instance, schema)

    return {"pattern": pattern, "patternProperties": properties, "additionalProperties": additional}


def _check_unevaluated_properties(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # The package's own rule matches patternProperties with patterns that may take for ever.
    if '"patternProperties"' in json.dumps(schema):
        raise TooCostly("the schema has unevaluatedProperties beside patternProperties, which is not supported here")
    yield from _OWN["unevaluatedProperties"](validator, rule, instance, schema)


def _check_unique_items(validator: Any, rule: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    # The package's own rule compares each two of the items.
    if rule and isinstance(instance, list) and len({_key(item) for item in instance}) < len(instance):
        yield ValidationError("has equal items")


def _key(value: Any) -> object:
    """Return what is equal for equal JSON values; True is not 1."""
    if isinstance(value, dict):
        return frozenset((name, _key(member)) for name, member in value.items())
    if isinstance(value, list):
        return tuple(map(_key, value))
    return isinstance(value, bool), value


def _count_steps(rule: _Rule) -> _Rule:
    """Wrap a rule to count its steps, and those of its errors, each of which may quote the whole value."""

    def check(validator: Any, expected: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        members = sum(len(one) for one in (expected, instance) if isinstance(one, list | dict))
        spend(_RULE_STEPS + _MEMBER_STEPS * members)
        for error in rule(validator, expected, instance, schema):
            spend(len(error.message))
            yield error

    return check


def _count_references(rule: _Rule) -> _Rule:
    """Wrap the rule of a reference to count how often it is followed."""

    def follow(validator: Any, reference: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        count = _followed.get()
        count[0] += 1
        if count[0] > MAX_REFERENCES:
            raise TooCostly(f"the schema follows more than {MAX_REFERENCES:,} references for one value")
        yield from rule(validator, reference, instance, schema)

    return follow


_OWN: Final[Mapping[str, _Rule]] = dict(Draft202012Validator.VALIDATORS)

LinearPatterns: Final = extend(Draft202012Validator, _pattern_rules(matches))  # type: ignore[no-untyped-call]
"""The package's validator, with patterns that RE2 matches as far as it has them."""

_RULES: Final[Mapping[str, _Rule]] = {
    **_OWN,
    **_pattern_rules(is_found),
    "unevaluatedProperties": _check_unevaluated_properties,
    "uniqueItems": _check_unique_items,
    "$ref": _count_references(_OWN["$ref"]),
    "$dynamicRef": _count_references(_OWN["$dynamicRef"]),
}

_Bounded: Final = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, {name: _count_steps(rule) for name, rule in _RULES.items()}
)


@lru_cache(maxsize=64)
def _validator(schema_json: str) -> Any:
    return _Bounded(json.loads(schema_json), registry=Registry())
