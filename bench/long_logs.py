"""Logs of any length, made of events as a run records them: a start, many pieces of text, an end."""

from collections.abc import Iterator

from google.protobuf import timestamp_pb2

from bough.v1 import event_pb2, execution_pb2, message_pb2
from bough_server import ids
from bough_server.identity import Principal
from bough_server.log import events
from bough_server.store.ports.log import LogEvent, NewRun

PRINCIPAL = Principal(tenant_id="local", user_id="local")
NOW_NS = 1_700_000_000_000_000_000


def new_run(run_id: str) -> NewRun:
    """A run to be accepted, in a new session."""
    started = event_pb2.RunStarted(
        invocation_id=run_id,
        key_root=run_id,
        agent="lead",
        kind=execution_pb2.AGENT_KIND_LLM,
        run_path=["lead"],
        input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="Speak at length.")]),
    )
    event = event_pb2.AgentEvent(
        sequence=1, record_time=_time(1), invocation_id=run_id, agent="lead", branch="lead", run_started=started
    )
    return NewRun(
        run_id=run_id,
        principal=PRINCIPAL,
        session_id=ids.new_uuid7(NOW_NS),
        new_session=True,
        session_position=0,
        request_id="",
        request_digest="",
        create_time_ns=NOW_NS,
        first=record(event),
    )


def deltas(run_id: str, count: int, *, first: int = 2) -> Iterator[LogEvent]:
    """So many pieces of a sub-agent's text."""
    invocation_id = ids.invocation_id(run_id, "s0.t0")
    for sequence in range(first, first + count):
        event = event_pb2.AgentEvent(
            sequence=sequence,
            record_time=_time(sequence),
            invocation_id=invocation_id,
            parent_invocation_id=run_id,
            agent="botanist",
            branch="lead/botanist",
            depth=1,
            step_id=ids.step_id(invocation_id, "s1"),
            step_index=1,
            attempt=1,
            llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=f"word{sequence} "),
        )
        yield record(event)


def end(run_id: str, sequence: int) -> LogEvent:
    """The run's last event."""
    event = event_pb2.AgentEvent(
        sequence=sequence,
        record_time=_time(sequence),
        invocation_id=run_id,
        agent="lead",
        branch="lead",
        run_completed=event_pb2.RunCompleted(end_reason=execution_pb2.END_REASON_ANSWERED),
    )
    return record(event)


def record(event: event_pb2.AgentEvent) -> LogEvent:
    """An event as the log takes it."""
    return LogEvent(sequence=event.sequence, kind=events.kind_of(event), data=event.SerializeToString(), event=event)


def _time(sequence: int) -> timestamp_pb2.Timestamp:
    return timestamp_pb2.Timestamp(seconds=NOW_NS // 10**9, nanos=sequence)
