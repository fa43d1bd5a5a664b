"""Convert between messages and texts, and files to parts of messages."""

import json
import mimetypes
from os import PathLike
from pathlib import Path
from typing import Final

from bough.arguments import wrong_type
from bough.v1 import message_pb2

_UNKNOWN: Final = "application/octet-stream"


def user_message(input: str | message_pb2.Message, *parts: message_pb2.Part) -> message_pb2.Message:
    """Return a user message with this text and these parts, such as files; a message without them as it is."""
    if isinstance(input, message_pb2.Message):
        return input if not parts else message_pb2.Message(role=input.role, parts=[*input.parts, *parts])
    if not isinstance(input, str):
        raise wrong_type("input", "a str or a Message", input)
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=input), *parts])


def file_part(path: str | PathLike[str], *, media_type: str = "") -> message_pb2.Part:
    """Read a file into a part of a message. Default of `media_type`: the one that its name suggests.

    Raises OSError.
    """
    named = Path(path)
    guessed = media_type or mimetypes.guess_type(named.name)[0] or _UNKNOWN
    data = named.read_bytes()
    blob = message_pb2.Blob(data=data, media_type=guessed, filename=named.name, size_bytes=len(data))
    return message_pb2.Part(blob=blob)


def json_text(value: object) -> str:
    """Return a value as JSON text. Raises TypeError or ValueError if JSON cannot represent it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def text_of(message: message_pb2.Message) -> str:
    """Return the text of a message: its parts of text joined, and its parts of JSON among them as JSON text.

    Files, reasoning, calls and results are left out. `bough_server.text_of` returns the same.
    """
    return "".join(part.text or part.data_json for part in message.parts)
