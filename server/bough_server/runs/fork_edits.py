"""Check a fork's edited tool results against its origin's log, and apply them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from bough.v1 import event_pb2, fork_pb2, message_pb2
from bough_server.engine import keys
from bough_server.engine.input_requests import outcome_mistakes, result_of
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.log import events
from bough_server.messages import copy_of
from bough_server.truncation import MAX_RESULT_BYTES, MAX_TEXT_BYTES, size_of


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
