"""One message as an agent is shown it, with where it is from: what a cut of a history has to know; pure."""

from dataclasses import dataclass
from typing import Final

from bough.v1 import message_pb2

Call = tuple[str, str]
"""The invocation that made a tool call, and the call's id."""

NO_CALLS: Final[frozenset[Call]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A message as its reader is shown it: its own in native roles, everybody else's rewritten."""

    message: message_pb2.Message
    position: int = 0
    """The place in the session of what it was made of; 0 where that was said in the run."""
    is_told: bool = False
    """Whether an exchange begins with it: a user, or a caller, said it to the reader."""
    is_again: bool = False
    """Whether a summary stands for it already: it was told last, and is shown behind that all the same."""
    asks: frozenset[Call] = NO_CALLS
    """The calls that what it was made of asks for, whether or not their names are left in it."""
    answers: Call | None = None
    """The call whose result it was made of."""


def is_summary(message: message_pb2.Message) -> bool:
    """Whether a message stands for older ones; it is shown to its author alone, in their place."""
    return message.kind == message_pb2.MESSAGE_KIND_SUMMARY
