"""Types of JSON values as JSON Schemas: whether every value of one fits another, what is at a path, how a type reads.

What a schema does not say is unknown rather than wrong: a value of any type may turn out to fit.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from bough_server.matching.schema_reading import (
    DEEPEST,
    MESSAGE_TITLE,
    WITHOUT_RULE,
    Schema,
    build_fit_check,
    first_sample,
    is_message,
    item_at,
    resolve,
    samples,
    samples_of_type,
    types_of,
    write,
)
from bough_server.matching.work import TooMuchWork, limit_work, spend

ANY: Final = "{}"
"""The type of any value."""

MESSAGE: Final = json.dumps({"type": "object", "title": MESSAGE_TITLE})
"""The type of a Message in protobuf's JSON mapping: the schema of an object of this title."""

_TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_MOST_STEPS: Final = 4_000_000
"""The steps of a comparison after which the result is unknown: schemas of n references can ask for 2^n."""
_PAIR_STEPS: Final = 1_000
"""The steps of comparing two schemas beside those of their parts."""
_DESCRIPTION_STEPS: Final = 400_000
_LONGEST: Final = 120

_READ: Final = frozenset(
    (
        *("$ref", "type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems"),
        *("anyOf", "oneOf", "allOf"),
    )
)
_OF_TYPE: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(["pattern", "format", "minLength", "maxLength", "contentEncoding", "contentMediaType"]),
    "number": frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    "array": frozenset(
        (
            *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
            "unevaluatedItems",
        )
    ),
    "object": frozenset(
        (
            *("properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties"),
            *("propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
        )
    ),
}
"""Keywords that concern the values of one type only."""


class Fit(Enum):
    """Whether the values of one type fit another."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether every value of one type fits another; if not, a value that does not, and the place that differs."""

    fit: Fit
    value: Any = None
    place: str = ""
    """The path of the innermost part of the value that does not fit; empty if it is the value itself."""


_YES: Final = Verdict(Fit.YES)
_UNKNOWN: Final = Verdict(Fit.UNKNOWN)


def assignable(source_json: str, target_json: str) -> Verdict:
    """Return whether every value of the type `source_json` fits the type `target_json`; empty text is any value.

    UNKNOWN if it takes more than a bounded number of steps. Raises TooMuchWork if the caller has set a lower bound.
    """
    spend(len(source_json) + len(target_json))
    with limit_work(_MOST_STEPS) as left:
        try:
            verdict = _assignable(source_json, target_json)
        except (TooMuchWork, RecursionError):
            verdict = _UNKNOWN
    spend(_MOST_STEPS - max(left[0], 0))
    return verdict


def _assignable(source_json: str, target_json: str) -> Verdict:
    try:
        source, target = json.loads(source_json or ANY), json.loads(target_json or ANY)
    except (ValueError, RecursionError):
        return _YES if source_json == target_json else _UNKNOWN
    if source == target or _accepts_all(target):
        return _YES
    if _accepts_all(source):
        return _UNKNOWN
    verdict = _Comparison(source, target).compare(source, target, DEEPEST)
    if verdict.fit is Fit.NO and not (
        build_fit_check(source)(verdict.value) is True and build_fit_check(target)(verdict.value) is False
    ):
        return _UNKNOWN  # a rule that is not read here lets the value pass, or keeps it from occurring
    return verdict


def parse(schema_json: str) -> Schema:
    """Return a schema as JSON; any value for empty text and for what is no JSON."""
    try:
        return json.loads(schema_json) if schema_json else {}
    except (ValueError, RecursionError):
        return {}


def list_of(schema_json: str) -> str:
    """Return the type of a list of values of a type."""
    schema = parse(schema_json)
    if isinstance(schema, dict) and "$ref" in json.dumps(schema):
        return json.dumps({"type": "array"})  # the references of a schema lead from its root
    return json.dumps({"type": "array", "items": schema})


def is_any(schema_json: str) -> bool:
    """Return whether a type takes any value."""
    return not schema_json or schema_json == ANY or _accepts_all(parse(schema_json))


