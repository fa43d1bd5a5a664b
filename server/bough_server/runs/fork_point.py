"""The point of a log at which a fork begins: the results that it replaces, and the aborts under way there.

A failure that aborts its caller is recorded last, after the cancellations of everything that runs beside it and the
ends of that work. Between these events the abort is in progress. If a fork started there under a policy that does not
abort, it would wait forever for the cancelled work.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.v1 import event_pb2, execution_pb2, fork_pb2, message_pb2, policy_pb2
from bough_server.engine import keys
from bough_server.engine.input_requests import outcome_mistakes, result_of, value_mistakes
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.log import events
from bough_server.messages import copy_of
from bough_server.runs.close import policy_of
from bough_server.truncation import MAX_RESULT_BYTES, MAX_TEXT_BYTES, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """An event that stops something of `caller` because a failure aborts that."""

    caller: str
    scope: str
    sequence: int


def find_start_under_policy(log: Sequence[event_pb2.AgentEvent], sequence: int, policy: policy_pb2.RunPolicy) -> int:
    """Return where a fork with a policy starts: at `sequence`, or right before the aborts that are under way there."""
    shared = [event for event in log if event.sequence <= sequence]
    if not _is_abort_policy(policy_of(shared)) or _is_abort_policy(policy):
        return sequence
    # Look again after each move: an abort that is over at a sequence may be under way at an earlier one.
    while begun := min(_find_open_aborts(shared), default=0):
        sequence = begun - 1
        shared = [event for event in shared if event.sequence <= sequence]
    return sequence


def _is_abort_policy(policy: policy_pb2.RunPolicy) -> bool:
    return policy.on_sub_agent_failure == policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT


def _find_open_aborts(shared: Sequence[event_pb2.AgentEvent]) -> Iterator[int]:
    """Yield the sequences of the stops whose cause has not ended by the end of a log.

    The log does not name the cause: it is a child of the same caller that began before and is not stopped itself.
    """
    stops: dict[str, list[_Stop]] = defaultdict(list)
    for stop in _find_stops(shared):
        stops[stop.caller].append(stop)
    for started in _find_open_children(shared) if stops else ():
        of_caller = stops[started.parent_invocation_id]
        if not any(keys.covers(stop.scope, started.effect_key) for stop in of_caller):
            yield from (stop.sequence for stop in of_caller if stop.sequence > started.sequence)


def _find_stops(shared: Sequence[event_pb2.AgentEvent]) -> Iterator[_Stop]:
    late: set[str] = set()
    for event in shared:
        scope, reason = event.cancel_requested.effect_scope, event.cancel_requested.reason
        if reason == execution_pb2.CANCEL_REASON_LIMIT:
            late.add(scope)
        elif reason == execution_pb2.CANCEL_REASON_ABORT:
            yield _Stop(caller=event.invocation_id, scope=scope, sequence=event.sequence)
        # A child whose time was up too has no second request: its end shows that the abort came before its timeout.
        elif event.sub_agent_failed.end_reason == execution_pb2.END_REASON_CANCELLED and event.effect_key in late:
            yield _Stop(caller=event.parent_invocation_id, scope=event.effect_key, sequence=event.sequence)


def _find_open_children(shared: Sequence[event_pb2.AgentEvent]) -> list[event_pb2.AgentEvent]:
    """Return the starts of the sub-agents that have no end in a log."""
    started: dict[str, event_pb2.AgentEvent] = {}
    for event in shared:
        if event.HasField("sub_agent_started"):
            started[event.invocation_id] = event
        elif events.kind_of(event) in events.AGENT_END_KINDS:
            started.pop(event.invocation_id, None)
    return list(started.values())


def find_edited_ends(changes: fork_pb2.ForkChanges, log: Sequence[event_pb2.AgentEvent]) -> list[event_pb2.AgentEvent]:
    """Return the events that ended the edited calls, in the order of the edits. Raises InvalidRequest."""
    found = [_find_ends(edited, log) for edited in changes.tool_results]
    calls = Counter(ends[0].effect_key for ends in found if len(ends) == 1)
    wrong: list[FieldViolation] = []
    for index, (edited, ends) in enumerate(zip(changes.tool_results, found, strict=True)):
        wrong += [_violation(index, "call_id", mistake) for mistake in _call_mistakes(ends, calls)]
        wrong += [_violation(index, "outcome", mistake) for mistake in _outcome_mistakes(edited.outcome)]
    if wrong:
        raise InvalidRequest(wrong)
    return [ends[0] for ends in found]


def find_edited_visits(
    changes: fork_pb2.ForkChanges, log: Sequence[event_pb2.AgentEvent]
) -> list[event_pb2.AgentEvent]:
    """Return the events that ended the edited visits of nodes, in the order of the edits. Raises InvalidRequest."""
    ends = {event.sequence: event for event in log if events.kind_of(event) in events.NODE_END_KINDS}
    edits = Counter(edited.sequence for edited in changes.node_outputs)
    wrong: list[FieldViolation] = []
    for index, edited in enumerate(changes.node_outputs):
        place, end = f"changes.node_outputs[{index}]", ends.get(edited.sequence)
        if end is None:
            description = f"There is no node_completed or node_failed at sequence {edited.sequence}."
            wrong.append(FieldViolation(field=f"{place}.sequence", description=description))
        elif end.node_completed.HasField("item") or end.node_failed.HasField("item"):
            description = "This is the end of an item: edit the output of its whole visit, a list."
            wrong.append(FieldViolation(field=f"{place}.sequence", description=description))
        elif edits[edited.sequence] > 1:
            wrong.append(FieldViolation(field=f"{place}.sequence", description="The visit is edited twice."))
        wrong += [
            FieldViolation(field=f"{place}.output_json", description=mistake)
            for mistake in value_mistakes(edited.output_json, "", "output_json")
        ]
    if wrong:
        raise InvalidRequest(wrong)
    return [ends[edited.sequence] for edited in changes.node_outputs]


def check_edited_visits(
    visits: Sequence[event_pb2.AgentEvent], log: Sequence[event_pb2.AgentEvent], *, last_sequence: int
) -> None:
    """Raise InvalidRequest for edits of visits that start after the fork point, or whose work is under way there."""
    begun = {event.effect_key for event in log if event.sequence <= last_sequence and event.HasField("node_started")}
    wrong: list[FieldViolation] = []
    for index, end in enumerate(visits):
        description = ""
        if end.effect_key not in begun and end.sequence != last_sequence + 1:
            description = f"The visit started after sequence {last_sequence}, where this fork starts."
        elif _is_under_way(end, log, last_sequence):
            description = (
                f"The work of the visit was under way at sequence {last_sequence}, where this fork starts: the fork "
                "would go on with it, although its output is replaced. Edit it in a separate fork."
            )
        if description:
            wrong.append(FieldViolation(field=f"changes.node_outputs[{index}].sequence", description=description))
    if wrong:
        raise InvalidRequest(wrong)


def _is_under_way(end: event_pb2.AgentEvent, log: Sequence[event_pb2.AgentEvent], last_sequence: int) -> bool:
    """Whether a log has work of a visit up to a sequence and more of it behind."""
    visit = end.effect_key
    work = {
        event.sequence <= last_sequence
        for event in log
        if event.sequence < end.sequence and event.effect_key != visit and keys.covers(visit, event.effect_key)
    }
    return len(work) == 2


def check_edits(
    edited: Sequence[event_pb2.AgentEvent], shared: Sequence[event_pb2.AgentEvent], *, last_sequence: int
) -> None:
    """Raise InvalidRequest for edits of calls that come after the fork point."""
    answered = {event.effect_key for event in shared if event.HasField("llm_completed")}
    begun = {keys.owner(event.effect_key) for event in shared}
    description = f"The call was made after sequence {last_sequence}, where this fork starts."
    wrong = [
        _violation(index, "call_id", description)
        for index, end in enumerate(edited)
        if not _is_called(end, answered, begun, last_sequence)
    ]
    if wrong:
        raise InvalidRequest(wrong)


def _is_called(end: event_pb2.AgentEvent, answered: set[str], begun: set[str], last_sequence: int) -> bool:
    """Whether a call is made by a log up to a sequence: by the answer of its step or, without a step, by code."""
    if end.step_id:
        return end.effect_key.rpartition(".t")[0] + ".m" in answered
    # A refused call of code has no event before its end: with all before it recorded, code arrives at it again.
    return end.effect_key in begun or end.sequence == last_sequence + 1


def replace_result(end: event_pb2.AgentEvent, edited: fork_pb2.EditedResult) -> event_pb2.AgentEvent:
    """Return a copy of a call's end with the edited result; everything about the call itself is kept."""
    event = copy_of(end)
    event.ClearField("payload")
    before, given = events.tool_result_of(end), edited.outcome
    result = (event.tool_failed if given.HasField("failure") else event.tool_completed).result
    result.CopyFrom(result_of(given, before.call))
    result.agent, result.invocation_id = before.agent, before.invocation_id
    if before.HasField("start_time"):
        result.start_time.CopyFrom(before.start_time)
    if result.HasField("error"):
        result.error.agent, result.error.invocation_id = before.agent, before.invocation_id
    return event


