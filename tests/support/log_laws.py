"""The laws of the event contract, as one check over a finished log."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence

from bough.v1 import event_pb2, execution_pb2
from bough_server.engine import keys
from bough_server.log import events

_STARTS = {events.RUN_STARTED, events.SUB_AGENT_STARTED}
_CHILD_ENDS = {events.SUB_AGENT_COMPLETED, events.SUB_AGENT_FAILED}
_TOOL_ENDS = {events.TOOL_COMPLETED, events.TOOL_FAILED}
_STEP_ENDS = {events.STEP_COMPLETED, events.STEP_FAILED}
_RESULTS = {events.LLM_COMPLETED, events.LLM_FAILED, events.VALUE_RECORDED, *_TOOL_ENDS}
_OF_A_STEP = re.compile(r"s[0-9]+\.t[0-9]+")
_ATTEMPTS = {events.LLM_STARTED, events.LLM_RETRYING, events.TOOL_STARTED}
_BEGINNINGS = {*_ATTEMPTS, events.SUB_AGENT_STARTED, events.INPUT_REQUESTED, events.NODE_STARTED}
_AFTER_AN_INTERRUPTION = {events.RUN_RESUMED, events.RUN_FORKED, events.CANCEL_REQUESTED}


def check_laws(log: Sequence[event_pb2.AgentEvent]) -> None:
    """Asserts what holds of every finished run, whatever it did."""
    kinds = [events.kind_of(event) for event in log]
    assert [event.sequence for event in log] == list(range(1, len(log) + 1))
    assert kinds[0] == events.RUN_STARTED
    assert [kind for kind in kinds if kind in events.TERMINAL_KINDS] == kinds[-1:]
    _check_starts_and_ends(log)
    _check_texts(log)
    _check_steps(log)
    _check_summaries(log)
    _check_traces(log)
    _check_effects(log)
    _check_requests(log)
    _check_cancelled(log)
    _check_cancel_reasons(log)
    _check_visits(log)


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
        if event.HasField("llm_output_text_delta"):
            key = event.step_id, event.attempt
            said[key] = said.get(key, "") + event.llm_output_text_delta.text
        if event.HasField("llm_completed") and not events.is_summarizing(event):
            text = "".join(part.text for part in event.llm_completed.response.message.parts)
            assert said.get((event.step_id, event.attempt), "") == text


def _check_steps(log: Sequence[event_pb2.AgentEvent]) -> None:
    ended: dict[str, int] = {}
    for event in log:
        if events.kind_of(event) in _STEP_ENDS:
            assert event.step_id not in ended, "a step ends once"
            ended[event.step_id] = event.sequence
    begun = {event.step_id for event in log if event.HasField("llm_started") and not events.is_summarizing(event)}
    assert begun <= ended.keys()
    assert all(bool(event.step_id) is not events.is_summarizing(event) for event in log if _is_of_a_model(event))
    for event in log:
        if events.kind_of(event) in _TOOL_ENDS:
            is_of_a_step = _OF_A_STEP.fullmatch(event.effect_key.rpartition("/")[2]) is not None
            assert bool(event.step_id) is is_of_a_step, "what code calls is of no step, and all else is of one"
            assert not is_of_a_step or event.sequence < ended[event.step_id]


def _is_of_a_model(event: event_pb2.AgentEvent) -> bool:
    return (event.WhichOneof("payload") or "").startswith("llm_")


def _check_summaries(log: Sequence[event_pb2.AgentEvent]) -> None:
    """A summary is recorded after the model's answer that it was made of, once, and before the step that it is for."""
    answered: set[str] = set()
    for event in log:
        if event.HasField("llm_completed") and events.is_summarizing(event):
            answered.add(event.effect_key)
        elif event.HasField("history_compacted"):
            assert event.effect_key in answered
            answered.discard(event.effect_key)
    stepped = {event.effect_key: event.sequence for event in reversed(log) if event.HasField("llm_started")}
    for event in log:
        if events.is_summarizing(event):
            step = event.effect_key.removesuffix("compact") + "m"
            assert event.sequence < stepped.get(step, log[-1].sequence)


