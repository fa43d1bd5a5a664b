"""The history that one lane is shown by its policy: summaries in their place, without transfers on demand.

A request that is longer than the policy allows is built with some units left out; nothing of that is recorded.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from bough.v1 import event_pb2, message_pb2
from bough_server.engine.execution import Execution
from bough_server.functions import Rewriter
from bough_server.history.overflow import Compaction, Unit, in_its_place, units
from bough_server.history.rewrite import Rewriter as Rewrite
from bough_server.history.rewrite import as_context
from bough_server.history.transcript import HistoryEntry, Transcript
from bough_server.history.visible import VisibleMessage, summaries, view
from bough_server.runtime.agent import llm_of
from bough_server.runtime.running_agent import RunningAgent
from bough_server.store.ports import StoredMessage
from bough_server.tools.builtin import TRANSFER


def is_transfer(result: message_pb2.ToolResult) -> bool:
    """Whether a result is that of a transfer which took place."""
    return result.call.name == TRANSFER and not result.HasField("error")


def skip_transfers(message: message_pb2.Message, rewrite: Rewrite = as_context) -> list[message_pb2.Message]:
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


class VisibleHistory:
    """The history of one lane. `compaction` is the newest of its invocation, made in this lane or before it forked."""

    def __init__(
        self, execution: Execution, frame: RunningAgent, transcript: Transcript, compaction: Compaction | None = None
    ) -> None:
        self._execution = execution
        self._frame = frame
        self._transcript = transcript
        self.compaction = compaction
        self._left: Sequence[Unit] | None = None

    def frozen(self) -> "VisibleHistory":
        """The same for later: what is said from now on is not in it."""
        return VisibleHistory(self._execution, self._frame, self._transcript.lane(), self.compaction)

    def messages(self) -> list[message_pb2.Message]:
        """What the agent sees now."""
        shown = self.shown() if self._left is None else [one for unit in self._left for one in unit]
        return [one.message for one in shown]

    def units(self) -> list[Unit]:
        """The same, cut where it may be cut."""
        return units(self.shown())

    def shown(self) -> list[VisibleMessage]:
        """The same with where each message is from, whatever is left out."""
        session = [_said(one) for one in self._execution.session if not _is_relayed(one)]
        standing = self.standing(session)
        if standing is not None:
            through = standing.summary.summary_range.to_position
            session = [one for one in session if one.position > through]
        shown = view(self._transcript, session, scope=self._frame.history.scope, rewrite=self._rewrite())
        if llm_of(self._frame.agent.definition).skip_transfer_messages:
            shown = [replace(one, message=left) for one in shown for left in without_transfers([one.message])]
        return shown if standing is None else in_its_place(shown, standing)

    def _rewrite(self) -> Rewrite:
        """How the agent is shown what others said."""
        llm, rewrite = llm_of(self._frame.agent.definition), as_context
        if llm.history_rewriter:
            function = self._frame.resolver.function(llm.history_rewriter)
            assert isinstance(function, Rewriter)  # judged when the run began
            rewrite = function.rewritten
        return partial(skip_transfers, rewrite=rewrite) if llm.skip_transfer_messages else rewrite

    def standing(self, session: Sequence[HistoryEntry] | None = None) -> Compaction | None:
        """The summary that stands for a part of what the agent saw; None where none does."""
        history = self._frame.history
        if self.compaction is not None or not history.HasField("summarize"):
            return self.compaction
        if session is None:
            session = [_said(one) for one in self._execution.session]
        newest = list(summaries(self._transcript, session, scope=history.scope))[-1:]
        return Compaction(summary=newest[0]) if newest else None

    def take(self, compacted: event_pb2.HistoryCompacted) -> None:
        """From now on a summary stands for what was before it."""
        self.compaction = Compaction(summary=compacted.summary, run_message_count=compacted.run_message_count)
        self._transcript.say(compacted.summary)

    @contextmanager
    def narrowed(self, left: Sequence[Unit]) -> Iterator[None]:
        """Leaves out all units but these meanwhile."""
        self._left = left
        try:
            yield
        finally:
            self._left = None


def _said(stored: StoredMessage) -> HistoryEntry:
    return HistoryEntry(stored.message, stored.agent, stored.chain, stored.message.position)


def _is_relayed(stored: StoredMessage) -> bool:
    """Whether an agent only handed a message on: it is in the session as its author's, too."""
    message = stored.message
    return message.role == message_pb2.ROLE_ASSISTANT and message.author != stored.agent
