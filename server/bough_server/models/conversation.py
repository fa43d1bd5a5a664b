"""Where a request's current turn begins and how far it has come, read from its messages alone; pure."""

import itertools
from collections.abc import Sequence
from typing import Final

from bough.v1 import message_pb2

_REWRITTEN: Final = "For context:"


def text_of(message: message_pb2.Message) -> str:
    """The text of a message, its parts joined by line feeds."""
    return "\n".join(part.text for part in message.parts if part.text)


def current_turn(messages: Sequence[message_pb2.Message]) -> Sequence[message_pb2.Message]:
    """The messages from the user's that opened the turn on.

    It is the last user message that says what it is in its session, and where none does, the last one that is not
    another agent's ("For context:"). So a question that the runtime adds by itself opens no turn. Without any: all.
    """
    plain = [index for index, message in enumerate(messages) if _is_plain(message)]
    stored = [index for index in plain if messages[index].kind != message_pb2.MESSAGE_KIND_UNSPECIFIED]
    opening = (stored or plain or [0])[-1]
    return messages[opening:]


def step_of(turn: Sequence[message_pb2.Message]) -> int:
    """How many answers the model has given in a turn. A repeated question stands for an answer that was empty."""
    pairs = itertools.pairwise(turn)
    return sum(
        after.role == message_pb2.ROLE_ASSISTANT or (_is_plain(after) and before.role != message_pb2.ROLE_ASSISTANT)
        for before, after in pairs
    )


def answered_tools(turn: Sequence[message_pb2.Message]) -> set[str]:
    """The names of the tools that have given a result in a turn, failed ones included."""
    return {part.tool_result.call.name for message in turn for part in message.parts if part.HasField("tool_result")}


def _is_plain(message: message_pb2.Message) -> bool:
    if message.role not in (message_pb2.ROLE_USER, message_pb2.ROLE_UNSPECIFIED):
        return False
    return not text_of(message).startswith(_REWRITTEN) and not _has_foreign_author(message)


def _has_foreign_author(message: message_pb2.Message) -> bool:
    """Whether it is another agent's file, which has no text that says so."""
    return message.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED and message.author not in ("", "user")
