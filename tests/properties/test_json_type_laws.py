"""Laws of the types of JSON values: what fits is never refused, what does not is shown by a value."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough_server.matching.json_types import ANY, MESSAGE, Fit, assignable, describe, type_at
from bough_server.matching.schemas import schema_mistakes
from tests.support.examples import examples

_NAMES = st.sampled_from(["a", "b", "c"])
_SCALARS = st.sampled_from(["null", "boolean", "integer", "number", "string"]).map(lambda name: {"type": name})
_ENUMS = st.lists(st.sampled_from([None, True, 0, 1.5, "x", "y"]), min_size=1, max_size=3, unique_by=repr).map(
    lambda values: {"enum": values}
)
_NARROWED = st.sampled_from(
    [
        {"type": "string", "minLength": 2},
        {"type": "string", "pattern": "^x"},
        {"type": "integer", "minimum": 1},
        {"type": ["string", "null"]},
        {"type": ["integer", "string"]},
        {"$ref": "#/$defs/node"},
        {},
        True,
    ]
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, required, others: {
            "type": "object",
            "properties": properties,
            "required": sorted(required),
            **({} if others is None else {"additionalProperties": others}),
        },
        st.dictionaries(_NAMES, inner, max_size=3),
        st.sets(_NAMES, max_size=2),
        st.sampled_from([None, False, {"type": "string"}]),
    )


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.just({"type": "array"}),
        inner.map(lambda items: {"type": "array", "items": items}),
        st.tuples(inner, inner).map(lambda two: {"type": "array", "prefixItems": [two[0]], "items": two[1]}),
    )


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=2)).map(
        lambda union: {union[0]: union[1]}
    )


_PARTS = st.recursive(
    st.one_of(_SCALARS, _ENUMS, _NARROWED),
    lambda inner: st.one_of(_objects(inner), _arrays(inner), _unions(inner)),
    max_leaves=5,
)
_NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
SCHEMAS = _PARTS.map(lambda schema: {**schema, "$defs": {"node": _NODE}} if isinstance(schema, dict) else schema)

VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.5, -3, "", "x", "y", "xy"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abcn"), inner, max_size=3)),
    max_leaves=5,
)


@settings(examples(400))
@given(SCHEMAS, SCHEMAS, st.lists(VALUES, max_size=12))
def test_what_fits_is_never_refused_and_what_does_not_is_shown_by_a_value(
    source: Any, target: Any, values: list[Any]
) -> None:
    source_json, target_json = json.dumps(source), json.dumps(target)
    verdict = assignable(source_json, target_json)
    if verdict.fit is Fit.NO:
        assert schema_mistakes(verdict.value, source_json) == []
        assert schema_mistakes(verdict.value, target_json) != []
    if verdict.fit is Fit.YES:
        for value in values:
            assert schema_mistakes(value, source_json) != [] or schema_mistakes(value, target_json) == []


@settings(examples(200))
@given(SCHEMAS)
def test_a_type_fits_itself_and_any_type(schema: Any) -> None:
    text = json.dumps(schema)
    assert assignable(text, text).fit is Fit.YES
    assert assignable(
        text, json.dumps({**schema, "title": "same"} if isinstance(schema, dict) else schema)
    ).fit is not (Fit.NO)
    assert assignable(text, ANY).fit is Fit.YES


_OBJECT = '{"type": "object", "properties": {"hits": {"type": "array"}}, "required": ["hits"]}'
_TREE = json.dumps({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}})


@pytest.mark.parametrize(
    ("source", "target", "fit"),
    [
        ('{"type": "string"}', '{"type": "integer"}', Fit.NO),
        ('{"type": "integer"}', '{"type": "number"}', Fit.YES),
        ('{"type": "number"}', '{"type": "integer"}', Fit.NO),
        (ANY, '{"type": "integer"}', Fit.UNKNOWN),
        (_OBJECT, '{"type": "string"}', Fit.NO),
        (_OBJECT, '{"type": "object"}', Fit.YES),
        ('{"type": "object"}', _OBJECT, Fit.UNKNOWN),
        ('{"type": "object", "properties": {"hits": {"type": "array"}}}', _OBJECT, Fit.NO),
        ('{"enum": ["good", "poor"]}', '{"type": "string"}', Fit.YES),
        ('{"type": "string"}', '{"enum": ["good", "poor"]}', Fit.NO),
        ('{"type": "string"}', '{"type": "string", "pattern": "^a"}', Fit.UNKNOWN),
        ('{"type": "string", "pattern": "^a"}', '{"type": "string", "pattern": "^a"}', Fit.YES),
        ('{"type": ["string", "null"]}', '{"anyOf": [{"type": "string"}, {"type": "null"}]}', Fit.YES),
        ('{"type": ["string", "integer"]}', '{"anyOf": [{"type": "string"}, {"type": "null"}]}', Fit.NO),
        (_TREE, '{"type": "array"}', Fit.YES),
        (_TREE, _TREE.replace('"t"', '"u"').replace("defs/t", "defs/u"), Fit.YES),
        (MESSAGE, MESSAGE, Fit.YES),
        (MESSAGE, '{"type": "object"}', Fit.YES),
        ('{"type": "string"}', MESSAGE, Fit.NO),
        ('{"type": "object"}', MESSAGE, Fit.UNKNOWN),
        ('{"type": "array", "items": {"$ref": "#"}}', '{"type": "array", "items": {"type": "array"}}', Fit.YES),
    ],
)
def test_types_that_graphs_have(source: str, target: str, fit: Fit) -> None:
    assert assignable(source, target).fit is fit


def test_a_type_that_does_not_fit_names_the_innermost_place() -> None:
    deep = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "%s"}}}, "required": ["a"]}'
    verdict = assignable(deep % "string", deep % "integer")
    assert (verdict.fit, verdict.value, verdict.place) == (Fit.NO, {"a": [""]}, "a.0")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (ANY, "any"),
        (MESSAGE, "Message"),
        (_OBJECT, "{hits: array}"),
        ('{"type": "object", "properties": {"n": {"type": "integer"}}}', "{n?: integer}"),
        ('{"type": "array", "items": {"type": "string"}}', "list of string"),
        ('{"enum": ["a", 1]}', '"a" | 1'),
    ],
)
def test_a_type_reads_like_what_its_values_look_like(schema: str, text: str) -> None:
    assert describe(schema) == text


def test_the_type_at_a_path_says_whether_something_is_there() -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": '
    schema += '"integer"}}}, "required": ["a"], "additionalProperties": false}'
    assert type_at(schema, ["a"]) == ('{"type": "string"}', True)
    assert type_at(schema, ["b", "0"]) == ('{"type": "integer"}', False)
    with pytest.raises(KeyError, match="c"):
        type_at(schema, ["c"])


def test_types_that_refer_to_themselves_or_are_very_deep_are_unknown_and_end() -> None:
    circle = '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'
    assert assignable(circle, '{"type": "integer"}').fit is Fit.UNKNOWN
    deep = '{"type": "array", "items": ' * 1000 + "{}" + "}" * 1000
    assert assignable(deep, deep.replace("{}", '{"type": "string"}')).fit is Fit.UNKNOWN
    doubling = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(40)}
    doubling["d40"] = {"type": "string"}
    wide = json.dumps({"$ref": "#/$defs/d0", "$defs": doubling})
    assert assignable(wide, '{"type": "string", "minLength": 1}').fit is Fit.UNKNOWN


def _doubling(part: str) -> str:
    definitions = {f"d{n}": json.loads(part.replace("NEXT", f"#/$defs/d{n + 1}")) for n in range(18)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, "d18": {"type": "string"}}})


_TWICE = '{"type": "object", "required": ["a", "b"], "properties": {"a": {"$ref": "NEXT"}, "b": {"$ref": "NEXT"}}}'


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_doubling(_TWICE), '{"type": "integer"}'),
        ('{"type": "array", "minItems": 10, "items": ' * 6 + '{"type": "string"}' + "}" * 6, '{"type": "integer"}'),
        (
            json.dumps({"enum": [str(number) for number in range(6000)]}),
            json.dumps({"anyOf": [{"type": "string", "minLength": number} for number in range(3000, 0, -1)]}),
        ),
        ('{"enum": [0]}', _doubling('{"allOf": [{"$ref": "NEXT"}, {"$ref": "NEXT"}]}').replace("string", "integer")),
    ],
)
def test_types_that_ask_for_too_much_work_are_unknown(source: str, target: str) -> None:
    assert assignable(source, target).fit is Fit.UNKNOWN
