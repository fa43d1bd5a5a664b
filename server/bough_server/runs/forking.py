"""What a fork begins with: a checked request and its origin's log become run_forked and more; it runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from bough.v1 import agent_pb2, agent_service_pb2, event_pb2, fork_pb2, message_pb2
from bough_server import events
from bough_server.agents.definition import with_revision
from bough_server.errors import FieldViolation, ForkRefused, InvalidRequest, SequenceOutOfRange
from bough_server.runs.admission import check_input, spoken_by_user
from bough_server.runtime import keys
from bough_server.runtime.agent import Resolver
from bough_server.runtime.journal import Journal

_TOOL_ENDS = {events.TOOL_COMPLETED, events.TOOL_FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A fork as it will be: what it shares, its own first events, and the definitions that it changes."""

    shared: Sequence[event_pb2.AgentEvent]
    origin_sequence: int
    events: Sequence[event_pb2.AgentEvent]
    definitions: Sequence[agent_pb2.AgentDefinition]


def fork_of(
    request: agent_service_pb2.ForkRunRequest,
    log: Sequence[event_pb2.AgentEvent],
    *,
    last_sequence: int,
    resolver: Resolver,
    digest: str,
    deadline_time_ns: int | None,
) -> Fork:
    """The fork that a request asks for; `log` is the origin's without deltas, `resolver` the catalog it began with.

    Raises SequenceOutOfRange, ForkRefused and InvalidRequest.
    """
    edited = [_edited_end(result, index, log) for index, result in enumerate(request.changes.tool_results)]
    sequence = min([request.after_sequence, *(end.sequence - 1 for end in edited)])
    _check_place(log, sequence, last_sequence)
    shared = [event for event in log if event.sequence <= sequence]
    _check_edits(edited, shared)
    _check_input_change(request.changes, sequence)
    if not request.allow_open_effects:
        _check_open_tools(shared, {end.effect_key for end in edited}, resolver)
    definitions = changed_definitions(request.changes, resolver)
    forked = _forked(request, log[0], sequence, digest, deadline_time_ns)
    forked.run_forked.definitions.extend(
        event_pb2.DefinitionRef(name=each.name, revision=each.revision) for each in definitions
    )
    results = [_with_result(end, each) for end, each in zip(edited, request.changes.tool_results, strict=True)]
    return Fork(shared=shared, origin_sequence=sequence, events=[forked, *results], definitions=definitions)


def changed_definitions(changes: fork_pb2.ForkChanges, resolver: Resolver) -> list[agent_pb2.AgentDefinition]:
    """The definitions that a fork changes, as they are then, by name. Raises InvalidRequest."""
    made: list[agent_pb2.AgentDefinition] = []
    wrong = [
        FieldViolation(
            field=f"changes.models[{name!r}]", description=f"There is no model {model!r}.", rule="fork.model"
        )
        for name, model in changes.models.items()
        if not _has_model(resolver, model)
    ]
    for name in sorted({*changes.models, *changes.instructions}):
        field = f"changes.{'models' if name in changes.models else 'instructions'}[{name!r}]"
        try:
            definition = agent_pb2.AgentDefinition()
            definition.CopyFrom(resolver.agent(name).definition)
        except KeyError:
            wrong.append(FieldViolation(field=field, description="The run has no such agent.", rule="fork.agent"))
            continue
        if definition.WhichOneof("kind") != "llm":
            wrong.append(FieldViolation(field=field, description="The agent asks no model itself.", rule="fork.agent"))
            continue
        if name in changes.models:
            definition.llm.model = changes.models[name]
        if name in changes.instructions:
            definition.llm.instruction = changes.instructions[name]
        made.append(with_revision(definition))
    if wrong:
        raise InvalidRequest(wrong)
    return made


def _has_model(resolver: Resolver, name: str) -> bool:
    try:
        resolver.model(name)
    except KeyError:
        return False
    return True


def _check_place(log: Sequence[event_pb2.AgentEvent], sequence: int, last_sequence: int) -> None:
    if sequence > last_sequence:
        raise SequenceOutOfRange(
            f"The log of this run ends at sequence {last_sequence}; it cannot be forked after {sequence}.",
            details={"last_sequence": str(last_sequence)},
        )
    for event in log:
        kind = events.kind_of(event)
        if event.sequence <= sequence and kind in events.TERMINAL_KINDS:
            raise ForkRefused(f"The run had ended by sequence {sequence}. Fork it before {event.sequence}.")
        if event.sequence <= sequence and kind == events.CANCEL_REQUESTED and not event.cancel_requested.scope:
            raise ForkRefused(f"The run was cancelled by sequence {sequence}. Fork it before {event.sequence}.")
        if event.sequence > sequence and kind == events.RUN_DEQUEUED:
            raise ForkRefused(f"The run had not begun by sequence {sequence}. Fork it from {event.sequence} on.")
    if events.kind_of(log[-1]) == events.RUN_QUEUED:
        raise ForkRefused("The run waits for its session and has not begun.")