def type_at(schema_json: str, path: Sequence[str]) -> tuple[str, bool]:
    """Return the type of what is at a path in values of a type, and whether something is always there.

    Raises KeyError with the first name that no value of the type has.
    """
    root = parse(schema_json)
    schema, is_certain = root, True
    for name in path:
        schema = resolve(schema, root)
        if not isinstance(schema, dict) or is_message(schema):
            return ANY, False
        schema, is_here = _step(schema, name, root)
        is_certain = is_certain and is_here
    if not isinstance(schema, dict) or "$ref" not in json.dumps(schema):
        return json.dumps(schema), is_certain
    definitions = {name: root[name] for name in ("$defs", "definitions") if isinstance(root, dict) and name in root}
    # A reference to the root itself has another root now: such a type is not read.
    is_rooted = '"#"' in json.dumps(schema) or not definitions
    return (ANY if is_rooted else json.dumps({**schema, **definitions})), is_certain


def _step(schema: Mapping[str, Any], name: str, root: Schema) -> tuple[Schema, bool]:
    types = types_of(schema)
    if types is None or any(key in schema for key in ("anyOf", "oneOf", "allOf", "enum", "const")):
        return {}, False
    if types == {"object"}:
        properties = schema.get("properties", {})
        if name in properties:
            return properties[name], name in schema.get("required", ())
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            raise KeyError(name)
        rest = schema.get("additionalProperties", {})
        return (rest if "patternProperties" not in schema else {}), name in schema.get("required", ())
    if types == {"array"} and name.isdecimal():
        before = schema.get("prefixItems", ())
        return (before[int(name)] if int(name) < len(before) else schema.get("items", {})), False
    if types & {"object", "array"}:
        return {}, False
    raise KeyError(name)


def describe(schema_json: str) -> str:
    """Return a type in a few words, such as `{hits: array}`. Raises TooMuchWork if the caller has set a bound."""
    spend(len(schema_json))
    root = parse(schema_json)
    with limit_work(_DESCRIPTION_STEPS) as left:
        try:
            text = _describe(root, root, 2)
        except TooMuchWork:
            text = "a large type"
    spend(_DESCRIPTION_STEPS - max(left[0], 0))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _describe(schema: Schema, root: Schema, depth: int) -> str:
    spend(_PAIR_STEPS)
    schema = resolve(schema, root)
    if not isinstance(schema, dict):
        return "nothing" if schema is False else "any"
    if is_message(schema):
        return "Message"
    if "const" in schema:
        return json.dumps(schema["const"])
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(value) for value in schema["enum"][:8])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return " | ".join(_describe(each, root, depth - 1) for each in schema[key][:4])
    types = types_of(schema)
    if types is None:
        return "any"
    properties = schema.get("properties", {})
    if types == {"object"} and properties and depth > 0:
        required = schema.get("required", ())
        marks = {name: "" if name in required else "?" for name in properties}
        inner = ", ".join(
            f"{name}{marks[name]}: {_describe(each, root, depth - 1)}" for name, each in properties.items()
        )
        return f"{{{inner}}}"
    if types == {"array"} and "items" in schema and depth > 0:
        return f"list of {_describe(schema['items'], root, depth - 1)}"
    return " | ".join(name for name in _TYPES if name in types)


def _accepts_all(schema: Schema) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= WITHOUT_RULE)


