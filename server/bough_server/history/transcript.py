"""What an invocation saw and said, in order, and what it was under; pure, and a function of cuts, never of time."""

from collections.abc import Iterator
from dataclasses import dataclass

from bough.v1 import message_pb2


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A message with whose invocation it is of: for what a sub-agent was told, the sub-agent's."""

    message: message_pb2.Message
    agent: str
    chain: str
    position: int = 0
    """Its place in the session before the run; 0 where it was said in the run."""


@dataclass(frozen=True, slots=True)
class JoinedChild:
    """A child that has ended and was joined; `by_call` where its answer is also the result of a tool call."""

    transcript: "Transcript"
    by_call: bool


class Transcript:
    """One invocation's messages, and where it was called: its caller's transcript up to a cut.

    A lane of an invocation has a transcript of its own, with its invocation's above it.
    """

    def __init__(self, *, agent: str, chain: str, above: "Transcript | None" = None, is_lane: bool = False) -> None:
        self.agent = agent
        self.chain = chain
        self.above = above
        self.is_lane = is_lane
        self.cut = len(above.entries) if above is not None else 0
        self.entries: list[HistoryEntry | JoinedChild] = []

    def say(self, message: message_pb2.Message) -> None:
        """Adds a message: what it was told, what its model said, what a tool answered."""
        self.entries.append(HistoryEntry(message, self.agent, self.chain))

    def join(self, child: "Transcript", *, by_call: bool) -> None:
        """Adds what a child saw and said, after its end and in the order of the calls or lanes."""
        self.entries.append(JoinedChild(child, by_call))

    def lane(self) -> "Transcript":
        """A transcript for a lane that begins now; what was said before is the lane's own as well."""
        return Transcript(agent=self.agent, chain=self.chain, above=self, is_lane=True)

    def own(self) -> Iterator[HistoryEntry]:
        """The messages of its invocation, for a lane those from before its fork first; called children left out."""
        forks: list[tuple[Transcript, int | None]] = [(self, None)]
        transcript = self
        while transcript.is_lane and transcript.above is not None:
            forks.append((transcript.above, transcript.cut))
            transcript = transcript.above
        for fork, cut in reversed(forks):
            yield from fork.flat(cut, called_children=False)

    def lineage(self) -> "list[tuple[Transcript, int]]":
        """Every transcript above its invocation's with its cut, the root's first."""
        above: list[tuple[Transcript, int]] = []
        transcript = self
        while transcript.is_lane and transcript.above is not None:
            transcript = transcript.above
        while transcript.above is not None:
            above.append((transcript.above, transcript.cut))
            transcript = transcript.above
        above.reverse()
        return above

    def flat(self, cut: int | None = None, *, called_children: bool) -> Iterator[HistoryEntry]:
        """The messages up to a cut, joined children's in their place; without recursion, however deep they nest."""
        stack: list[Iterator[HistoryEntry | JoinedChild]] = [iter(self.entries[:cut])]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry, HistoryEntry):
                yield entry
            elif called_children or not entry.by_call:
                stack.append(iter(entry.transcript.entries))