def _find_ends(edited: fork_pb2.EditedResult, log: Sequence[event_pb2.AgentEvent]) -> list[event_pb2.AgentEvent]:
    return [
        event
        for event in log
        if events.kind_of(event) in events.TOOL_END_KINDS
        and events.tool_result_of(event).call.call_id == edited.call_id
        and edited.invocation_id in ("", event.invocation_id)
    ]


def _call_mistakes(ends: Sequence[event_pb2.AgentEvent], calls: Counter[str]) -> Iterator[str]:
    if not ends:
        yield "No call with this id has a result in this run."
    elif len(ends) > 1:
        yield "Several calls with this id have results in this run; set invocation_id too."
    elif calls[ends[0].effect_key] > 1:
        yield "The call is edited twice."
    elif events.tool_result_of(ends[0]).child_invocation_id:
        yield "The call is to an agent: edit the results of that agent's own calls, or change its instruction."


def _outcome_mistakes(outcome: message_pb2.ToolOutcome) -> Iterator[str]:
    yield from outcome_mistakes(outcome)
    if outcome.ByteSize() > MAX_RESULT_BYTES:
        yield f"An outcome may have at most {MAX_RESULT_BYTES // 1024} KiB."
    elif any(size_of(part.text or part.data_json) > MAX_TEXT_BYTES for part in outcome.parts):
        yield f"A text of an outcome may have at most {MAX_TEXT_BYTES // 1024} KiB."


def _violation(index: int, field: str, description: str) -> FieldViolation:
    return FieldViolation(field=f"changes.tool_results[{index}].{field}", description=description)
