"""Rewriting of other agents' messages for a reader: as user messages that begin with "For context:"; pure."""

from collections.abc import Callable

from bough.v1 import message_pb2

Rewriter = Callable[[message_pb2.Message], list[message_pb2.Message]]
"""Turns another agent's message into the messages that a reader sees of it."""


def as_context(message: message_pb2.Message) -> list[message_pb2.Message]:
    """Return one user message with the text, calls and results of a message; none if it has no such content.

    Reasoning is dropped; images, audio and files are kept as they are.
    """
    author = message.author
    text = "".join(part.text for part in message.parts if part.HasField("text"))
    sentences = [f"[{author}] said: {text}."] if text.strip() else []
    blobs: list[message_pb2.Part] = []
    for part in message.parts:
        content = part.WhichOneof("content")
        if content == "tool_call":
            call = part.tool_call
            sentences.append(f"[{author}] called tool: `{call.name}` with arguments: {call.arguments_json}.")
        elif content == "tool_result":
            result = part.tool_result
            sentences.append(f"[{author}] `{result.call.name}` tool returned result: {result_without_files(result)}.")
            blobs.extend(piece for piece in result.parts if piece.HasField("blob"))
        elif content == "data_json":
            sentences.append(f"[{author}] said: {part.data_json}.")
        elif content == "blob":
            blobs.append(part)
    if not sentences and not blobs:
        return []
    shown = message_pb2.Message(role=message_pb2.ROLE_USER, author=author, invocation_id=message.invocation_id)
    if sentences:
        shown.parts.add(text="For context: " + " ".join(sentences))
    shown.parts.extend(blobs)
    return [shown]


def result_without_files(result: message_pb2.ToolResult) -> str:
    """Return a tool's result as text, without its files: its error, if it failed, then its texts and JSON."""
    texts = [f"Error: {result.error.message}"] if result.HasField("error") else []
    for part in result.parts:
        content = part.WhichOneof("content")
        if content == "text":
            texts.append(part.text)
        elif content == "data_json":
            texts.append(part.data_json)
    return "\n".join(texts)
