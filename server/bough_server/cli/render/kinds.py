"""Kinds of agents, how they ended, and what steers them, in a few words; it lays out no lines and keeps no state."""

from collections.abc import Sequence
from typing import Final

from bough import text_of
from bough.v1 import event_pb2, state_pb2
from bough_server.cli.render.amounts import counted, one_line

_ENDINGS: Final = {
    event_pb2.END_REASON_EXITED: "exited",
    event_pb2.END_REASON_TRANSFERRED: "handed over",
    event_pb2.END_REASON_BROKE_LOOP: "broke the loop",
    event_pb2.END_REASON_ITERATIONS_EXHAUSTED: "rounds used up",
}
_PLAIN: Final = (event_pb2.AGENT_KIND_UNSPECIFIED, event_pb2.AGENT_KIND_LLM)


def kind_text(kind: event_pb2.AgentKind.ValueType) -> str:
    """What runs an agent, as definitions name it; empty for a model in a loop with tools, and where it is not said."""
    if kind in _PLAIN or kind not in event_pb2.AgentKind.values():
        return ""
    return event_pb2.AgentKind.Name(kind).removeprefix("AGENT_KIND_").lower()


def ending_text(
    reason: event_pb2.EndReason.ValueType, kind: event_pb2.AgentKind.ValueType = event_pb2.AGENT_KIND_UNSPECIFIED
) -> str:
    """How an agent of a kind ended; empty where it simply answered, or where its state and its error say it."""
    if kind == event_pb2.AGENT_KIND_LOOP and reason == event_pb2.END_REASON_BROKE_LOOP:
        return "ended by a break"
    return _ENDINGS.get(reason, "")


def round_text(started: event_pb2.LoopRoundStarted) -> str:
    """Which round of a loop begins, counted from 1 as people do."""
    return f"round {started.round + 1}"


def steps_text(items: Sequence[event_pb2.PlanItem]) -> str:
    """A plan on one line."""
    said = "; ".join(one_line(item.text) for item in items)
    return f"{counted(len(items), 'step')}: {said}" if said else "nothing"


def changes_text(changes: Sequence[state_pb2.StateChange]) -> str:
    """What became of a session's values, on one line."""
    return ", ".join(
        f"{change.key} = {one_line(change.value_json)}" if change.HasField("value_json") else f"{change.key} deleted"
        for change in changes
    )


def compacted_text(compacted: event_pb2.HistoryCompacted) -> str:
    """What a summary stands for, and the summary, on one line."""
    covered = []
    if compacted.to_position:
        covered.append(f"messages {compacted.from_position} to {compacted.to_position} of the session")
    if compacted.run_messages:
        covered.append(f"{counted(compacted.run_messages, 'message')} of this run")
    summary = one_line(text_of(compacted.summary))
    return f"summarized {' and '.join(covered) or 'nothing'}" + (f": {summary}" if summary else "")


def retry_text(reason: event_pb2.RetryReason.ValueType) -> str:
    """Why a model call is tried again."""
    if reason not in event_pb2.RetryReason.values():
        return ""
    return event_pb2.RetryReason.Name(reason).removeprefix("RETRY_REASON_").lower().replace("_", " ")
