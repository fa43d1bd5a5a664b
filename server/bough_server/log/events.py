"""AgentEvent: names, kinds, and conversion from the bytes that the log stores."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, message_pb2, options_pb2
from bough_server.messages import copy_of

AgentEvent = event_pb2.AgentEvent

_PAYLOADS = AgentEvent.DESCRIPTOR.oneofs_by_name["payload"].fields

NAME_OF_KIND: Final[Mapping[int, str]] = MappingProxyType(
    {field.number: field.GetOptions().Extensions[options_pb2.event_options].name for field in _PAYLOADS}
)
"""Payload tag to dotted name, such as 40 to "agent.llm.started"."""

KIND_OF_FIELD: Final[Mapping[str, int]] = MappingProxyType({field.name: field.number for field in _PAYLOADS})
"""Payload field name, as WhichOneof("payload") returns it, to tag, which the log stores as `kind`."""

RUN_STARTED: Final = KIND_OF_FIELD["run_started"]
RUN_QUEUED: Final = KIND_OF_FIELD["run_queued"]
RUN_DEQUEUED: Final = KIND_OF_FIELD["run_dequeued"]
RUN_RESUMED: Final = KIND_OF_FIELD["run_resumed"]
RUN_FORKED: Final = KIND_OF_FIELD["run_forked"]
RUN_INTERRUPTED: Final = KIND_OF_FIELD["run_interrupted"]
RUN_COMPLETED: Final = KIND_OF_FIELD["run_completed"]
RUN_FAILED: Final = KIND_OF_FIELD["run_failed"]
RUN_CANCELLED: Final = KIND_OF_FIELD["run_cancelled"]
SUB_AGENT_STARTED: Final = KIND_OF_FIELD["sub_agent_started"]
SUB_AGENT_PARTIAL: Final = KIND_OF_FIELD["sub_agent_partial"]
SUB_AGENT_COMPLETED: Final = KIND_OF_FIELD["sub_agent_completed"]
SUB_AGENT_FAILED: Final = KIND_OF_FIELD["sub_agent_failed"]
LLM_STARTED: Final = KIND_OF_FIELD["llm_started"]
LLM_OUTPUT_TEXT_DELTA: Final = KIND_OF_FIELD["llm_output_text_delta"]
LLM_REASONING_DELTA: Final = KIND_OF_FIELD["llm_reasoning_delta"]
LLM_TOOL_CALL_DELTA: Final = KIND_OF_FIELD["llm_tool_call_delta"]
LLM_RETRYING: Final = KIND_OF_FIELD["llm_retrying"]
LLM_COMPLETED: Final = KIND_OF_FIELD["llm_completed"]
LLM_FAILED: Final = KIND_OF_FIELD["llm_failed"]
TOOL_STARTED: Final = KIND_OF_FIELD["tool_started"]
TOOL_OUTPUT: Final = KIND_OF_FIELD["tool_output"]
TOOL_COMPLETED: Final = KIND_OF_FIELD["tool_completed"]
TOOL_FAILED: Final = KIND_OF_FIELD["tool_failed"]
STEP_COMPLETED: Final = KIND_OF_FIELD["step_completed"]
STEP_FAILED: Final = KIND_OF_FIELD["step_failed"]
AGENT_TRANSFERRED: Final = KIND_OF_FIELD["agent_transferred"]
INPUT_REQUESTED: Final = KIND_OF_FIELD["input_requested"]
INPUT_RECEIVED: Final = KIND_OF_FIELD["input_received"]
SESSION_STATE_CHANGED: Final = KIND_OF_FIELD["session_state_changed"]
VALUE_RECORDED: Final = KIND_OF_FIELD["value_recorded"]
CANCEL_REQUESTED: Final = KIND_OF_FIELD["cancel_requested"]
HISTORY_COMPACTED: Final = KIND_OF_FIELD["history_compacted"]
NODE_STARTED: Final = KIND_OF_FIELD["node_started"]
NODE_COMPLETED: Final = KIND_OF_FIELD["node_completed"]
NODE_FAILED: Final = KIND_OF_FIELD["node_failed"]

DELTA_KINDS: Final = frozenset({LLM_OUTPUT_TEXT_DELTA, LLM_REASONING_DELTA, LLM_TOOL_CALL_DELTA, TOOL_OUTPUT})
"""Parts of a value that a later event holds completely."""

RUN_KINDS: Final = frozenset(
    {RUN_STARTED, RUN_QUEUED, RUN_DEQUEUED, RUN_RESUMED, RUN_FORKED, RUN_INTERRUPTED, CANCEL_REQUESTED}
)
"""Events that say what becomes of a run as a whole, but for its end: few in any log. Some cancel requests are not."""

TERMINAL_KINDS: Final = frozenset({RUN_COMPLETED, RUN_FAILED, RUN_CANCELLED})
"""The last event of a log."""

AGENT_END_KINDS: Final = frozenset({SUB_AGENT_COMPLETED, SUB_AGENT_FAILED, *TERMINAL_KINDS})
"""The last event of an invocation, the root's included."""

STEP_END_KINDS: Final = frozenset({STEP_COMPLETED, STEP_FAILED})
"""The last event of a step, which holds it completely."""

TOOL_END_KINDS: Final = frozenset({TOOL_COMPLETED, TOOL_FAILED})
"""The last event of a tool call, which holds its result."""

NODE_END_KINDS: Final = frozenset({NODE_COMPLETED, NODE_FAILED})
"""The last event of a visit of a graph's node, or of one of its items."""


def kind_of(event: AgentEvent) -> int:
    """Return the payload's tag; 0 for a payload that this reader does not know."""
    name = event.WhichOneof("payload")
    return KIND_OF_FIELD[name] if name else 0


def name_of(event: AgentEvent) -> str:
    """Return the payload's dotted name; empty for a payload that this reader does not know."""
    return NAME_OF_KIND.get(kind_of(event), "")


def tool_result_of(event: AgentEvent) -> message_pb2.ToolResult:
    """Return the result that the end event of a tool call holds."""
    return event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result


def time_of(event: AgentEvent) -> timestamp_pb2.Timestamp | None:
    """Return a copy of the time at which an event was recorded; None if it has none."""
    return copy_of(event.record_time) if event.HasField("record_time") else None


def in_place_of(event: AgentEvent) -> AgentEvent:
    """Return an event without a payload, with the invocation, step, effect and span of another one.

    Sequence, time, attempt and digest are unset: every event has its own.
    """
    return AgentEvent(
        invocation_id=event.invocation_id,
        parent_invocation_id=event.parent_invocation_id,
        agent=event.agent,
        branch=event.branch,
        depth=event.depth,
        step_id=event.step_id,
        step_index=event.step_index,
        effect_key=event.effect_key,
        trace_id=event.trace_id,
        span_id=event.span_id,
    )


def is_summarizing(event: AgentEvent) -> bool:
    """Return whether an event belongs to a model call that summarizes history, which is part of no step."""
    return event.effect_key.endswith(".compact")


def _text_field(number: int, text: str) -> bytes:
    data = text.encode()
    # The length is a varint, written here as a single byte.
    assert len(data) < 128, "an id is shorter than 128 bytes"
    return bytes((number << 3 | 2, len(data))) + data


def stamp(run_id: str, session_id: str) -> bytes:
    """Return the bytes to prepend to an event's stored bytes when it is read.

    Fields may be serialized in any order, so the stored bytes need not be parsed.
    """
    return _text_field(1, run_id) + _text_field(9, session_id)


def parse(stamped: bytes) -> AgentEvent:
    """Parse an event from its stamp and stored bytes."""
    return AgentEvent.FromString(stamped)
