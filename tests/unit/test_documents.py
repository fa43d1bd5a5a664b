"""YAML and JSON as plain values with lines."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from bough_server.documents.yaml import DEFAULT_BOUNDS, DocumentBounds, parse_documents, parse_json, read_documents
from bough_server.errors import ConfigurationError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        parse_documents(text, path="f.yaml")
    return refused.value.message.splitlines()


def composed(text: str) -> yaml.Node | yaml.MarkedYAMLError:
    """What PyYAML makes of a text."""
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        return error


def test_values_know_their_lines() -> None:
    [document] = parse_documents("a: 1\nb:\n  - x\n  - c: y\n", path="f.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": "y"}]}
    assert [document.line(path) for path in [("a",), ("b",), ("b", 1), ("b", 1, "c"), ("b", 9), ("z",)]] == [
        1,
        2,
        4,
        4,
        2,
        1,
    ]
    assert str(document.problem(("b", 1, "c"), "is wrong")) == "f.yaml:4: b[1].c: is wrong"


def test_plain_scalars_are_read_by_the_core_schema() -> None:
    text = "[no, on, 2026-01-31, 0777, 1:30, true, 12, -1.5, 1e5, ~, 1_000]"
    [document] = parse_documents(text, path="f.yaml")
    assert document.value == ["no", "on", "2026-01-31", "0777", "1:30", True, 12, -1.5, 1e5, None, "1_000"]


def test_a_file_may_hold_several_documents_and_empty_ones_are_left_out() -> None:
    documents = parse_documents("a: 1\n---\n---\nb: 2\n", path="f.yaml")
    assert [document.value for document in documents] == [{"a": 1}, {"b": 2}]


def test_all_mistakes_are_told_at_once() -> None:
    assert mistakes("a: 1\na: 2\nb: !!python/object x\n? [k]\n: 1\n") == [
        "f.yaml:2: a: is given twice",
        "f.yaml:3: b: has an unknown tag: tag:yaml.org,2002:python/object",
        "f.yaml:4: has a key that is not text",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\n", "f.yaml:2: This is not YAML: "),
        ("a: b: c\n", 'f.yaml:1: This is not YAML: mapping values are not allowed here. Quote the text: a: "b: c"'),
        ("x:\n  - a: @b", "f.yaml:2: This is not YAML: found character '@' that cannot start any token. Quote"),
        (
            "a: {b} and",
            "f.yaml:1: This is not YAML: expected <block end>, but found '<scalar>'. Quote the text: a: \"{b",
        ),
        (
            f"a: b: {'c' * 99}",
            "f.yaml:1: This is not YAML: mapping values are not allowed here. Quote the text of this",
        ),
        ("a: 'b'c\n", "f.yaml:1: This is not YAML: expected <block end>, but found '<scalar>'."),
        ("a: *b\n", "f.yaml:1: This is not YAML: found undefined alias 'b'. Quote the text: a: \"*b\""),
        ("a: \x01\n", "f.yaml: This is not YAML: special characters are not allowed."),
        ('a: "\\ud83d"\n', "f.yaml:1: a: contains half of a surrogate pair, which is not a character"),
        ("&a [*a]\n", "f.yaml:1: [0][0][0][0]: is nested deeper than 100 levels or repeats too much"),
        ("[" * 3_000 + "\n", "f.yaml: is nested deeper than 100 levels"),
        ('{"a": [' * 50_000 + "\n", "f.yaml: is nested deeper than 100 levels"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(text: str, words: str) -> None:
    [line] = mistakes(text)
    assert line.startswith(words)


def test_no_quotes_are_advised_around_a_list_one_of_whose_texts_lacks_them() -> None:
    assert mistakes("turns: [{user: Where is it?}]") == [
        "f.yaml:1: This is not YAML: expected ',' or '}', but got '?'."
    ]


def test_a_few_aliases_cannot_make_a_large_value() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    [line] = mistakes("\n".join(rows))
    assert line.endswith("is nested deeper than 100 levels or repeats too much")


@given(JSON)
@example({"k" * 5_000: {"\u0334" * 400: 1}})
def test_any_json_is_read_as_json(value: object) -> None:
    documents = parse_documents(json.dumps(value), path="f.json")
    assert [document.value for document in documents] == ([] if value is None else [value])


@given(st.sampled_from("'\""), st.text(" \t\n\r\\'\"abnx0-.#\x85\u2028\ufeffé", max_size=12))
@example('"', "a \\n b  \n\n  c\t\\\n d")
@example("'", "it''s  \n  --- ")
def test_any_quoted_text_is_what_it_is_in_yaml(quote: str, text: str) -> None:
    whole = f"[{quote}{text}{quote}, after]"
    found = composed(whole)
    if isinstance(found, yaml.MarkedYAMLError):
        assert mistakes(whole) == [f"f.yaml:{found.problem_mark.line + 1}: This is not YAML: {found.problem}."]
        return
    [document] = parse_documents(whole, path="f.yaml")
    texts = [(scalar.value, scalar.start_mark.line + 1) for scalar in found.value]
    assert [(value, document.line((index,))) for index, value in enumerate(document.value)] == texts


def test_json_may_be_indented_by_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n\t"a":\t[1,\n\t\t"\\t"]\n}\n')
    assert [document.value for document in read_documents(path)] == [{"a": [1, "\t"]}]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a: \xff", "is not UTF-8 text"), (b"a" * (1024 * 1024 + 1), "is larger than 1 MiB")],
)
def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words):
        read_documents(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read_documents(tmp_path / "a.yaml")
    assert refused.value.message == f"{tmp_path / 'a.yaml'}: The file cannot be read: No such file or directory."


def json_mistakes(text: str, bounds: DocumentBounds = DEFAULT_BOUNDS) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        parse_json(text, path="f.json", bounds=bounds)
    return refused.value.message.splitlines()


@given(JSON, st.sampled_from([None, 0, 1, 3]))
def test_json_is_read_as_yaml_reads_it_but_faster(value: object, indent: int | None) -> None:
    text = json.dumps({"a": value}, indent=indent)
    assert parse_json(text, path="f") == parse_documents(text, path="f")


def test_values_of_json_know_their_lines() -> None:
    [document] = parse_json('{\n"a": 1,\n\n"b": [\n{}, "x"\n, {"c":\n null}]\n}', path="f.json")
    assert document.value == {"a": 1, "b": [{}, "x", {"c": None}]}
    paths: list[tuple[str | int, ...]] = [(), ("a",), ("b",), ("b", 1), ("b", 2), ("b", 2, "c"), ("b", 9)]
    assert [document.line(path) for path in paths] == [1, 2, 4, 5, 6, 6, 4]


def test_all_mistakes_of_json_are_told_at_once() -> None:
    assert json_mistakes('{"a": 1,\n"a": 2,\n"b": ["\\ud800"]}') == [
        "f.json:2: a: is given twice",
        "f.json:3: b[0]: contains half of a surrogate pair, which is not a character",
    ]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "expecting value"),
        ('{"a": 1\n', 2, "expected ',' or '}'"),
        ("[1,\n]", 2, "expecting value"),
        ("[1 2]", 1, "expected ',' or ']'"),
        ("{\na: 1}", 2, "expected a key in double quotes"),
        ('{"a"\n 1}', 2, "expected ':'"),
        ('["a\nb"]', 1, "invalid control character at"),
        ('["a', 1, "unterminated string starting at"),
        ("[NaN]", 1, "NaN is not JSON"),
        ("{}\n{}", 2, "there is more after the end of the document"),
        ("[" * 200, 1, "it is nested deeper than 100 levels"),
    ],
)
def test_what_is_not_json_is_told_with_its_line(text: str, line: int, reason: str) -> None:
    assert json_mistakes(text) == [f"f.json:{line}: This is not JSON that can be read: {reason}."]


def test_a_document_has_a_bounded_number_of_values() -> None:
    bounds = DocumentBounds(values=100)
    assert len(str(parse_json(json.dumps([1] * 99), path="f.json", bounds=bounds)[0].value)) > 99
    assert json_mistakes(json.dumps([1] * 100), bounds) == [
        "f.json:1: This is not JSON that can be read: it has more than 100 values."
    ]
    with pytest.raises(ConfigurationError, match="repeats too much"):
        parse_documents(json.dumps([1] * 100), path="f.yaml", bounds=bounds)


def test_a_file_of_json_can_have_what_yaml_allows(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text('{\n\t"a": 1, # one\n}\n', encoding="utf-8")
    assert read_documents(file)[0].value == {"a": 1}


def test_a_large_file_that_is_not_json_is_refused_as_such(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps(["x" * 1000] * 1100) + "]", encoding="utf-8")
    with pytest.raises(ConfigurationError) as refused:
        read_documents(file, DocumentBounds(file_bytes=2 * 1024 * 1024))
    problem = "This is not JSON that can be read: there is more after the end of the document."
    assert refused.value.message == f"{file}:1: {problem}"


def test_a_large_file_is_read_as_a_small_one() -> None:
    text = 'a: [no, on, 2026-01-31, 0777, true, 12, -1.5, 1e5, ~]\nb: |\n  x\n  y\nc: {d: \'e\', "f": "\\t\\u00e9"}\n'
    [small] = parse_documents(text, path="f.yaml")
    [large] = parse_documents(text + "#" * 2**20, path="f.yaml")
    assert large == small
    with pytest.raises(ConfigurationError) as refused:
        parse_documents(text + "g: ]\n" + "#" * 2**20, path="f.yaml")
    assert refused.value.message.startswith("f.yaml:6: This is not YAML: ")
