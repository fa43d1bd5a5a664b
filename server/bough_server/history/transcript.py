"""Transcript of an invocation: its messages in order, below its caller's up to a cut; pure.

It depends on cuts only, never on time, so a replay builds the same histories.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bough.v1 import message_pb2


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """A message with the agent and chain of its invocation; the input of a sub-agent belongs to the sub-agent."""

    message: message_pb2.Message
    agent: str
    chain: str
    position: int = 0
    """Its position in the session before the run, from 1; 0 for a message of the run."""
    is_call: bool = False
    """True if it stems from a StoredCall: the list of the session's messages leaves it out."""
    is_relay: bool = False
    """True if it is the answer of a root that relayed the words of another agent, which has said them before."""
    inside: tuple[str, ...] = ()
    """Of a result in the session: the invocations that ran inside the call."""


@dataclass(frozen=True, slots=True)
class JoinedChild:
    """A child that has ended and was joined; `by_call` if its answer is also the result of a tool call."""

    transcript: "Transcript"
    by_call: bool


class Transcript:
    """The messages of one invocation; `above` is its caller's transcript, seen up to the entry `above_end`.

    Each lane of an invocation has its own transcript, with its invocation's as `above`.
    """

    def __init__(self, *, agent: str, chain: str, above: "Transcript | None" = None, is_lane: bool = False) -> None:
        self.agent = agent
        self.chain = chain
        self.above = above
        self.is_lane = is_lane
        self.above_end = len(above.entries) if above is not None else 0
        self.entries: list[HistoryEntry | JoinedChild] = []

    def add_message(self, message: message_pb2.Message) -> None:
        """Append a message: an input, a model's answer or a tool's result."""
        self.entries.append(HistoryEntry(message, self.agent, self.chain))

    def join(self, child: "Transcript", *, by_call: bool) -> None:
        """Append a child's transcript, after its end and in the order of the calls or lanes."""
        self.entries.append(JoinedChild(child, by_call))

    def lane(self) -> "Transcript":
        """Return a transcript for a lane that starts now; the lane also owns the messages before its fork."""
        return Transcript(agent=self.agent, chain=self.chain, above=self, is_lane=True)

    def own(self) -> Iterator[HistoryEntry]:
        """Yield the messages of its invocation, for a lane those before its fork first; without called children's."""
        yield from self.before_fork()
        yield from self.since(0)

    def before_fork(self) -> Iterator[HistoryEntry]:
        """Yield those messages of its invocation that were there when its lane started; none if it is no lane."""
        forks: list[tuple[Transcript, int]] = []
        transcript = self
        while transcript.is_lane and transcript.above is not None:
            forks.append((transcript.above, transcript.above_end))
            transcript = transcript.above
        for fork, cut in reversed(forks):
            yield from fork.flat(cut, is_opened=lambda _: False)

    def since(self, begin: int, end: int | None = None) -> Iterator[HistoryEntry]:
        """Yield the messages of its entries from one number to another; without called children's."""
        return self.flat(end, begin=begin, is_opened=lambda _: False)

    def lineage(self) -> "list[tuple[Transcript, int]]":
        """Return every transcript above its invocation's, the root's first, each with its cut."""
        above: list[tuple[Transcript, int]] = []
        transcript = self
        while transcript.is_lane and transcript.above is not None:
            transcript = transcript.above
        while transcript.above is not None:
            above.append((transcript.above, transcript.above_end))
            transcript = transcript.above
        above.reverse()
        return above

    def flat(
        self, end: int | None = None, *, begin: int = 0, is_opened: "Callable[[Transcript], bool]"
    ) -> Iterator[HistoryEntry]:
        """Yield the messages from the entry `begin` up to a cut, with those of joined children in their places.

        Of children that were called as tools, only those that `is_opened` accepts.
        """
        # An explicit stack, because children may nest deeper than Python's recursion limit.
        stack: list[Iterator[HistoryEntry | JoinedChild]] = [iter(self.entries[begin:end])]
        while stack:
            entry = next(stack[-1], None)
            if entry is None:
                stack.pop()
            elif isinstance(entry, HistoryEntry):
                yield entry
            elif not entry.by_call or is_opened(entry.transcript):
                stack.append(iter(entry.transcript.entries))
