"""A run as its agents speak: where their blocks begin and end, and who shows the rest; it prints nothing itself."""

from typing import Final

from google.protobuf import duration_pb2
from rich.text import Text

from bough.v1 import event_pb2, execution_pb2, usage_pb2
from bough_server.cli.render.blocks import STARTING, AgentBlocks, AgentLane, Handlers, status_lines
from bough_server.cli.render.events import CALLS, STEERING
from bough_server.cli.render.format import error_text, seconds_text, tokens, tokens_text
from bough_server.cli.render.notes import cancelled_text, ending_text, kind_text

AgentEvent = event_pb2.AgentEvent


class LiveView:
    """Turns events into lines for a terminal of that many cells; `status` says what is going on between the lines."""

    def __init__(self, width: int = 80) -> None:
        self._width = width
        self._blocks = AgentBlocks(width)

    def feed(self, event: AgentEvent, now: float = 0.0) -> list[Text]:
        """The lines that this event finishes; `now` is any clock in seconds, the one that `status` is asked with."""
        handler = _HANDLERS.get(event.WhichOneof("payload") or "")
        if handler is not None:
            handler(self._blocks, event, self._blocks.speaker(event), now)
        return self._blocks.taken()

    def status(self, now: float = 0.0) -> list[Text]:
        """What each agent is in the middle of: an unfinished line, a model it waits for, tools at work."""
        return status_lines(self._blocks.speakers, now, width=self._width)


def _started(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    started = event.run_started if event.HasField("run_started") else event.sub_agent_started
    caller = blocks.caller(speaker)
    if caller is not None and caller.activity == STARTING:
        caller.activity = ""  # it asks no model itself, and its children show what it does
    speaker.kind = started.kind
    blocks.open(speaker, kind_text(started.kind))
    speaker.wait_for(STARTING, now)


def _ended_well(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    end = event.run_completed if event.HasField("run_completed") else event.sub_agent_completed
    how = ending_text(end.end_reason, speaker.kind)
    used = _used(_seconds(event, end.duration, speaker), end.tree_usage)
    blocks.close(speaker, "✓", "green", f"{how}, {used}" if how else used)


def _failed(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    end = event.run_failed if event.HasField("run_failed") else event.sub_agent_failed
    if end.end_reason == execution_pb2.END_REASON_CANCELLED:
        blocks.close(speaker, "■", "yellow", cancelled_text(event.sub_agent_failed.cancel_reason))
    else:
        blocks.close(speaker, "✗", "red", error_text(end.error))


def _cancelled(blocks: AgentBlocks, event: AgentEvent, speaker: AgentLane, now: float) -> None:
    blocks.close(speaker, "■", "yellow", cancelled_text(event.run_cancelled.cancel_reason))


def _seconds(event: AgentEvent, duration: duration_pb2.Duration, speaker: AgentLane) -> float:
    """How long an agent took; the log counts from where a fork's origin began, and readers want the fork's own time."""
    if speaker.forked_ns:
        return (event.record_time.ToNanoseconds() - speaker.forked_ns) / 1e9
    return duration.ToTimedelta().total_seconds()


def _used(seconds: float, usage: usage_pb2.Usage) -> str:
    known = "" if tokens(usage) is None else f", {tokens_text(usage)} tokens"
    return f"{seconds_text(seconds)}{known}"


_HANDLERS: Final[Handlers] = {
    **CALLS,
    **STEERING,
    "run_started": _started,
    "sub_agent_started": _started,
    "run_completed": _ended_well,
    "sub_agent_completed": _ended_well,
    "run_failed": _failed,
    "sub_agent_failed": _failed,
    "run_cancelled": _cancelled,
}
