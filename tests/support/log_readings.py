"""Short readings of a finished log for tests: events of one payload, texts, masked copies; it runs nothing."""

import re
from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from bough.v1 import event_pb2, message_pb2
from bough_server.log import events
from tests.support.log_laws import check_laws
from tests.support.run_harness import RunHarness

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_MEASURED = {"google.protobuf.Timestamp", "google.protobuf.Duration"}
_TRACED = {"trace_id", "span_id"}


async def check_replay(harness: RunHarness, log: Sequence[event_pb2.AgentEvent]) -> None:
    """Asserts that a log keeps the laws and is re-executed from itself alone without a divergence."""
    check_laws(log)
    replayed = await harness.replay(log)
    assert replayed.divergence == ""


def having(log: Iterable[event_pb2.AgentEvent], payload: str) -> list[event_pb2.AgentEvent]:
    """The events that have a payload."""
    return [event for event in log if event.WhichOneof("payload") == payload]


def failures(log: Iterable[event_pb2.AgentEvent]) -> list[str]:
    """What failed on the way, as "agent: event" lines: nothing may in a turn that is shown as an example."""
    return [f"{event.agent}: {name}" for event in log if (name := events.name_of(event)).endswith(".failed")]


def text_of(message: message_pb2.Message | message_pb2.ToolResult) -> str:
    """The texts and JSON of a message or of a tool's result, joined."""
    return "".join(part.text or part.data_json for part in message.parts)


def answer_of(log: Sequence[event_pb2.AgentEvent]) -> str:
    """The text of a run's final answer."""
    return text_of(log[-1].run_completed.final_answer)


def results_of(log: Iterable[event_pb2.AgentEvent]) -> list[message_pb2.ToolResult]:
    """The results of tools as they were recorded."""
    return [
        event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result
        for event in log
        if event.HasField("tool_completed") or event.HasField("tool_failed")
    ]


def most_at_once(log: Sequence[event_pb2.AgentEvent], *agents: str) -> int:
    """How many calls of models and ordinary tools were open at the same time at most, of some agents or of all."""
    dispatched = {event.effect_key for event in having(log, "sub_agent_started")}
    running: set[str] = set()
    most = 0
    for event in log:
        if agents and event.agent not in agents:
            continue
        kind = event.WhichOneof("payload")
        if kind in ("llm_started", "tool_started") and event.effect_key not in dispatched:
            running.add(event.effect_key)
        elif kind in ("llm_completed", "llm_failed", "tool_completed", "tool_failed"):
            running.discard(event.effect_key)
        most = max(most, len(running))
    return most


class Masks:
    """Names for the ids of one run, in the order in which they are met, so that two runs can be compared."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def masked(self, message: Message) -> Message:
        """A copy without times, durations and trace ids, its ids as `id-1`, `id-2`, ..."""
        copy = type(message)()
        copy.CopyFrom(message)
        self._mask(copy)
        return copy

    def _mask(self, message: Message) -> None:
        for field, value in message.ListFields():
            kind = field.message_type.full_name if field.message_type else ""
            if kind in _MEASURED or field.name in _TRACED:
                message.ClearField(field.name)
            elif field.message_type is not None and field.message_type.GetOptions().map_entry:
                continue
            elif kind:
                for item in value if field.is_repeated else (value,):
                    self._mask(item)
            elif field.type == field.TYPE_STRING and not field.is_repeated:
                setattr(message, field.name, _UUID.sub(self._name, value))

    def _name(self, found: re.Match[str]) -> str:
        return self._names.setdefault(found.group(), f"id-{len(self._names) + 1}")


def masked(log: Iterable[Message]) -> list[Message]:
    """Copies of the events or of a record with ids and times masked."""
    masks = Masks()
    return [masks.masked(event) for event in log]
