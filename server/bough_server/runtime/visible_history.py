"""The history that one lane sees under its policy: with its summary, and without transfers if they are skipped.

If a request is longer than the policy allows, it is built without some units; that is not recorded.
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
from bough_server.messages import copy_of
from bough_server.runtime.agent import llm_of
from bough_server.runtime.running_agent import RunningAgent
from bough_server.store.ports import StoredCall, StoredMessage
from bough_server.tools.builtin import TRANSFER


def is_transfer(result: message_pb2.ToolResult) -> bool:
    """True if a result is that of a successful transfer."""
    return result.call.name == TRANSFER and not result.HasField("error")


def skip_transfers(message: message_pb2.Message, rewrite: Rewrite = as_context) -> list[message_pb2.Message]:
    """Rewrite another agent's message for a reader that sees no transfers."""
    return [shown for left in without_transfers([message]) for shown in rewrite(left)]


def without_transfers(messages: Iterable[message_pb2.Message]) -> list[message_pb2.Message]:
    """Return messages without the calls and results of transfers; a message that is empty then is left out."""
    remaining: list[message_pb2.Message] = []
    for message in messages:
        parts = [part for part in message.parts if not _is_of_transfer(part)]
        if len(parts) == len(message.parts):
            remaining.append(message)
        elif parts:
            shortened = copy_of(message)
            shortened.ClearField("parts")
            shortened.parts.extend(parts)
            remaining.append(shortened)
    return remaining


def _is_of_transfer(part: message_pb2.Part) -> bool:
    return TRANSFER in (part.tool_call.name, part.tool_result.call.name)


class VisibleHistory:
    """The history of one lane; `compaction` is the newest of its invocation, from this lane or before its fork."""

    def __init__(
        self, execution: Execution, running: RunningAgent, transcript: Transcript, compaction: Compaction | None = None
    ) -> None:
        self._execution = execution
        self._running = running
        self._transcript = transcript
        self.compaction = compaction
        self._narrowed: Sequence[Unit] | None = None
        """The units to show instead of all, inside `narrowed`."""

    def frozen(self) -> "VisibleHistory":
        """Return a copy that does not see messages added from now on."""
        return VisibleHistory(self._execution, self._running, self._transcript.lane(), self.compaction)

    def messages(self) -> list[message_pb2.Message]:
        """Return the messages that the agent sees now."""
        shown = self.shown() if self._narrowed is None else [one for unit in self._narrowed for one in unit]
        return [one.message for one in shown]

    def units(self) -> list[Unit]:
        """Return all visible messages in units, between which the history may be cut."""
        return units(self.shown())

    def shown(self) -> list[VisibleMessage]:
        """Return all visible messages with their origins, also inside `narrowed`."""
        session = [_entry(one) for one in self._execution.session]
        active = self.active_summary(session)
        if active is not None:
            through = active.summary.summary_range.to_position
            session = [one for one in session if one.position > through]
        shown = view(self._transcript, session, scope=self._running.history.scope, rewrite=self._rewrite())
        if llm_of(self._running.agent.definition).skip_transfer_messages:
            shown = [replace(one, message=rest) for one in shown for rest in without_transfers([one.message])]
        return shown if active is None else in_its_place(shown, active)

    def _rewrite(self) -> Rewrite:
        """Return the function that rewrites other agents' messages for this one."""
        llm, rewrite = llm_of(self._running.agent.definition), as_context
        if llm.history_rewriter:
            function = self._running.resolver.functions[llm.history_rewriter]
            assert isinstance(function, Rewriter)  # validated when the run started
            rewrite = function.rewritten
        return partial(skip_transfers, rewrite=rewrite) if llm.skip_transfer_messages else rewrite

    def active_summary(self, session: Sequence[HistoryEntry] | None = None) -> Compaction | None:
        """Return the summary that replaces a part of the history, or None."""
        history = self._running.history
        if self.compaction is not None or not history.HasField("summarize"):
            return self.compaction
        if session is None:
            session = [_entry(one) for one in self._execution.session]
        newest = list(summaries(self._transcript, session, scope=history.scope))[-1:]
        return Compaction(summary=newest[0]) if newest else None

    def apply(self, compacted: event_pb2.HistoryCompacted) -> None:
        """Replace the history before a new summary by it."""
        self.compaction = Compaction(summary=compacted.summary, run_message_count=compacted.run_message_count)
        self._transcript.say(compacted.summary)

    @contextmanager
    def narrowed(self, remaining: Sequence[Unit]) -> Iterator[None]:
        """Show these units only, inside the `with` block."""
        self._narrowed = remaining
        try:
            yield
        finally:
            self._narrowed = None


def _entry(stored: StoredMessage) -> HistoryEntry:
    message = stored.message
    return HistoryEntry(
        message,
        stored.agent,
        stored.chain,
        message.position,
        is_call=isinstance(stored, StoredCall),
        is_relay=message.role == message_pb2.ROLE_ASSISTANT and message.author != stored.agent,
        inside=stored.inside if isinstance(stored, StoredCall) else (),
    )
