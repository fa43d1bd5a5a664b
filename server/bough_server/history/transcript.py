"""What an invocation saw and said, in order, and what it was under; pure, and a function of cuts, never of time."""

from collections.abc import Iterator
from dataclasses import dataclass

from bough.v1 import message_pb2


@dataclass(frozen=True, slots=True)
class Said:
    """A message with whose invocation it is of: for what a sub-agent was told, the sub-agent's."""

    message: message_pb2.Message
    agent: str
    chain: str


@dataclass(frozen=True, slots=True)
class Joined:
    """A child that has ended and was joined; `by_call` where its answer is also the result of a tool call."""

    transcript: "Transcript"
    by_call: bool


class Transcript:
    """One invocation's messages, and where it was called: its caller's transcript up to a cut."""

    def __init__(self, *, agent: str, chain: str, above: "Transcript | None" = None) -> None:
        self.agent = agent
        self.chain = chain
        self.above = above
        self.cut = len(above.entries) if above is not None else 0
        self.entries: list[Said | Joined] = []

    def say(self, message: message_pb2.Message) -> None:
        """Adds a message: what it was told, what its model said, what a tool answered."""
        self.entries.append(Said(message, self.agent, self.chain))

    def join(self, child: "Transcript", *, by_call: bool) -> None:
        """Adds what a child saw and said, after its end and in the order of the calls or lanes."""
        self.entries.append(Joined(child, by_call))

    def lineage(self) -> "list[tuple[Transcript, int]]":
        """Every transcript above with its cut, the root's first."""
        above: list[tuple[Transcript, int]] = []
        transcript = self
        while transcript.above is not None:
            above.append((transcript.above, transcript.cut))
            transcript = transcript.above
        above.reverse()
        return above

    def flat(self, cut: int | None = None, *, called_children: bool) -> Iterator[Said]:
        """The messages up to a cut, joined children's in their place; without recursion, however deep they nest."""
        stack: list[Iterator[Said | Joined]] = [iter(self.entries[:cut])]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry, Said):
                yield entry
            elif called_children or not entry.by_call:
                stack.append(iter(entry.transcript.entries))
