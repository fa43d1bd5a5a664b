"""Accept a fork: the fork point, the changes after it, and the launch of the new run."""

from collections.abc import Sequence
from dataclasses import dataclass

from bough.v1 import agent_pb2, agent_service_pb2, error_pb2, event_pb2, fork_pb2
from bough_server import events, ids
from bough_server.agents.definition import with_revision
from bough_server.agents.pinned import MissingVersion
from bough_server.engine import keys
from bough_server.engine.journal import Journal
from bough_server.errors import FieldViolation, ForkRefused, InvalidRequest, SequenceOutOfRange
from bough_server.runs.admission import check_input, spoken_by_user
from bough_server.runs.close import as_records, read_log
from bough_server.runs.dependencies import Equipment
from bough_server.runs.fork_edits import check_edits, edited_ends, with_result
from bough_server.runs.live import LiveRun
from bough_server.runs.takeover import Takeover
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.store.ports import NewFork, Principal, RunRecord
from bough_server.templates import template_mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where a fork begins: what it shares of its origin's log without deltas, and the ends that it has otherwise."""

    shared: Sequence[event_pb2.AgentEvent]
    sequence: int
    edited: Sequence[event_pb2.AgentEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A fork as it will be: its own first events, and the definitions that it changes."""

    events: Sequence[event_pb2.AgentEvent]
    definitions: Sequence[agent_pb2.AgentDefinition]


def cut_of(
    request: agent_service_pb2.ForkRunRequest, log: Sequence[event_pb2.AgentEvent], *, last_sequence: int
) -> Cut:
    """Where the fork that a request asks for begins; `log` is the origin's without deltas, up to its last sequence.

    Raises SequenceOutOfRange, ForkRefused and InvalidRequest.
    """
    edited = edited_ends(request.changes, log)
    sequence = min([request.after_sequence, *(end.sequence - 1 for end in edited)])
    _check_place(log, sequence, last_sequence)
    shared = [event for event in log if event.sequence <= sequence]
    check_edits(edited, shared)
    _check_input_change(request.changes, sequence)
    return Cut(shared=shared, sequence=sequence, edited=edited)


def fork_of(
    request: agent_service_pb2.ForkRunRequest, cut: Cut, *, origin: RunRecord, resolver: Resolver, digest: str
) -> Fork:
    """The fork that a request asks for; `resolver` is the catalog of what it shares.

    Raises ForkRefused and InvalidRequest.
    """
    if not request.allow_open_effects:
        _check_open_tools(cut.shared, {end.effect_key for end in cut.edited}, resolver)
    definitions = changed_definitions(request.changes, resolver)
    forked = _forked(request, cut, digest)
    forked.run_forked.labels.update(request.labels or origin.run.labels)
    forked.run_forked.definitions.extend(
        event_pb2.DefinitionRef(name=each.name, revision=each.revision) for each in definitions
    )
    results = [with_result(end, each) for end, each in zip(cut.edited, request.changes.tool_results, strict=True)]
    return Fork(events=[forked, *results], definitions=definitions)


def changed_definitions(changes: fork_pb2.ForkChanges, resolver: Resolver) -> list[agent_pb2.AgentDefinition]:
    """The definitions that a fork changes, as they are then, by name. Raises InvalidRequest."""
    made: list[agent_pb2.AgentDefinition] = []
    wrong = [
        FieldViolation(field=f"changes.models[{name!r}]", description=f"There is no model {model!r}.")
        for name, model in changes.models.items()
        if not _has_model(resolver, model)
    ]
    for name in sorted({*changes.models, *changes.instructions}):
        field = f"changes.{'models' if name in changes.models else 'instructions'}[{name!r}]"
        try:
            definition = agent_pb2.AgentDefinition()
            definition.CopyFrom(resolver.agent(name).definition)
        except KeyError:
            said, reason = "The run has no such agent.", error_pb2.ERROR_REASON_UNKNOWN_AGENT
            wrong.append(FieldViolation(field=field, description=said, reason=reason))
            continue
        if definition.WhichOneof("kind") not in ("llm", "supervisor"):
            wrong.append(FieldViolation(field=field, description="The agent asks no model itself."))
            continue
        if name in changes.models:
            llm_of(definition).model = changes.models[name]
        if name in changes.instructions:
            llm_of(definition).instruction = changes.instructions[name]
            if problem := template_mistake(changes.instructions[name], ()):
                place = f"changes.instructions[{name!r}]"
                wrong.append(FieldViolation(field=place, description=problem))
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
    if any(event.HasField("run_queued") for event in log):
        begins = next((event.sequence for event in log if event.HasField("run_dequeued")), None)
        if begins is None or sequence < begins:
            hint = f" Fork it from {begins} on." if begins is not None else ""
            raise ForkRefused(f"By sequence {sequence} the run waited for its session and had not begun.{hint}")
    for event in log:
        if event.sequence > sequence:
            return
        if events.kind_of(event) in events.TERMINAL_KINDS:
            raise ForkRefused(f"The run had ended by sequence {sequence}. Fork it before {event.sequence}.")
        if event.HasField("cancel_requested") and not event.cancel_requested.scope:
            raise ForkRefused(f"The run was cancelled by sequence {sequence}. Fork it before {event.sequence}.")


def _check_input_change(changes: fork_pb2.ForkChanges, sequence: int) -> None:
    if not changes.HasField("input"):
        return
    if sequence != 1:
        said = "What the user says can only be changed where nothing has followed from it: after sequence 1."
        raise InvalidRequest([FieldViolation(field="changes.input", description=said)])
    check_input(changes.input, field="changes.input")


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


def _forked(request: agent_service_pb2.ForkRunRequest, cut: Cut, digest: str) -> event_pb2.AgentEvent:
    started = cut.shared[0]
    event = events.in_place_of(started)
    forked = event.run_forked
    forked.origin_run_id, forked.origin_sequence = request.run_id, cut.sequence
    forked.changes.CopyFrom(request.changes)
    if request.changes.HasField("input"):
        forked.changes.input.CopyFrom(spoken_by_user(request.changes.input, root_id=started.invocation_id))
    forked.request_id = request.request_id
    forked.request_digest = digest if request.request_id else ""
    return event


class Forker:
    """Makes forks of runs."""

    def __init__(self, equipment: Equipment, takeover: Takeover) -> None:
        self._equipment = equipment
        self._takeover = takeover

    async def fork(
        self,
        principal: Principal,
        request: agent_service_pb2.ForkRunRequest,
        *,
        run_id: str,
        digest: str,
        deadline_time_ns: int | None,
    ) -> LiveRun:
        """Accepts a fork under `run_id` and launches it.

        Raises NotFound, SequenceOutOfRange, ForkRefused, InvalidRequest, RequestIdTaken and StorageFailed.
        """
        equipment = self._equipment
        origin = await equipment.index.get(principal, request.run_id)
        # Read first: what the origin says meanwhile must not count.
        last_sequence = await equipment.log.last_sequence(request.run_id)
        log = await read_log(equipment.log, request.run_id)
        cut = cut_of(request, log, last_sequence=last_sequence)
        try:
            resolver = await self._takeover.resolver(cut.shared)
            fork = fork_of(request, cut, origin=origin, resolver=resolver, digest=digest)
            if deadline_time_ns is not None and not log[0].run_started.policy.background:
                fork.events[0].run_forked.deadline_time.FromNanoseconds(deadline_time_ns)
            record = self._record(principal, cut, fork, run_id, digest)
            await self._create(principal, fork, record)
            return await self._takeover.launch(record, [*cut.shared, *fork.events])
        except MissingVersion as missing:
            raise ForkRefused(str(missing)) from None

    async def _create(self, principal: Principal, fork: Fork, record: RunRecord) -> None:
        forked, created = fork.events[0].run_forked, record.run.create_time.ToNanoseconds()
        await self._equipment.log.fork(
            NewFork(
                run_id=record.run.run_id,
                principal=principal,
                session_id=record.run.session_id,
                origin_run_id=forked.origin_run_id,
                origin_sequence=forked.origin_sequence,
                request_id=forked.request_id,
                request_digest=forked.request_digest,
                create_time_ns=created,
                records=as_records(fork.events, after=forked.origin_sequence, now_ns=created),
                definitions=fork.definitions,
                owner=record.owner,
            )
        )

    def _record(self, principal: Principal, cut: Cut, fork: Fork, run_id: str, digest: str) -> RunRecord:
        """The fork as it is when it has been accepted; it began when what it shares did."""
        now, started, forked = self._equipment.clock.now_ns(), cut.shared[0], fork.events[0].run_forked
        begins = next((event for event in cut.shared if event.HasField("run_dequeued")), started)
        run = agent_service_pb2.Run(
            run_id=run_id,
            session_id=ids.new_uuid7(now),
            agent=started.run_started.agent,
            state=event_pb2.STATE_RUNNING,
            labels=forked.labels,
            start_time=begins.time,
            last_sequence=cut.sequence + len(fork.events),
            forked_from=fork_pb2.ForkOrigin(run_id=forked.origin_run_id, sequence=cut.sequence),
        )
        run.create_time.FromNanoseconds(now)
        return RunRecord(run=run, principal=principal, epoch=1, request_digest=digest, owner=self._equipment.worker)
