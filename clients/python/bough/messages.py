"""Convert between messages and text."""

from bough.v1 import message_pb2


def user_message(input: str | message_pb2.Message) -> message_pb2.Message:
    """Return a user message with this text; a message is returned as it is."""
    if isinstance(input, message_pb2.Message):
        return input
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=input)])


def text_of(message: message_pb2.Message) -> str:
    """Return the text of a message: its parts of text joined, and its parts of JSON among them as JSON text.

    Files, reasoning, calls and results are left out. `bough_server.text_of` returns the same.
    """
    return "".join(part.text or part.data_json for part in message.parts)
