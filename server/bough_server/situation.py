"""What the operator's pure functions are shown of where they are called; making one is the runtime's."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bough.v1 import message_pb2


class Values(Mapping[str, Any]):
    """A session's values by name, read only: every reading gives a copy."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """`texts` are the values as JSON text."""
        self._texts = texts

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known where a condition or an input builder is called: copies of what is recorded, and nothing else."""

    agent: str
    """The agent whose link or loop it is."""
    state: Mapping[str, Any]
    """The session's values, as JSON."""
    input: message_pb2.Message
    """What that agent was told."""
    user: message_pb2.Message
    """What the user said."""
    message: message_pb2.Message | None = None
    """What the call says: of a model, of a transfer or of code; None where nothing does."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of a model's call, as JSON; empty where no model called."""
    round: int | None = None
    """The round of the loop that has just ended, from 0; None where it is no loop's condition."""
    plan: str = ""
    """The steps of the plan that are left, as text; empty where there is no plan."""
    step: str = ""
    """The step of the plan that is to be done; empty where there is none."""
    executed_steps: str = ""
    """The steps that were done and what came of them, as text; empty where there are none."""
    look: Callable[[], Sequence[message_pb2.Message]] = field(default=tuple, repr=False, compare=False)
    """Gives what `history` is made of."""

    @cached_property
    def history(self) -> list[message_pb2.Message]:
        """What the agent sees of the session and the run so far, as its model would be shown it."""
        return [copied(message) for message in self.look()]


def copied(message: message_pb2.Message) -> message_pb2.Message:
    """A copy that may be changed."""
    copy = message_pb2.Message()
    copy.CopyFrom(message)
    return copy


def text_of(message: message_pb2.Message) -> str:
    """The texts and the JSON of a message as one text."""
    return "".join(part.text or part.data_json for part in message.parts)
