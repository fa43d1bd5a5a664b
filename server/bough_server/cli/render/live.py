"""Live view of a run: begins and ends the agents' blocks, and passes other events to their handlers."""

from collections.abc import Sequence
from typing import Final

from google.protobuf import duration_pb2
from rich.text import Text

from bough.v1 import event_pb2, execution_pb2, usage_pb2
from bough_server.cli.render.blocks import STARTING, AgentBlocks, AgentLane, Handlers, status_lines
from bough_server.cli.render.events import CALL_EVENTS, CONTROL_EVENTS
from bough_server.cli.render.format import seconds_text, tokens, tokens_text
from bough_server.cli.render.notes import cancellation_text, ending_text, first_member_text, kind_text

AgentEvent = event_pb2.AgentEvent


class LiveView:
    """Turns events into lines of at most `width` cells; `status` describes the work in progress.

    Errors are never cut: a terminal gets them on several lines, a pipe on one long line. Each is said once.
    """

    def __init__(self, width: int = 80, *, is_pipe: bool = False) -> None:
        self._width = width
        self._blocks = AgentBlocks(width, is_pipe=is_pipe)

    @property
    def shown_errors(self) -> Sequence[str]:
        """The messages of all errors that were shown, the longest first."""
        return self._blocks.shown_errors

    def feed(self, event: AgentEvent, now: float = 0.0) -> list[Text]:
        """Return the lines that an event completes. `now` is in seconds on any clock, the same one as for `status`."""
        handler = _HANDLERS.get(event.WhichOneof("payload") or "")
        if handler is not None:
            handler(self._blocks, event, self._blocks.lane(event), now)
        return self._blocks.take_lines()

    def status(self, now: float = 0.0) -> list[Text]:
        """Return a line for each thing in progress: incomplete text, a model waited for, a running tool."""
        return status_lines(self._blocks.lanes, now, width=self._width)


def _on_started(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    started = event.run_started if event.HasField("run_started") else event.sub_agent_started
    caller = blocks.caller(lane)
    if caller is not None and caller.activity == STARTING:
        caller.activity = ""  # it calls no model itself, so it would show "starting" until its end
    lane.kind = started.kind
    blocks.open(lane, kind_text(started.kind))
    if event.run_started.starts_with:
        blocks.write_line(lane, f"⇢ {first_member_text(event.run_started.starts_with)}", "cyan")
    lane.wait_for(STARTING, now)


def _on_completed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    end = event.run_completed if event.HasField("run_completed") else event.sub_agent_completed
    how = ending_text(end.end_reason, lane.kind)
    used = _format_usage(_seconds(event, end.duration, lane), end.tree_usage)
    blocks.close(lane, "✓", "green", f"{how}, {used}" if how else used)


def _on_failed(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    end = event.run_failed if event.HasField("run_failed") else event.sub_agent_failed
    if end.end_reason == execution_pb2.END_REASON_CANCELLED:
        blocks.close(lane, "■", "yellow", cancellation_text(event.sub_agent_failed.cancel_reason))
    else:
        blocks.fail(lane, end.error)


def _on_run_cancelled(blocks: AgentBlocks, event: AgentEvent, lane: AgentLane, now: float) -> None:
    blocks.close(lane, "■", "yellow", cancellation_text(event.run_cancelled.cancel_reason))


def _seconds(event: AgentEvent, duration: duration_pb2.Duration, lane: AgentLane) -> float:
    """Return an agent's duration in seconds; in a fork without the origin's share, which the log includes."""
    if lane.forked_ns:
        return (event.record_time.ToNanoseconds() - lane.forked_ns) / 1e9
    return duration.ToTimedelta().total_seconds()


def _format_usage(seconds: float, usage: usage_pb2.Usage) -> str:
    known = "" if tokens(usage) is None else f", {tokens_text(usage)} tokens"
    return f"{seconds_text(seconds)}{known}"


_HANDLERS: Final[Handlers] = {
    **CALL_EVENTS,
    **CONTROL_EVENTS,
    "run_started": _on_started,
    "sub_agent_started": _on_started,
    "run_completed": _on_completed,
    "sub_agent_completed": _on_completed,
    "run_failed": _on_failed,
    "sub_agent_failed": _on_failed,
    "run_cancelled": _on_run_cancelled,
}
