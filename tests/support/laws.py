"""The laws of the event contract, as one check over a finished log."""

from collections import Counter
from collections.abc import Sequence

from bough.v1 import event_pb2
from bough_server import events

_STARTS = {events.RUN_STARTED, events.SUB_AGENT_STARTED}
_CHILD_ENDS = {events.SUB_AGENT_COMPLETED, events.SUB_AGENT_FAILED}
_TOOL_ENDS = {events.TOOL_COMPLETED, events.TOOL_FAILED}
_STEP_ENDS = {events.STEP_COMPLETED, events.STEP_FAILED}


def check_laws(log: Sequence[event_pb2.AgentEvent]) -> None:
    """Asserts what holds of every finished run, whatever it did."""
    kinds = [events.kind_of(event) for event in log]
    assert [event.sequence for event in log] == list(range(1, len(log) + 1))
    assert kinds[0] == events.RUN_STARTED
    assert [kind for kind in kinds if kind in events.TERMINAL_KINDS] == kinds[-1:]
    _check_starts_and_ends(log)
    _check_texts(log)
    _check_steps(log)
    _check_traces(log)


def _check_starts_and_ends(log: Sequence[event_pb2.AgentEvent]) -> None:
    starts = Counter(event.invocation_id for event in log if events.kind_of(event) in _STARTS)
    ends = {event.invocation_id: event for event in log if events.kind_of(event) in _CHILD_ENDS | events.TERMINAL_KINDS}
    assert set(starts.values()) == {1}
    assert starts.keys() == ends.keys()
    assert len(ends) == sum(events.kind_of(event) in _CHILD_ENDS | events.TERMINAL_KINDS for event in log)
    for end in ends.values():
        if end.parent_invocation_id:
            assert end.sequence < ends[end.parent_invocation_id].sequence
    for event in log:
        assert event.sequence <= ends[event.invocation_id].sequence, "an invocation says nothing after its end"
    for event in log:
        result = event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result
        if events.kind_of(event) in _TOOL_ENDS and result.child_invocation_id:
            assert ends[result.child_invocation_id].sequence < event.sequence


def _check_texts(log: Sequence[event_pb2.AgentEvent]) -> None:
    said: dict[tuple[str, int], str] = {}
    for event in log:
        if event.HasField("llm_output_delta"):
            key = event.step_id, event.attempt
            said[key] = said.get(key, "") + event.llm_output_delta.text
        if event.HasField("llm_completed"):
            text = "".join(part.text for part in event.llm_completed.response.message.parts)
            assert said.get((event.step_id, event.attempt), "") == text


def _check_steps(log: Sequence[event_pb2.AgentEvent]) -> None:
    ended: dict[str, int] = {}
    for event in log:
        if events.kind_of(event) in _STEP_ENDS:
            assert event.step_id not in ended, "a step ends once"
            ended[event.step_id] = event.sequence
    begun = {event.step_id for event in log if event.HasField("llm_started")}
    assert begun <= ended.keys()
    for event in log:
        if events.kind_of(event) in _TOOL_ENDS:
            assert event.sequence < ended[event.step_id]


def _check_traces(log: Sequence[event_pb2.AgentEvent]) -> None:
    assert len({event.trace_id for event in log if event.trace_id}) == 1
    for event in log:
        is_delta = events.kind_of(event) in events.DELTA_KINDS
        assert bool(event.trace_id and event.span_id) is not is_delta
        assert not (is_delta and event.effect_key)
