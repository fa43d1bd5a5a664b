"""Messages in the words of a caller: text in, text out; no call is made here."""

from bough.v1 import message_pb2


def user_message(content: str | message_pb2.Message) -> message_pb2.Message:
    """A user's message from its text; a message is given back as it is."""
    if isinstance(content, message_pb2.Message):
        return content
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=content)])


def text_of(message: message_pb2.Message) -> str:
    """What a message says in words: its text parts, joined; a message without any gives its JSON parts."""
    texts = [part.text for part in message.parts if part.WhichOneof("content") == "text"]
    if not texts:
        texts = [part.data_json for part in message.parts if part.WhichOneof("content") == "data_json"]
    return "".join(texts)
