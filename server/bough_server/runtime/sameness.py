"""When two events say the same: what a replay makes against what was recorded; pure."""

from typing import Any, Final

from bough.v1 import event_pb2

_MEASURED: Final = ("duration", "latency", "start_time", "create_time")


def same_fact(made: event_pb2.AgentEvent, recorded: event_pb2.AgentEvent) -> bool:
    """Whether two events say the same, times, durations and trace ids apart."""
    return _without_measures(made) == _without_measures(recorded)


def _without_measures(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    plain = event_pb2.AgentEvent()
    plain.CopyFrom(event)
    for name in ("run_id", "session_id", "sequence", "time", "trace_id", "span_id"):
        plain.ClearField(name)
    _clear_measures(plain)
    return plain


def _clear_measures(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name in _MEASURED:
            message.ClearField(field.name)
        elif field.type == field.TYPE_MESSAGE and not (
            field.message_type.GetOptions().map_entry or field.message_type.full_name.startswith("google.")
        ):
            for item in value if field.is_repeated else (value,):
                _clear_measures(item)
