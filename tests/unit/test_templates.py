"""Templates: which braces are placeholders, what they stand for, and that nothing is filled in twice."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2
from bough_server.errors import RunError
from bough_server.log.session_state import is_path, value_at
from bough_server.templates import names_in, render, template_mistake
from bough_server.truncation import MAX_TEXT_BYTES

STATE = {
    "name": "Ada",
    "count": 3,
    "review": {"approved": True, "notes": ["short", {"by": "Bo"}]},
    "a.b": 1,
    "no": None,
}


def rendered(template: str, **known: str) -> str:
    return render(template, {name: (lambda text=text: text) for name, text in known.items()}, STATE, what="The text")


def refusal(template: str) -> str:
    with pytest.raises(RunError) as refused:
        rendered(template)
    assert refused.value.reason == error_pb2.ERROR_REASON_BAD_ARGUMENTS
    return refused.value.message


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Hello {{state.name}}!", "Hello Ada!"),
        ("Hello {{ state.name }}!", "Hello Ada!"),
        ("{{state.count}} of {{state.count}}", "3 of 3"),
        ("{{state.review}}", '{"approved":true,"notes":["short",{"by":"Bo"}]}'),
        ("{{state.review.approved}}", "true"),
        ("{{state.review.notes.0}} {{state.review.notes.1.by}}", "short Bo"),
        ("{{state.a.b}}", "1"),
        ("{{state.no}}", "null"),
        ("[{{state.nothing?}}]", "[]"),
        ("[{{state.review.nothing?}}]", "[]"),
        ("{{state.name?}}", "Ada"),
        ("{{input}} {{input}}", "told told"),
        (
            '{"a": {"b": 1}} {{"c"}} { {input} } {{ }} {{}} {{1}} {{{{',
            '{"a": {"b": 1}} {{"c"}} { {input} } {{ }} {{}} {{1}} {{{{',
        ),
        ("{{{input}}}", "{told}"),
        ("", ""),
    ],
)
def test_a_placeholder_is_filled_in_and_any_other_brace_is_text(template: str, text: str) -> None:
    assert rendered(template, input="told") == text


def test_what_is_filled_in_is_not_looked_at_again() -> None:
    assert rendered("{{input}}", input="{{state.name}}") == "{{state.name}}"


def test_a_missing_value_is_named_with_what_to_write_instead() -> None:
    assert refusal("{{state.review.by}}") == (
        "The text names {{state.review.by}}, and the session's state has no value 'review.by'. Write "
        "{{state.review.by?}} if it may be missing."
    )
    assert "{{state.review.notes.2}}" in refusal("{{state.review.notes.2}}")
    assert "{{state.name.first}}" in refusal("{{state.name.first}}")


def test_a_name_that_was_not_validated_is_an_error_too() -> None:
    assert refusal("{{nothing}}") == "The text names {{nothing}}, which is unknown there."


def test_a_name_is_asked_for_once_and_only_where_it_is_there() -> None:
    asked: list[str] = []

    def ask(name: str) -> str:
        asked.append(name)
        return name

    known = {name: (lambda name=name: ask(name)) for name in ("input", "history")}
    assert render("{{input}}{{input}}", known, {}, what="It") == "inputinput"
    assert asked == ["input"]


def test_a_text_that_would_be_too_long_is_refused_before_it_is_made() -> None:
    with pytest.raises(RunError, match="It is longer than 512 KiB"):
        render("{{input}}" * 10_000, {"input": lambda: "x" * MAX_TEXT_BYTES}, {}, what="It")


def test_half_a_surrogate_pair_in_a_value_becomes_a_question_mark() -> None:
    assert render("{{state.odd}}", {}, {"odd": "a\ud800"}, what="It") == "a?"


def test_everything_that_stands_for_nothing_is_named_at_once() -> None:
    wrong = template_mistake("{{inptu}} {{input}} {{input?}} {{state}} {{state.a..b}} {{state.x?}}", ["input"])
    assert wrong == (
        "has unknown placeholders: {{inptu}}, {{input?}}, {{state}}, {{state.a..b}}. Known are "
        "{{input}}, {{state.NAME}}, and {{state.NAME?}} for a value that may be missing."
    )
    assert template_mistake("{{input}} {{state.x.y}} {{ 1 }}", ["input"]) == ""
    assert "Known are {{state.NAME}}" in template_mistake("{{name}}", [])


def test_a_mistake_is_short_however_many_there_are() -> None:
    assert len(template_mistake("".join(f"{{{{a{number}}}}}" for number in range(20_000)), ["input"])) < 400


@pytest.mark.parametrize("piece", ["{{", "{{ ", "{{a", "{{a ", "{{state.", "{{a.", "}}", "{{a}", "{{a?"])
def test_a_long_text_takes_time_linear_in_it(piece: str) -> None:
    began = time.process_time()
    names_in(piece * (1_000_000 // len(piece)))
    names_in("{{" + piece[-1] * 1_000_000)
    assert time.process_time() - began < 5


@given(st.text(alphabet="{}? .abstate01", max_size=60), st.text(alphabet="{}astate.? ", max_size=10))
def test_a_template_without_mistakes_renders_and_keeps_all_its_other_text(template: str, value: str) -> None:
    known = ["a", "b"]
    if template_mistake(template, known):
        return
    values = {name: (lambda: value) for name in known}
    try:
        text = render(template, values, {}, what="It")
    except RunError:
        assert any(name.startswith("state.") for name in names_in(template))
        return
    assert len(text) >= len(template) - sum(map(len, _placeholders(template)))
    if not _placeholders(template):
        assert text == template


def _placeholders(template: str) -> list[str]:
    return re.findall(r"\{\{ *[A-Za-z_][A-Za-z0-9_.:-]*\?? *\}\}", template)


@given(st.text(max_size=200))
def test_a_text_without_braces_is_itself(text: str) -> None:
    plain = text.replace("{", "").encode(errors="ignore").decode()
    assert rendered(plain) == plain


def test_the_longest_name_that_is_there_counts() -> None:
    assert value_at({"a": {"b": {"c": 1}}, "a.b": {"c": 2}}, "a.b.c") == 2
    with pytest.raises(KeyError):
        value_at({"a": {"b": {"c": 1}}, "a.b": {}}, "a.b.c")


@pytest.mark.parametrize("path", ["a", "a.b", "a.0", "review:x.approved-1", "A_b.c"])
def test_a_path_is_names_with_dots_between(path: str) -> None:
    assert is_path(path)


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "1", "a b", "a" * 513, "ä"])
def test_anything_else_is_no_path(path: str) -> None:
    assert not is_path(path)
