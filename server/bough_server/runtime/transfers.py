"""Histories without the calls that hand over and their results, for agents that are not to be shown them; pure."""

from collections.abc import Iterable

from bough.v1 import message_pb2
from bough_server.history.rewrite import Rewriter, for_context
from bough_server.tools.builtin import TRANSFER


def is_transfer(result: message_pb2.ToolResult) -> bool:
    """Whether a result is that of a transfer which took place."""
    return result.call.name == TRANSFER and not result.HasField("error")


def skip_transfers(message: message_pb2.Message, rewrite: Rewriter = for_context) -> list[message_pb2.Message]:
    """Another agent's message as a reader is shown it that is shown no transfers."""
    return [shown for left in without_transfers([message]) for shown in rewrite(left)]


def without_transfers(messages: Iterable[message_pb2.Message]) -> list[message_pb2.Message]:
    """The same messages without transfers; those of which nothing is left are left out."""
    kept: list[message_pb2.Message] = []
    for message in messages:
        parts = [part for part in message.parts if not _is_about_one(part)]
        if len(parts) == len(message.parts):
            kept.append(message)
        elif parts:
            left = message_pb2.Message()
            left.CopyFrom(message)
            left.ClearField("parts")
            left.parts.extend(parts)
            kept.append(left)
    return kept


def _is_about_one(part: message_pb2.Part) -> bool:
    return TRANSFER in (part.tool_call.name, part.tool_result.call.name)
