"""The history that one lane sees under its policy: with its summary, and without transfers if they are skipped.

If a request is longer than the policy allows, it is built without some units; that is not recorded.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from bough.v1 import event_pb2, message_pb2
from bough_server.engine.execution import Execution
from bough_server.functions import Rewriter
from bough_server.history.overflow import Compaction, Unit, replace_with_summary, units
from bough_server.history.rewrite import Rewriter as Rewrite
from bough_server.history.rewrite import as_context
from bough_server.history.session import SessionView, TranscriptView
from bough_server.history.transcript import Transcript
from bough_server.history.visible import Reader, VisibleMessage, reader_of, summaries
from bough_server.messages import copy_of
from bough_server.runtime.agent import llm_of
from bough_server.runtime.running_agent import RunningAgent
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


def _without_transfers_in(message: message_pb2.Message) -> list[message_pb2.Message]:
    return without_transfers([message])


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
        """The units to show instead of all, inside `narrow_to`."""
        self._view: TranscriptView | None = None

    def freeze(self) -> "VisibleHistory":
        """Return a copy that does not see messages added from now on."""
        return VisibleHistory(self._execution, self._running, self._transcript.lane(), self.compaction)

    def messages(self) -> list[message_pb2.Message]:
        """Return the messages that the agent sees now. They are shared with later runs of the session: not changed."""
        return [one.message for one in self.list_visible()]

    def list_visible(self) -> Sequence[VisibleMessage]:
        """Return the messages that the agent sees now, with their origins."""
        return self.list_all_visible() if self._narrowed is None else [one for unit in self._narrowed for one in unit]

    def units(self) -> list[Unit]:
        """Return all visible messages in units, between which the history may be cut."""
        return units(self.list_all_visible())

    def list_all_visible(self) -> list[VisibleMessage]:
        """Return all visible messages with their origins, also inside `narrow_to`."""
        active = self.active_summary()
        after = active.summary.summary_range.to_position if active is not None else 0
        reader = self._reader()
        if self._view is None:
            self._view = TranscriptView(self._transcript, reader)
        session = self._execution.session.view(self._key(reader, after), lambda: SessionView(reader, after=after))
        shown = self._view.below(session)
        return shown if active is None else replace_with_summary(shown, active)

    def _reader(self) -> Reader:
        llm, scope = llm_of(self._running.agent.definition), self._running.history.scope
        rewrite, trim = self._choose_rewrite(), _without_transfers_in if llm.skip_transfer_messages else None
        return reader_of(self._transcript, scope=scope, rewrite=rewrite, trim=trim)

    def _key(self, reader: Reader, after: int) -> Hashable:
        """Return what tells the views of a session apart, by equality."""
        llm = llm_of(self._running.agent.definition)
        function = self._running.resolver.functions[llm.history_rewriter] if llm.history_rewriter else None
        return reader.agent, reader.chains, reader.scope, function, llm.skip_transfer_messages, after

    def _choose_rewrite(self) -> Rewrite:
        """Return the function that rewrites other agents' messages for this one."""
        llm, rewrite = llm_of(self._running.agent.definition), as_context
        if llm.history_rewriter:
            function = self._running.resolver.functions[llm.history_rewriter]
            assert isinstance(function, Rewriter)  # validated when the run started
            rewrite = function.rewrite
        return partial(skip_transfers, rewrite=rewrite) if llm.skip_transfer_messages else rewrite

    def active_summary(self) -> Compaction | None:
        """Return the summary that replaces a part of the history, or None."""
        history = self._running.history
        if self.compaction is not None or not history.HasField("summarize"):
            return self.compaction
        newest = list(summaries(self._transcript, self._execution.session.summaries, scope=history.scope))[-1:]
        return Compaction(summary=newest[0]) if newest else None

    def apply(self, compacted: event_pb2.HistoryCompacted) -> None:
        """Replace the history before a new summary by it."""
        self.compaction = Compaction(summary=compacted.summary, run_message_count=compacted.run_message_count)
        self._transcript.add_message(compacted.summary)

    @contextmanager
    def narrow_to(self, remaining: Sequence[Unit]) -> Iterator[None]:
        """Show these units only, inside the `with` block."""
        self._narrowed = remaining
        try:
            yield
        finally:
            self._narrowed = None