class _Comparison:
    """The comparison of two schemas, whose references lead from their roots."""

    def __init__(self, source_root: Schema, target_root: Schema) -> None:
        self._source_root, self._target_root = source_root, target_root
        self._assumed: set[tuple[str, str]] = set()
        """Pairs that are being compared: of recursive types, what leads back to itself fits."""

    def compare(self, source: Schema, target: Schema, depth: int) -> Verdict:
        """Return whether values of a part of the source fit a part of the target."""
        spend(_PAIR_STEPS)
        if _accepts_all(target):
            return _YES
        if depth < 0:
            return _UNKNOWN
        pair = self._pair(source, target)
        if pair in self._assumed:
            return _YES
        if pair is not None:
            self._assumed.add(pair)
        try:
            return self._compare(resolve(source, self._source_root), resolve(target, self._target_root), depth - 1)
        finally:
            self._assumed.discard(pair) if pair is not None else None

    @staticmethod
    def _pair(source: Schema, target: Schema) -> tuple[str, str] | None:
        is_reference = any(isinstance(each, dict) and "$ref" in each for each in (source, target))
        return (write(source), write(target)) if is_reference else None

    def _compare(self, source: Schema, target: Schema, depth: int) -> Verdict:
        if source is False or _accepts_all(target):
            return _YES
        if _accepts_all(source) or not isinstance(source, dict):
            return _UNKNOWN
        if target is False:
            return self._refuse(source, depth)
        if source == target and "$ref" not in write(source):
            return _YES
        if is_message(target):
            return self._compare_with_message(source, depth)
        if "const" in source or isinstance(source.get("enum"), list):
            return self._compare_values([source["const"]] if "const" in source else source["enum"], target)
        for key in ("anyOf", "oneOf"):
            if isinstance(source.get(key), list):
                return _all([self.compare(each, target, depth) for each in source[key]])
        return self._compare_with_rules(source, target, depth)

    def _compare_with_message(self, source: Mapping[str, Any], depth: int) -> Verdict:
        types = types_of(source)
        if is_message(source):
            return _YES
        return self._refuse(source, depth) if types is not None and "object" not in types else _UNKNOWN

    def _refuse(self, source: Mapping[str, Any], depth: int) -> Verdict:
        """Return that no value of the source fits, with one of them."""
        value = next((each for each in samples(source, self._source_root, depth)), None)
        return Verdict(Fit.NO, value)

    def _compare_values(self, values: Sequence[Any], target: Schema) -> Verdict:
        if "$ref" in write(target):
            definitions = {key: value for key, value in self._target_root.items() if key in ("$defs", "definitions")}
            target = {**target, **definitions}
            if '"#"' in write(target):
                return _UNKNOWN
        is_fitting = build_fit_check(target)
        for value in values:
            if (fits := is_fitting(value)) is not True:
                return Verdict(Fit.NO, value) if fits is False else _UNKNOWN
        return _YES

    def _compare_with_rules(self, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Verdict:
        """Compare with each rule of the target: all of them have to hold."""
        if isinstance(source.get("allOf"), list):
            rest = {name: value for name, value in source.items() if name != "allOf"}
            parts = [self.compare(each, target, depth) for each in (*source["allOf"], *([rest] if rest else []))]
            return next((part for part in parts if part.fit is Fit.YES), _all(parts))
        verdicts = [self._compare_types(source, target, depth)]
        verdicts += [self.compare(source, each, depth) for each in target.get("allOf", ())]
        verdicts += [
            self._compare_with_union(source, target[key], depth, is_one=key == "oneOf")
            for key in ("anyOf", "oneOf")
            if key in target
        ]
        if "const" in target or "enum" in target:
            verdicts.append(self._compare_with_enum(source, target, depth))
        unread = target.keys() - _READ - WITHOUT_RULE - frozenset().union(*_OF_TYPE.values())
        if any(source.get(key) != target[key] for key in unread):
            verdicts.append(_UNKNOWN)
        return _all(verdicts)

    def _compare_with_union(
        self, source: Mapping[str, Any], members: Sequence[Schema], depth: int, *, is_one: bool
    ) -> Verdict:
        verdicts = [self.compare(source, each, depth) for each in members]
        fitting = [verdict for verdict in verdicts if verdict.fit is Fit.YES]
        if fitting and (not is_one or len(members) == 1):
            return _YES
        types = types_of(source)
        if not fitting and types is not None and len(types) > 1 + ("number" in types):
            # A value of each type may fit another member.
            parts = [{**source, "type": name} for name in sorted(types - ({"integer"} if "number" in types else set()))]
            return _all([self._compare_with_union(part, members, depth - 1, is_one=is_one) for part in parts])
        if all(verdict.fit is Fit.NO for verdict in verdicts) and verdicts:
            return verdicts[0]
        return _UNKNOWN

    def _compare_with_enum(self, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Verdict:
        rule = {key: target[key] for key in ("const", "enum") if key in target}
        if types_of(source) is None:
            return _UNKNOWN
        is_fitting = build_fit_check(rule)
        refused = (value for value in samples(source, self._source_root, depth) if is_fitting(value) is False)
        return next((Verdict(Fit.NO, value) for value in refused), _UNKNOWN)

    def _compare_types(self, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Verdict:
        given, taken = types_of(source), types_of(target)
        if given is None:
            is_free = taken is None and not target.keys() & frozenset().union(*_OF_TYPE.values())
            return _YES if is_free else _UNKNOWN
        verdicts = []
        for name in sorted(given):
            if name == "integer" and "number" in given:
                continue
            if taken is not None and name not in taken:
                samples = samples_of_type(name, source, self._source_root, depth)
                verdicts.append(Verdict(Fit.NO, next(samples, None)))
            else:
                verdicts.append(self._compare_type(name, source, target, depth))
        return _all(verdicts)

    def _compare_type(self, name: str, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Verdict:
        rules = target.keys() & _OF_TYPE.get("number" if name == "integer" else name, frozenset())
        verdicts: list[Verdict] = []
        if name == "object":
            verdicts += self._compare_objects(source, target, depth)
        elif name == "array":
            verdicts += self._compare_arrays(source, target, depth)
        if any(source.get(rule) != target[rule] for rule in rules - _READ):
            verdicts.append(_UNKNOWN)
        return _all(verdicts)

    def _compare_objects(self, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Iterator[Verdict]:
        given, needed = source.get("properties", {}), target.get("properties", {})
        certain = frozenset(source.get("required", ()))
        others, is_open = source.get("additionalProperties", True), "patternProperties" not in source
        for name in sorted(set(target.get("required", ())) - certain):
            # What the source does not mention is unknown; what it declares may be left out.
            is_known = name in given or others is False
            yield Verdict(Fit.NO, self._object(source, {}, depth), name) if is_known else _UNKNOWN
        for name in sorted(given.keys() | needed.keys()):
            if name not in given and (others is False and is_open):
                continue
            own = given.get(name, others if is_open else {})
            rule = needed.get(
                name, target.get("additionalProperties", True) if not target.get("patternProperties") else {}
            )
            inner = self.compare(own, rule, depth)
            if inner.fit is Fit.NO:
                value = self._object(source, {name: inner.value}, depth)
                yield Verdict(Fit.NO, value, f"{name}.{inner.place}".rstrip("."))
            else:
                yield inner
        rest = target.get("additionalProperties", True)
        if others is not False or not is_open:
            inner = self.compare(others if is_open else {}, rest, depth)
            yield _UNKNOWN if inner.fit is Fit.NO else inner

    def _object(self, source: Mapping[str, Any], changed: Mapping[str, Any], depth: int) -> dict[str, Any]:
        least: dict[str, Any] = next(samples_of_type("object", source, self._source_root, depth), {})
        return {**least, **changed}

    def _compare_arrays(self, source: Mapping[str, Any], target: Mapping[str, Any], depth: int) -> Iterator[Verdict]:
        count = max(len(source.get("prefixItems", ())), len(target.get("prefixItems", ()))) + 1
        for index in range(min(count, DEEPEST)):
            own = item_at(source, index)
            inner = self.compare(own, item_at(target, index), depth)
            if inner.fit is Fit.NO:
                before = [first_sample(item_at(source, each), self._source_root, depth) for each in range(index)]
                place = f"{index}.{inner.place}".rstrip(".")
                yield Verdict(Fit.NO, [*before, inner.value], place)
            else:
                yield inner
        if count > DEEPEST:
            yield _UNKNOWN


def _by_fit(verdict: Verdict) -> int:
    return {Fit.NO: 0, Fit.UNKNOWN: 1, Fit.YES: 2}[verdict.fit]


def _all(verdicts: Sequence[Verdict] | Iterator[Verdict]) -> Verdict:
    """Return the verdict on values for which all of these hold."""
    return min(verdicts, key=_by_fit, default=_YES)