def _check_traces(log: Sequence[event_pb2.AgentEvent]) -> None:
    assert len({event.trace_id for event in log if event.trace_id}) == 1
    for event in log:
        is_delta = events.kind_of(event) in events.DELTA_KINDS
        assert bool(event.trace_id and event.span_id) is not is_delta
        assert not (is_delta and event.effect_key)


def _check_effects(log: Sequence[event_pb2.AgentEvent]) -> None:
    attempts: dict[str, int] = {}
    ended: set[str] = set()
    epoch = 1
    for event in log:
        kind, key = events.kind_of(event), event.effect_key
        if kind in _ATTEMPTS:
            assert event.attempt == attempts.get(key, 0) + 1, "attempts of an effect rise by one"
            assert key not in ended, "what has a result is not begun again"
            attempts[key] = event.attempt
        elif kind in _RESULTS:
            assert key not in ended, "an effect has one result"
            assert not event.attempt or event.attempt == attempts.get(key, 1), "the result is the last attempt's"
            ended.add(key)
        elif kind == events.RUN_RESUMED:
            assert event.run_resumed.epoch > epoch, "whoever takes a run over has a higher epoch"
            epoch = event.run_resumed.epoch
        elif kind == events.RUN_FORKED:
            epoch = 1


def _check_requests(log: Sequence[event_pb2.AgentEvent]) -> None:
    asked: set[str] = set()
    answered: set[str] = set()
    for event, following in itertools.pairwise(log):
        if event.HasField("input_requested"):
            assert event.input_requested.request.input_id not in asked, "a request is recorded once"
            asked.add(event.input_requested.request.input_id)
        elif event.HasField("input_received"):
            assert event.input_received.answer.input_id in asked - answered, "a request is answered once"
            answered.add(event.input_received.answer.input_id)
        elif event.HasField("run_interrupted"):
            assert {one.input_id for one in event.run_interrupted.requests} <= asked - answered
            assert events.kind_of(following) in _AFTER_AN_INTERRUPTION


def _check_cancelled(log: Sequence[event_pb2.AgentEvent]) -> None:
    cancelled: list[str] = []
    for event in log:
        if event.HasField("cancel_requested"):
            cancelled.append(event.cancel_requested.effect_scope)
        elif events.kind_of(event) in _BEGINNINGS:
            assert not any(keys.covers(scope, event.effect_key) for scope in cancelled), "nothing begins after a cancel"


def _check_cancel_reasons(log: Sequence[event_pb2.AgentEvent]) -> None:
    """What was cancelled says why, as the first request that covers it; nothing else does."""
    requests: list[event_pb2.CancelRequested] = []
    for event in log:
        if event.HasField("cancel_requested"):
            requests.append(event.cancel_requested)
        elif event.HasField("sub_agent_failed") or event.HasField("run_cancelled"):
            end = event.sub_agent_failed if event.HasField("sub_agent_failed") else event.run_cancelled
            covering = (one.reason for one in requests if keys.covers(one.effect_scope, event.effect_key))
            is_cancelled = end.end_reason == execution_pb2.END_REASON_CANCELLED
            assert end.cancel_reason == (next(covering, 0) if is_cancelled else 0)


def _check_visits(log: Sequence[event_pb2.AgentEvent]) -> None:
    """A visit of a node starts at most once and ends once, after everything in its scope."""
    visits = [event for event in log if events.kind_of(event) in {events.NODE_STARTED, *events.NODE_END_KINDS}]
    starts = Counter(event.effect_key for event in visits if event.HasField("node_started"))
    ends = {event.effect_key: event for event in visits if not event.HasField("node_started")}
    assert len(ends) == sum(not event.HasField("node_started") for event in visits), "a visit ends once"
    assert max(starts.values(), default=1) == 1, "and starts once"
    assert starts.keys() <= ends.keys()
    for event in visits:
        assert not event.step_id
        assert event.sequence <= ends[event.effect_key].sequence
    for key, end in ends.items():
        last = max(event.sequence for event in log if keys.covers(key, event.effect_key) and not _is_cancel(event))
        assert last == end.sequence, "all in its scope ends before it"


def _is_cancel(event: event_pb2.AgentEvent) -> bool:
    return event.HasField("cancel_requested")
