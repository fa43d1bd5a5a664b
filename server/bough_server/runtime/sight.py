"""What an agent is shown in one lane: its history by its policy, with summaries in their place; it makes none of them.

While a request is made that would be more than the policy allows, some of it is left out; nothing of that is recorded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from bough.v1 import event_pb2, message_pb2
from bough_server.functions import Rewriter
from bough_server.history.overflow import Compaction, Unit, in_its_place, units
from bough_server.history.rewrite import Rewriter as Rewrite
from bough_server.history.rewrite import for_context
from bough_server.history.transcript import Said, Transcript
from bough_server.history.visible import Shown, summaries, view
from bough_server.runtime.agent import llm_of
from bough_server.runtime.transfers import skip_transfers, without_transfers
from bough_server.store.ports import StoredMessage

if TYPE_CHECKING:
    from bough_server.runtime.lane import Lane


class Sight:
    """The history of one lane. `compaction` is the newest of its invocation, made in this lane or before it forked."""

    def __init__(
        self, lane: "Lane", compaction: Compaction | None = None, *, transcript: Transcript | None = None
    ) -> None:
        self._lane = lane
        self._transcript = transcript or lane.transcript
        self.compaction = compaction
        self._left: Sequence[Unit] | None = None

    def frozen(self) -> "Sight":
        """The same for later: what is said from now on is not in it."""
        return Sight(self._lane, self.compaction, transcript=self._transcript.lane())

    def messages(self) -> list[message_pb2.Message]:
        """What the agent sees now."""
        shown = self.shown() if self._left is None else [one for unit in self._left for one in unit]
        return [one.message for one in shown]

    def units(self) -> list[Unit]:
        """The same, cut where it may be cut."""
        return units(self.shown())

    def shown(self) -> list[Shown]:
        """The same with where each message is from, whatever is left out."""
        execution, frame, transcript = self._lane.execution, self._lane.frame, self._transcript
        session = [_said(one) for one in execution.session if not _is_relayed(one)]
        standing = self.standing(session)
        if standing is not None:
            through = standing.summary.summarized.to_position
            session = [one for one in session if one.position > through]
        shown = view(transcript, session, scope=frame.history.scope, rewrite=self._rewrite())
        if llm_of(self._lane.definition).skip_transfer_messages:
            shown = [replace(one, message=left) for one in shown for left in without_transfers([one.message])]
        return shown if standing is None else in_its_place(shown, standing)

    def _rewrite(self) -> Rewrite:
        """How the agent is shown what others said."""
        llm, rewrite = llm_of(self._lane.definition), for_context
        if llm.history_rewriter:
            function = self._lane.execution.resolver.function(llm.history_rewriter)
            assert isinstance(function, Rewriter)  # judged when the run began
            rewrite = function.rewritten
        return partial(skip_transfers, rewrite=rewrite) if llm.skip_transfer_messages else rewrite

    def standing(self, session: Sequence[Said] | None = None) -> Compaction | None:
        """The summary that stands for a part of what the agent saw; None where none does."""
        history = self._lane.frame.history
        if self.compaction is not None or not history.HasField("summarize"):
            return self.compaction
        if session is None:
            session = [_said(one) for one in self._lane.execution.session]
        newest = list(summaries(self._transcript, session, scope=history.scope))[-1:]
        return Compaction(summary=newest[0]) if newest else None

    def take(self, compacted: event_pb2.HistoryCompacted) -> None:
        """From now on a summary stands for what was before it."""
        self.compaction = Compaction(summary=compacted.summary, run_messages=compacted.run_messages)
        self._transcript.say(compacted.summary)

    @contextmanager
    def narrowed(self, left: Sequence[Unit]) -> Iterator[None]:
        """Leaves out all units but these meanwhile."""
        self._left = left
        try:
            yield
        finally:
            self._left = None


def _said(stored: StoredMessage) -> Said:
    return Said(stored.message, stored.agent, stored.chain, stored.message.position)


def _is_relayed(stored: StoredMessage) -> bool:
    """Whether an agent only handed a message on: it is in the session as its author's, too."""
    message = stored.message
    return message.role == message_pb2.ROLE_ASSISTANT and message.author != stored.agent
