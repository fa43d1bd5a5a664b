"""Read, make and copy messages: their text, their tool calls, and messages of one text."""

import json
from contextlib import suppress
from typing import TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import eval_result_pb2, invocation_pb2, message_pb2

M = TypeVar("M", bound=Message)


def text_of(message: message_pb2.Message | message_pb2.ToolResult) -> str:
    """Return the text of a message: its parts of text joined, and its parts of JSON among them as JSON text.

    Files, reasoning, calls and results are left out. The client's `bough.text_of` returns the same.
    """
    return "".join(part.text or part.data_json for part in message.parts)


def calls_of(message: message_pb2.Message) -> list[message_pb2.ToolCall]:
    """Return the tool calls of a model's message, in their order."""
    return [part.tool_call for part in message.parts if part.HasField("tool_call")]


def effective_arguments(call: invocation_pb2.ToolInvocation | eval_result_pb2.EvalCall) -> str:
    """Return the arguments that a tool ran with: those that an approver edited, else those that the model wrote."""
    return call.executed_arguments_json or call.arguments_json


def has_truncated_arguments(call: invocation_pb2.ToolInvocation) -> bool:
    """Return whether the arguments that a tool ran with were cut in the record."""
    is_edited = call.executed_arguments_json or call.executed_arguments_truncated
    return call.executed_arguments_truncated if is_edited else call.arguments_truncated


def constant_in(data_json: str) -> str:
    """Return NaN, Infinity or -Infinity if it is a value in a JSON text; else empty text.

    Python reads and writes these constants. JSON has none of them, and other readers of a log would stop there.
    """
    found: list[str] = []
    if "NaN" in data_json or "Infinity" in data_json:  # cheap, and almost never true
        with suppress(ValueError, RecursionError):
            json.loads(data_json, parse_constant=found.append)
    return found[0] if found else ""


def user(text: str) -> message_pb2.Message:
    """Return a message of one text in the user's role."""
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)])


def copy_of(message: M) -> M:
    """Return a copy that may be changed, and that keeps no other message in memory."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def set_time(timestamp: Timestamp, nanoseconds: int) -> None:
    """Set a time to nanoseconds since the Unix epoch, from 1970 on; a page of a list sets hundreds."""
    # FromNanoseconds is Python code that takes five times as long.
    timestamp.seconds, timestamp.nanos = divmod(nanoseconds, 1_000_000_000)
