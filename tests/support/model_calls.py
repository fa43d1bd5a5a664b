"""Requests to models and what becomes of them, for tests of models."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from bough.v1 import message_pb2, model_pb2, step_pb2
from bough_server.errors import ModelError
from bough_server.models.model import Delta, Deltas, Model, ModelRequest, ReasoningDelta, TextDelta, ToolSpec

LOOKUP = ToolSpec(
    name="lookup",
    description="Looks a word up.",
    input_schema_json='{"type":"object","properties":{"query":{"type":"string"}},"required":["query"]}',
)


def user(text: str) -> message_pb2.Message:
    """What a user says."""
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)])


def assistant(text: str = "", *calls: message_pb2.ToolCall) -> message_pb2.Message:
    """What a model said."""
    parts = [message_pb2.Part(text=text)] if text else []
    parts += [message_pb2.Part(tool_call=call) for call in calls]
    return message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=parts)


def tool_result(call: message_pb2.ToolCall, text: str) -> message_pb2.Message:
    """What a tool gave."""
    result = message_pb2.ToolResult(call=call, parts=[message_pb2.Part(text=text)])
    return message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(tool_result=result)])


def call(call_id: str, name: str, arguments: str) -> message_pb2.ToolCall:
    """A tool call as it stands in history."""
    return message_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments)


def asking(
    *messages: message_pb2.Message,
    instruction: str = "",
    tools: Sequence[ToolSpec] = (),
    settings: model_pb2.ModelSettings | None = None,
    agent: str = "",
) -> ModelRequest:
    """A request; without messages the user says hello."""
    return ModelRequest(
        messages=messages or [user("hello")],
        instruction=instruction,
        tools=tools,
        settings=settings or model_pb2.ModelSettings(),
        agent=agent,
    )


async def answer(model: Model, request: ModelRequest) -> tuple[list[Delta], step_pb2.LlmResponse]:
    """The deltas of an attempt and its whole answer, which must be the last item."""
    items = [item async for item in model.stream(request)]
    response = items.pop()
    assert isinstance(response, step_pb2.LlmResponse)
    assert not any(isinstance(item, step_pb2.LlmResponse) for item in items)
    deltas = [delta for item in items for delta in cast(Deltas, item)]
    assert text_of(deltas) == "".join(part.text for part in response.message.parts)
    return deltas, response


async def failure(model: Model, request: ModelRequest) -> tuple[list[Delta], ModelError]:
    """The deltas of an attempt that fails, and how."""
    deltas: list[Delta] = []
    try:
        stream = cast(AsyncGenerator[Deltas | step_pb2.LlmResponse, None], model.stream(request))
        async with aclosing(stream):
            async for item in stream:
                assert not isinstance(item, step_pb2.LlmResponse)
                assert item, "an item has at least one delta"
                deltas += item
    except ModelError as error:
        return deltas, error
    raise AssertionError("the model answered")


def text_of(deltas: Sequence[Delta]) -> str:
    """What the text deltas say together."""
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def reasoning_of(deltas: Sequence[Delta]) -> str:
    """What the reasoning deltas say together."""
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
