"""Conversations of other tools: what the user said, what was answered, and the calls in between.

Both forms are read everywhere: messages with `content` or with `parts`, calls in `tools` or in `intermediate_data`.
"""

import base64
import binascii
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import execution_pb2, invocation_pb2, message_pb2
from bough.v1.message_pb2 import ROLE_ASSISTANT, ROLE_USER, Blob, Message, Part
from bough_server.evals.importers.values import JsonObject, JsonValue, as_json, object_at

_SUCCEEDED: Final = execution_pb2.EXECUTION_STATE_SUCCEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCall:
    """A tool call of a conversation; None for arguments or a result that are missing."""

    name: str
    call_id: str = ""
    arguments: JsonValue = None
    result: JsonValue = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One turn of a conversation: the user's message, the answer, and the calls in their order."""

    user: Message
    answer: str | None = None
    """None if there is no answer; a null text is an answer without text."""
    calls: Sequence[ImportedCall] = ()
    recorded: invocation_pb2.Invocation | None = None
    """What is judged instead of a run."""


def read_exchange(source: JsonObject, *, with_results: bool = True) -> Exchange:
    """Return what an invocation of a conversation expects. Raises ConfigurationError."""
    final = source.child("finalResponse")
    return Exchange(
        user=_message(source.child("userContent"), ROLE_USER),
        answer=None if final is None else text_of_content(final),
        calls=list(_calls(source, with_results=with_results)),
    )


def read_invocation(source: JsonObject) -> invocation_pb2.Invocation:
    """Return an invocation of a conversation as the record of a run that succeeded. Raises ConfigurationError."""
    record = invocation_pb2.Invocation(
        invocation_id=source.text("invocationId"), state=_SUCCEEDED, complete=True, agents=_agents(source)
    )
    record.user_content.CopyFrom(_message(source.child("userContent"), ROLE_USER))
    if (final := source.child("finalResponse")) is not None:
        record.final_response.CopyFrom(_message(final, ROLE_ASSISTANT))
    for said in _intermediate_messages(source):
        record.intermediate_responses.append(_message(said, ROLE_ASSISTANT))
    record.tools.extend(
        _tool_invocation(call, number) for number, call in enumerate(_calls(source, with_results=True), start=1)
    )
    record.agent = record.agents[0].name if record.agents else ""
    record.agents_total, record.tools_total = len(record.agents), len(record.tools)
    record.as_of_sequence = record.tools_total
    return record


def text_of_content(content: JsonObject) -> str:
    """Return the text of a message: its `content`, else its text parts, one a line. Raises ConfigurationError."""
    parts = (part for part in _parts(content) if not part.flag("thought"))
    texts = [content.text("content"), *(part.text("text") for part in parts)]
    return "\n".join(text for text in texts if text)


def _message(content: JsonObject | None, role: message_pb2.Role.ValueType) -> Message:
    message = Message(role=role)
    if content is None:
        return message
    if text := content.text("content"):
        message.parts.append(Part(text=text))
    message.parts.extend(filter(None, map(_part, _parts(content))))
    return message


def _parts(content: JsonObject) -> list[JsonObject]:
    return [*content.children("parts"), *content.children("contentParts")]


def _part(source: JsonObject) -> Part | None:
    """Return a text, an image or a file; None for a part that is none of them, or empty."""
    if source.flag("thought"):
        return None
    if text := source.text("text"):
        return Part(text=text)
    inline, linked, image = source.child("inlineData"), source.child("fileData"), source.child("image")
    if inline is not None:
        return _file(inline, inline.text("mimeType"))
    if linked is not None:
        return _file(linked, linked.text("mimeType"))
    if image is not None:
        kind = image.text("format")
        return _file(image, f"image/{kind}" if kind else "")
    return None