def _edited_end(edited: fork_pb2.EditedResult, index: int, log: Sequence[event_pb2.AgentEvent]) -> event_pb2.AgentEvent:
    """The event that ended an edited call."""
    field = f"changes.tool_results[{index}].call_id"
    found = [
        event
        for event in log
        if events.kind_of(event) in _TOOL_ENDS
        and _result_of(event).call.call_id == edited.call_id
        and edited.invocation_id in ("", event.invocation_id)
    ]
    if len(found) != 1:
        said = "no call of this id has a result" if not found else "several have; name the invocation_id"
        raise InvalidRequest([FieldViolation(field=field, description=f"In this run {said}.", rule="fork.call")])
    if _result_of(found[0]).child_invocation_id:
        said = "It called an agent; fork inside of that one, or change what it is told."
        raise InvalidRequest([FieldViolation(field=field, description=said, rule="fork.call")])
    return found[0]


def _check_edits(edited: Sequence[event_pb2.AgentEvent], shared: Sequence[event_pb2.AgentEvent]) -> None:
    answered = {event.effect_key for event in shared if event.HasField("llm_completed")}
    for index, end in enumerate(edited):
        if end.effect_key.rpartition(".t")[0] + ".m" not in answered:
            said = f"It was called after sequence {shared[-1].sequence}, where this fork begins."
            field = f"changes.tool_results[{index}].call_id"
            raise InvalidRequest([FieldViolation(field=field, description=said, rule="fork.call")])


def _check_input_change(changes: fork_pb2.ForkChanges, sequence: int) -> None:
    if not changes.HasField("input"):
        return
    if sequence != 1:
        said = "What the user says can only be changed where nothing has followed from it: after sequence 1."
        raise InvalidRequest([FieldViolation(field="changes.input", description=said, rule="fork.input")])
    check_input(changes.input)


def _check_open_tools(shared: Sequence[event_pb2.AgentEvent], edited: set[str], resolver: Resolver) -> None:
    journal = Journal(shared)
    for key, event in journal.started.items():
        is_open = event.HasField("tool_started") and key not in {*journal.results, *journal.dispatched, *edited}
        if is_open and not any(keys.covers(scope, key) for scope in journal.cancelled):
            name = event.tool_started.call.name
            if _on_recovery(resolver, name) != "retry":
                raise ForkRefused(
                    f"The tool {name!r} was running there, and must not simply be run again. Fork before sequence "
                    f"{event.sequence}, edit its result, or allow_open_effects."
                )


def _on_recovery(resolver: Resolver, name: str) -> str:
    try:
        return resolver.tool(name).on_recovery
    except KeyError:
        return "retry"


def _forked(
    request: agent_service_pb2.ForkRunRequest,
    started: event_pb2.AgentEvent,
    sequence: int,
    digest: str,
    deadline_time_ns: int | None,
) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(
        invocation_id=started.invocation_id,
        agent=started.agent,
        branch=started.branch,
        trace_id=started.trace_id,
        span_id=started.span_id,
    )
    forked = event.run_forked
    forked.origin_run_id, forked.origin_sequence = request.run_id, sequence
    forked.changes.CopyFrom(request.changes)
    if request.changes.HasField("input"):
        said = spoken_by_user(request.changes.input, root_id=started.invocation_id)
        forked.changes.input.CopyFrom(said)
    forked.request_id = request.request_id
    forked.request_digest = digest if request.request_id else ""
    forked.labels.update(request.labels or started.run_started.labels)
    if deadline_time_ns is not None:
        forked.deadline_time.FromNanoseconds(deadline_time_ns)
    return event


def _with_result(end: event_pb2.AgentEvent, edited: fork_pb2.EditedResult) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent()
    event.CopyFrom(end)
    before = _result_of(end)
    event.ClearField("payload")
    is_failure = edited.result.HasField("error")
    result = (event.tool_failed if is_failure else event.tool_completed).result
    result.CopyFrom(edited.result)
    result.call.CopyFrom(before.call)
    result.agent, result.invocation_id = before.agent, before.invocation_id
    if before.HasField("start_time"):
        result.start_time.CopyFrom(before.start_time)
    return event


def _result_of(event: event_pb2.AgentEvent) -> message_pb2.ToolResult:
    return event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result
