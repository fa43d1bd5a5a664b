"""Forms of messages that are kept between requests: the same bytes as without them, made once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bough.v1 import message_pb2
from bough_server.messages import user
from bough_server.models import tokens
from bough_server.models.model import MessageForms, ModelRequest, ToolSpec, encode_body, forms_of
from bough_server.models.openai.chat_request import chat_body
from bough_server.models.openai.responses_request import responses_body
from bough_server.models.structured_output import Body

BODIES: dict[str, Callable[[ModelRequest], Body]] = {
    "chat": lambda request: chat_body(request, model="gpt", name="smart"),
    "responses": lambda request: responses_body(request, model="gpt", name="smart"),
}


def _messages() -> list[message_pb2.Message]:
    call = message_pb2.ToolCall(call_id="c1", name="lookup", arguments_json='{"q": "ä"}')
    result = message_pb2.ToolResult(call=call, parts=[message_pb2.Part(text="gefunden: ä\n")])
    asked = message_pb2.Message(
        role=message_pb2.ROLE_ASSISTANT,
        parts=[
            message_pb2.Part(reasoning=message_pb2.Reasoning(text="hm", model="smart", encrypted="x")),
            message_pb2.Part(text="I look."),
            message_pb2.Part(tool_call=call),
        ],
    )
    answered = message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=result)])
    empty = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT)
    return [user("Was ist „es“?"), asked, answered, empty, user("And now?")]


def _request(messages: list[message_pb2.Message], forms: list[MessageForms]) -> ModelRequest:
    tool = ToolSpec(name="lookup", description="Looks it up.", input_schema_json='{"type":"object"}')
    return ModelRequest(messages=messages, forms=forms, instruction="Be brief.", tools=[tool])


@pytest.mark.parametrize("api", BODIES)
def test_a_request_has_the_same_bytes_with_kept_forms(api: str) -> None:
    messages = _messages()
    kept = _request(messages, list(map(MessageForms, messages[:-1])))
    plain = replace(kept, forms=())
    for _ in range(2):
        assert encode_body(BODIES[api](kept)) == encode_body(BODIES[api](plain))


def test_a_message_is_made_into_json_once_in_each_format() -> None:
    form, made = MessageForms(user("hello")), list[str]()

    def make(message: message_pb2.Message) -> list[Body]:
        made.append(message.parts[0].text)
        return [{"text": message.parts[0].text}]

    assert [list(form.json(format, make)) for format in ("a", "b", "a", "b")] == [[b'{"text":"hello"}']] * 4
    assert made == ["hello", "hello"]


def test_json_of_a_large_message_is_not_kept() -> None:
    form, made = MessageForms(user("x" * 70_000)), list[int]()

    def make(message: message_pb2.Message) -> list[Body]:
        made.append(1)
        return [{"text": message.parts[0].text}]

    assert form.json("a", make) == form.json("a", make)
    assert len(made) == 2


def test_tokens_of_a_message_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, counted = _messages(), list[message_pb2.Message]()
    request = _request(messages, list(map(MessageForms, messages)))
    expected = tokens.request_tokens(replace(request, forms=()))
    assert tokens.request_tokens(request) == expected
    monkeypatch.setattr(tokens, "message_tokens", counted.append)
    assert tokens.request_tokens(request) == expected
    assert counted == []


def test_forms_of_other_messages_are_not_used() -> None:
    messages = _messages()
    request = _request(messages, [MessageForms(user("another")), *map(MessageForms, messages)])
    assert [form.message for form in forms_of(request)] == messages
    assert encode_body(chat_body(request, model="gpt")) == encode_body(
        chat_body(replace(request, forms=()), model="gpt")
    )