def _file(source: JsonObject, media_type: str) -> Part | None:
    """Return a file by its address or its bytes; None if it has neither. Raises ConfigurationError."""
    if uri := source.text("fileUri") or source.text("url"):
        return Part(blob=Blob(uri=uri, media_type=media_type))
    data = source.text("data")
    try:
        # genai writes URL-safe base64, Go the standard one.
        decoded = base64.b64decode(data.translate(str.maketrans("-_", "+/")) + "=" * (-len(data) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise source.wrong("data", "must be base64") from None
    return Part(blob=Blob(data=decoded, media_type=media_type)) if decoded else None


def _calls(source: JsonObject, *, with_results: bool) -> Iterator[ImportedCall]:
    for tool in source.children("tools"):
        yield ImportedCall(
            name=tool.require_text("name"),
            call_id=tool.text("id"),
            arguments=tool.raw("arguments"),
            result=tool.raw("result"),
        )
    yield from _intermediate_calls(source, with_results=with_results)


def _intermediate_calls(source: JsonObject, *, with_results: bool) -> Iterator[ImportedCall]:
    """Yield the calls of `intermediate_data`, which is lists of calls and responses, or a list of events."""
    data = source.child("intermediateData")
    if data is None:
        return
    uses = list(data.children("toolUses"))
    responses = list(data.children("toolResponses")) if with_results else []
    for event in data.children("invocationEvents"):
        content = event.child("content")
        for part in _parts(content) if content is not None else ():
            uses.extend(filter(None, [part.child("functionCall")]))
            if with_results:
                responses.extend(filter(None, [part.child("functionResponse")]))
    for use in uses:
        response = _response_of(use, responses)
        yield ImportedCall(
            name=use.require_text("name"),
            call_id=use.text("id"),
            arguments=use.raw("args"),
            result=None if response is None else response.raw("response"),
        )


def _response_of(use: JsonObject, responses: list[JsonObject]) -> JsonObject | None:
    """Take the response to a call from the list: that with its id, without an id the first of its name."""
    for index, response in enumerate(responses):
        if response.text("id") == use.text("id") and (use.text("id") or response.text("name") == use.text("name")):
            return responses.pop(index)
    return None


def _intermediate_messages(source: JsonObject) -> list[JsonObject]:
    """Return what was said before the answer."""
    messages = list(source.children("intermediateResponses"))
    data = source.child("intermediateData")
    if data is None:
        return messages
    said = data.raw("intermediateResponses")
    # Pairs of an author and a list of parts.
    if said is not None and not (isinstance(said, list) and all(isinstance(each, list) for each in said)):
        raise data.wrong("intermediateResponses", "must be a list of authors with lists of parts")
    for pair in said or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise data.wrong("intermediateResponses", "must be a list of authors with lists of parts")
        messages.append(object_at(data.document, {"parts": pair[1]}, data.path))
    return messages


def _agents(source: JsonObject) -> list[invocation_pb2.AgentInvocation]:
    """Return the agents, which are in preorder, with their depths."""
    depths: dict[str, int] = {}
    agents: list[invocation_pb2.AgentInvocation] = []
    for number, agent in enumerate(source.children("agents")):
        name, own, parent = agent.text("name"), agent.text("invocationId"), agent.text("parentInvocationId")
        own = own or f"agent-{number}"
        parent = parent if parent in depths else ""
        depths.setdefault(own, depths[parent] + 1 if parent else 0)
        agents.append(
            invocation_pb2.AgentInvocation(
                invocation_id=own,
                parent_invocation_id=parent,
                name=name,
                branch=agent.text("branch"),
                depth=depths[own],
                state=_SUCCEEDED,
            )
        )
    children = Counter(agent.parent_invocation_id for agent in agents)
    for one in agents:
        one.child_count = children[one.invocation_id]
    return agents


def _tool_invocation(call: ImportedCall, number: int) -> invocation_pb2.ToolInvocation:
    return invocation_pb2.ToolInvocation(
        call_id=call.call_id or f"call-{number}",
        name=call.name,
        arguments_json="{}" if call.arguments is None else as_json(call.arguments),
        result_json=as_json(call.result),
        state=_SUCCEEDED,
        sequence=number,
    )
