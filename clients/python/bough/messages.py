"""Convert between messages and text."""

from bough.v1 import message_pb2


def user_message(content: str | message_pb2.Message) -> message_pb2.Message:
    """Return a user message with this text; a message is returned as it is."""
    if isinstance(content, message_pb2.Message):
        return content
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=content)])


def text_of(message: message_pb2.Message) -> str:
    """Return the text parts of a message, joined; its JSON parts if it has no text."""
    texts = [part.text for part in message.parts if part.WhichOneof("content") == "text"]
    if not texts:
        texts = [part.data_json for part in message.parts if part.WhichOneof("content") == "data_json"]
    return "".join(texts)
