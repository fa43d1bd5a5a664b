"""What a model is asked, in the words of Chat Completions: nothing of a message is lost in silence."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from bough.v1 import error_pb2, message_pb2, model_pb2
from bough_server.models.model import ToolSpec
from bough_server.models.openai.chat_request import chat_body, chat_messages
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.structured_output import BadSettings, Body, result_text
from tests.support.model_calls import asking, assistant, call, tool_result, user

UNKNOWN = "application/octet-stream"
PNG = base64.b64encode(b"png").decode()


def blob(media_type: str, *, data: bytes = b"", uri: str | None = None, filename: str = "") -> message_pb2.Part:
    if uri is not None:
        return message_pb2.Part(blob=message_pb2.Blob(uri=uri, media_type=media_type, filename=filename))
    return message_pb2.Part(blob=message_pb2.Blob(data=data, media_type=media_type, filename=filename))


def said(*parts: message_pb2.Part) -> object:
    return chat_messages("", [message_pb2.Message(role=message_pb2.ROLE_USER, parts=parts)])[0]["content"]


@pytest.mark.parametrize(
    ("part", "piece"),
    [
        (
            blob("image/png", data=b"png"),
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        ),
        (
            blob("image/png", uri="https://example.org/a.png"),
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ),
        (blob("audio/wav", data=b"png"), {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}),
        (blob("audio/mpeg", data=b"png"), {"type": "input_audio", "input_audio": {"data": PNG, "format": "mp3"}}),
        (
            blob("application/pdf", data=b"png", filename="a.pdf"),
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}},
        ),
        (
            blob("", data=b"png"),
            {"type": "file", "file": {"filename": "file", "file_data": f"data:{UNKNOWN};base64,{PNG}"}},
        ),
        (
            blob("text/csv", data=b"a,b", filename="t.csv"),
            {"type": "text", "text": "[text/csv 't.csv']\na,b"},
        ),
        (
            blob("application/pdf", uri="https://example.org/a.pdf"),
            {"type": "text", "text": "[application/pdf at https://example.org/a.pdf]"},
        ),
        (blob("video/mp4", data=b"png"), {"type": "text", "text": "[video/mp4 of 3 bytes, not shown]"}),
        (blob("audio/ogg", data=b"png"), {"type": "text", "text": "[audio/ogg of 3 bytes, not shown]"}),
    ],
)
def test_a_blob_goes_where_the_api_has_a_place_for_it_else_it_is_said(
    part: message_pb2.Part, piece: dict[str, object]
) -> None:
    assert said(message_pb2.Part(text="Look:"), part) == [{"type": "text", "text": "Look:"}, piece]


def test_texts_and_json_of_a_user_are_one_text() -> None:
    parts = [message_pb2.Part(text="a"), message_pb2.Part(data_json='{"b": 1}'), message_pb2.Part(text="c")]
    assert said(*parts) == 'a\n{"b": 1}\nc'


def test_a_part_of_a_kind_that_is_not_known_is_said_to_be_there() -> None:
    assert said(message_pb2.Part(text="a"), message_pb2.Part()) == "a\n[content of an unknown kind]"


def test_reasoning_is_not_sent_back() -> None:
    message = assistant("Yes.")
    message.parts.insert(0, message_pb2.Part(reasoning=message_pb2.Reasoning(text="Hm.")))
    assert chat_messages("", [message]) == [{"role": "assistant", "content": "Yes."}]


def test_an_assistant_message_without_text_has_none_beside_its_calls_and_an_empty_one_is_left_out() -> None:
    made = call("c1", "lookup", "{}")
    assert chat_messages("", [assistant("", made), assistant("")]) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}],
        }
    ]


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"a":  1}', '{"a":  1}'),
        ("", "{}"),
        (" ", "{}"),
        ('{"a": ', '{"invalid_json": "{\\"a\\": "}'),
        ("[1]", '{"invalid_json": "[1]"}'),
        ("[" * 5000, json.dumps({"invalid_json": "[" * 5000})),
    ],
)
def test_arguments_that_a_provider_would_refuse_are_wrapped(written: str, sent: str) -> None:
    messages = chat_messages("", [assistant("", call("c1", "lookup", written))])
    assert messages[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": sent}}
    ]


def test_every_result_is_a_message_of_its_own() -> None:
    first, second = call("c1", "lookup", "{}"), call("c2", "lookup", "{}")
    both = tool_result(first, "one")
    both.parts.extend(tool_result(second, "two").parts)
    assert chat_messages("Be brief.", [both]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


def test_a_failed_result_is_its_error_and_files_in_a_result_are_said() -> None:
    failed = message_pb2.ToolResult(error=error_pb2.AgentError(message="No such word."))
    assert result_text(failed) == "Error: No such word."
    failed.parts.add(text="Did you mean 'oak'?")
    assert result_text(failed) == "Error: No such word.\nDid you mean 'oak'?"
    parts = [message_pb2.Part(text="see"), message_pb2.Part(data_json="[1]"), blob("image/png", data=b"png")]
    assert result_text(message_pb2.ToolResult(parts=parts)) == "see\n[1]\n[image/png of 3 bytes, not shown]"


def test_roles_are_kept_and_none_is_the_user() -> None:
    messages = [
        message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.Part(text="s")]),
        message_pb2.Message(parts=[message_pb2.Part(text="u")]),
    ]
    assert chat_messages("", messages) == [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_what_is_not_set_is_not_sent() -> None:
    assert chat_body(asking(user("hi")), model="m") == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("body_of", [chat_body, partial(responses_body, name="m")])
def test_a_call_that_is_required_is_asked_for_whatever_the_settings_say(body_of: Callable[..., Body]) -> None:
    tools = [ToolSpec(name="t", description="", input_schema_json="")]
    request = asking(tools=tools, settings=model_pb2.ModelSettings(extra_json='{"tool_choice": "none"}'))
    assert body_of(request, model="m")["tool_choice"] == "none"
    assert body_of(replace(request, tool_choice="required"), model="m")["tool_choice"] == "required"
    assert "tool_choice" not in body_of(asking(tools=tools), model="m")


def test_a_tool_without_a_schema_takes_an_object() -> None:
    body = chat_body(asking(tools=[ToolSpec(name="t", description="", input_schema_json="")]), model="m")
    assert body["tools"] == [
        {"type": "function", "function": {"name": "t", "description": "", "parameters": {"type": "object"}}}
    ]


@pytest.mark.parametrize(
    ("extra", "said_of_it"),
    [
        ("{", "extra_json is not JSON."),
        ("[1]", "extra_json is not one JSON object."),
        ('{"stream": false, "model": "x", "seed": 1}', "extra_json may not set model, stream."),
    ],
)
def test_further_settings_must_be_an_object_that_leaves_the_request_alone(extra: str, said_of_it: str) -> None:
    with pytest.raises(BadSettings) as raised:
        chat_body(asking(settings=model_pb2.ModelSettings(extra_json=extra)), model="m")
    assert str(raised.value) == said_of_it


def test_the_files_of_results_come_after_all_results_in_a_message_of_the_users() -> None:
    made = [call("c1", "look", "{}"), call("c2", "read", "{}"), call("c3", "hear", "{}")]
    parts = [
        [message_pb2.Part(text="A tree."), blob("image/png", data=b"png", filename="t.png")],
        [message_pb2.Part(text="No image.")],
        [blob("audio/ogg", data=b"png")],
    ]
    results = [message_pb2.ToolResult(call=one, parts=own) for one, own in zip(made, parts, strict=True)]
    messages = [
        message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=result)])
        for result in results
    ]
    files = {
        "role": "user",
        "content": [
            {"type": "text", "text": "[files of look]"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        ],
    }
    sent = [
        {"role": "tool", "tool_call_id": "c1", "content": "A tree.\n[image/png 't.png', shown below]"},
        {"role": "tool", "tool_call_id": "c2", "content": "No image."},
        {"role": "tool", "tool_call_id": "c3", "content": "[audio/ogg of 3 bytes, not shown]"},
        files,
    ]
    assert chat_messages("", messages) == sent
    assert chat_messages("", [*messages, assistant("Yes.")]) == [*sent, {"role": "assistant", "content": "Yes."}]
