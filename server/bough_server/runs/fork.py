"""Create forks: find the fork point, check the changes, and launch the new run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    error_pb2,
    eval_set_pb2,
    event_pb2,
    execution_pb2,
    fork_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server import ids
from bough_server.agents.definition import revision
from bough_server.agents.pinned import MissingVersion
from bough_server.engine import keys
from bough_server.engine.input_requests import outcome_of_caller
from bough_server.engine.journal import Journal
from bough_server.errors import FieldViolation, ForkRefused, InvalidRequest, SequenceOutOfRange
from bough_server.identity import Principal, Scope
from bough_server.log import events
from bough_server.log.blobs import StoredBlob
from bough_server.messages import copy_of
from bough_server.runs.admission import EvaluationRun, build_user_message, check_input, effective_policy, set_evaluation
from bough_server.runs.close import policy_of, read_log, to_log_events
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.fork_point import (
    check_edited_visits,
    check_edits,
    find_edited_ends,
    find_edited_visits,
    find_start_under_policy,
    replace_result,
)
from bough_server.runs.live import LiveRun
from bough_server.runs.takeover import Takeover
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.runtime.tool_mocks import is_replaced
from bough_server.store.ports.log import NewFork
from bough_server.store.ports.runs import RunRow
from bough_server.templates import template_mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """The point where a fork leaves its origin.

    `shared` are the origin's events up to `sequence`, without deltas; `edited` are the origin's ends of the tool calls
    whose results the fork changes, and `visits` the keys of the visits of nodes whose outputs it changes.
    """

    shared: Sequence[event_pb2.AgentEvent]
    sequence: int
    edited: Sequence[event_pb2.AgentEvent]
    visits: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAddress:
    """The id, principal and request digest of a new fork, and what it is in an evaluation."""

    run_id: str
    principal: Principal
    origins: Scope
    """Whose runs the principal may fork."""
    digest: str
    evaluation: EvaluationRun | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkStart:
    """The first events of a fork after the shared ones, and the definitions that it changes."""

    events: Sequence[event_pb2.AgentEvent]
    definitions: Sequence[agent_pb2.AgentDefinition]


def find_fork_point(
    request: agent_service_pb2.ForkRunRequest,
    log: Sequence[event_pb2.AgentEvent],
    *,
    last_sequence: int,
    policy: policy_pb2.RunPolicy | None = None,
) -> ForkPoint:
    """Return the fork point of a request; `log` is the origin's without deltas and ends at `last_sequence`.

    `policy` is the fork's, None if it keeps its origin's. Raises SequenceOutOfRange, ForkRefused and InvalidRequest.
    """
    edited, visits = find_edited_ends(request.changes, log), find_edited_visits(request.changes, log)
    # An edited result must not be among the shared events, so the fork starts before the first of them.
    sequence = min([request.after_sequence, *(end.sequence - 1 for end in (*edited, *visits))])
    _check_place(log, sequence, last_sequence)
    if policy is not None:
        sequence = find_start_under_policy(log, sequence, policy)
    shared = [event for event in log if event.sequence <= sequence]
    check_edits(edited, shared, last_sequence=sequence)
    check_edited_visits(visits, log, last_sequence=sequence)
    _check_input_change(request.changes, sequence)
    return ForkPoint(shared=shared, sequence=sequence, edited=edited, visits=tuple(end.effect_key for end in visits))


def build_fork(
    request: agent_service_pb2.ForkRunRequest,
    point: ForkPoint,
    *,
    origin: RunRow,
    resolver: Resolver,
    address: ForkAddress,
) -> ForkStart:
    """Build the fork of a request; `resolver` is the catalog of the shared events.

    Raises ForkRefused and InvalidRequest.
    """
    journal, edited = Journal(point.shared), {end.effect_key for end in point.edited}
    mocks = address.evaluation.mocks if address.evaluation is not None else None
    mocks = journal.forks.mocks(point.shared[0].run_started) if mocks is None else mocks
    _check_approvals(journal, edited, mocks)
    if not request.allow_open_effects:
        _check_open_tools(journal, edited, resolver, mocks)
    definitions = override_definitions(request.changes, resolver)
    forked = _build_fork_event(request, point, address)
    forked.run_forked.labels.update(request.labels or origin.run.labels)
    forked.run_forked.definition_refs.extend(
        event_pb2.DefinitionRef(name=each.name, revision=revision(each)) for each in definitions
    )
    results = [replace_result(end, each) for end, each in zip(point.edited, request.changes.tool_results, strict=True)]
    return ForkStart(events=[forked, *results], definitions=definitions)


def override_definitions(changes: fork_pb2.ForkChanges, resolver: Resolver) -> list[agent_pb2.AgentDefinition]:
    """Return the definitions that a fork changes, with the changes applied, in order of name. Raises InvalidRequest."""
    made: list[agent_pb2.AgentDefinition] = []
    wrong: list[FieldViolation] = []
    for name, override in sorted(changes.agents.items()):
        field = f"changes.agents[{json.dumps(name)}]"
        wrong.extend(_override_violations(override, field, resolver))
        agent = resolver.agents.get(name)
        if agent is None:
            description, reason = "The run has no such agent.", error_pb2.ERROR_REASON_UNKNOWN_AGENT
            wrong.append(FieldViolation(field=field, description=description, reason=reason))
            continue
        if agent.definition.WhichOneof("kind") not in ("llm", "supervisor"):
            wrong.append(FieldViolation(field=field, description="The agent does not call a model itself."))
            continue
        made.append(_apply_override(agent.definition, override))
    if wrong:
        raise InvalidRequest(wrong)
    return made


def _override_violations(override: fork_pb2.AgentOverride, field: str, resolver: Resolver) -> Iterator[FieldViolation]:
    if override.HasField("model") and resolver.model(override.model) is None:
        yield FieldViolation(field=f"{field}.model", description=f"There is no model {override.model!r}.")
    if override.HasField("instruction") and (problem := template_mistake(override.instruction, ())):
        yield FieldViolation(field=f"{field}.instruction", description=problem)


def _apply_override(
    definition: agent_pb2.AgentDefinition, override: fork_pb2.AgentOverride
) -> agent_pb2.AgentDefinition:
    changed = copy_of(definition)
    if override.HasField("model"):
        llm_of(changed).model = override.model
    if override.HasField("instruction"):
        llm_of(changed).instruction = override.instruction
    return changed


def _check_place(log: Sequence[event_pb2.AgentEvent], sequence: int, last_sequence: int) -> None:
    if sequence > last_sequence:
        raise SequenceOutOfRange(
            f"The log of this run ends at sequence {last_sequence}; it cannot be forked after {sequence}.",
            details={"last_sequence": str(last_sequence)},
        )
    if any(event.HasField("run_queued") for event in log):
        begins = next((event.sequence for event in log if event.HasField("run_dequeued")), None)
        if begins is None or sequence < begins:
            hint = f" Fork it after sequence {begins} or later." if begins is not None else ""
            raise ForkRefused(f"At sequence {sequence} the run was still waiting for its session.{hint}")
    for event in log:
        if event.sequence > sequence:
            return
        if events.kind_of(event) in events.TERMINAL_KINDS:
            raise ForkRefused(f"The run had ended by sequence {sequence}. Fork it before sequence {event.sequence}.")
        if event.HasField("cancel_requested") and not event.cancel_requested.effect_scope:
            raise ForkRefused(
                f"The run was cancelled by sequence {sequence}. Fork it before sequence {event.sequence}."
            )


def _check_input_change(changes: fork_pb2.ForkChanges, sequence: int) -> None:
    if not changes.HasField("input"):
        return
    if sequence != 1:
        description = "The input can only be changed in a fork after sequence 1, where nothing depends on it yet."
        raise InvalidRequest([FieldViolation(field="changes.input", description=description)])
    check_input(changes.input, field="changes.input")


def _check_approvals(journal: Journal, edited: set[str], mocks: eval_set_pb2.ToolMocks | None) -> None:
    """Raise ForkRefused for a call that others have approved, and that would run again in the fork."""
    for effect, request in journal.requested.items():
        key, answer = keys.owner(effect), journal.answered.get(effect)
        is_by_others = bool(request.approver_group) or request.four_eyes
        if not is_by_others or answer is None or not answer.approval.approved:
            continue
        is_over = key in journal.results or key in edited or journal.is_in_cancelled(key)
        if is_over or is_replaced(mocks, request.call, agent=request.agent_path[-1]):
            continue
        received = journal.recorded[effect, events.INPUT_RECEIVED, 0]
        raise ForkRefused(
            f"The call of {request.call.name!r} had been approved by others at this point, for the run alone. "
            f"Fork before sequence {received.sequence}, where the fork asks for itself, or edit the call's result."
        )


def _check_open_tools(
    journal: Journal, edited: set[str], resolver: Resolver, mocks: eval_set_pb2.ToolMocks | None
) -> None:
    for key, event in journal.started.items():
        is_open = event.HasField("tool_started") and key not in {*journal.results, *journal.dispatched, *edited}
        if is_open and not any(keys.covers(scope, key) for scope in journal.cancelled):
            call, name = event.tool_started.call, event.tool_started.call.name
            is_once = name in resolver.tools and resolver.tools[name].on_recovery != "retry"
            if is_once and not is_replaced(mocks, call, agent=event.agent):
                raise ForkRefused(
                    f"The tool {name!r} was running at this point, and must not be run again without permission. "
                    f"Fork before sequence {event.sequence}, edit its result, or set allow_open_effects."
                )


def _build_fork_event(
    request: agent_service_pb2.ForkRunRequest, point: ForkPoint, address: ForkAddress
) -> event_pb2.AgentEvent:
    started = point.shared[0]
    event = events.in_place_of(started)
    forked = event.run_forked
    forked.origin.run_id, forked.origin.sequence = request.run_id, point.sequence
    forked.changes.CopyFrom(request.changes)
    if request.changes.HasField("input"):
        message = build_user_message(request.changes.input, root_id=started.invocation_id, message_root=address.run_id)
        forked.changes.input.CopyFrom(message)
    for edited in forked.changes.tool_results:
        edited.outcome.CopyFrom(outcome_of_caller(edited.outcome))
    for output, key in zip(forked.changes.node_outputs, point.visits, strict=True):
        output.effect_key = key
    forked.request_id = request.request_id
    forked.request_digest = address.digest if request.request_id else ""
    forked.user_id = address.principal.user_id
    if address.evaluation is not None:
        set_evaluation(forked, address.evaluation)
    return event


def _set_policy(
    forked: event_pb2.RunForked, point: ForkPoint, *, policy: policy_pb2.RunPolicy | None, deadline_time_ns: int | None
) -> None:
    """Set the policy that the request brings, if any, and the deadline, which a background run does not have."""
    if policy is not None:
        forked.policy.CopyFrom(policy)
    in_force = policy if policy is not None else policy_of(point.shared)
    if deadline_time_ns is not None and not in_force.background:
        forked.deadline_time.FromNanoseconds(deadline_time_ns)


class RunForker:
    """Creates forks of runs, and launches them."""

    def __init__(self, dependencies: RunDependencies, takeover: Takeover) -> None:
        self._dependencies = dependencies
        self._takeover = takeover

    async def fork(
        self,
        request: agent_service_pb2.ForkRunRequest,
        address: ForkAddress,
        *,
        files: Sequence[StoredBlob],
        deadline_time_ns: int | None,
    ) -> LiveRun:
        """Create a fork and launch it; `files` are those of its changes and of its mocks.

        Raises NotFound, SequenceOutOfRange, ForkRefused, InvalidRequest, RequestIdTaken and StorageFailed.
        """
        dependencies = self._dependencies
        origin = await dependencies.store.runs.get(address.origins, request.run_id)
        # Before the log: events that a live origin appends in between must not move the end that is checked.
        last_sequence = await dependencies.store.log.last_sequence(request.run_id)
        log = await read_log(dependencies.store.log, request.run_id)
        has_policy = request.HasField("policy")
        policy = effective_policy(request.policy, dependencies.defaults) if has_policy else None
        point = find_fork_point(request, log, last_sequence=last_sequence, policy=policy)
        try:
            resolver = await self._takeover.restore_resolver(address.principal, point.shared)
            fork = build_fork(request, point, origin=origin, resolver=resolver, address=address)
            _set_policy(fork.events[0].run_forked, point, policy=policy, deadline_time_ns=deadline_time_ns)
            record = self._build_row(address, point, fork)
            await self._create(fork, record, files)
            return await self._takeover.launch(record, [*point.shared, *fork.events])
        except MissingVersion as missing:
            raise ForkRefused(str(missing)) from None

    async def _create(self, fork: ForkStart, run_row: RunRow, files: Sequence[StoredBlob]) -> None:
        forked, created = fork.events[0].run_forked, run_row.run.create_time.ToNanoseconds()
        await self._dependencies.store.log.fork(
            NewFork(
                run_id=run_row.run.run_id,
                principal=run_row.principal,
                session_id=run_row.run.session_id,
                origin_run_id=forked.origin.run_id,
                origin_sequence=forked.origin.sequence,
                request_id=forked.request_id,
                request_digest=forked.request_digest,
                create_time_ns=created,
                log_events=to_log_events(fork.events, after=forked.origin.sequence, now_ns=created, files=files),
                definitions={revision(each): each for each in fork.definitions},
                owner=run_row.owner,
                quotas=self._dependencies.quotas.find_on_starts(run_row.principal),
            )
        )

    def _build_row(self, address: ForkAddress, point: ForkPoint, fork: ForkStart) -> RunRow:
        """Return the row of a fork as it is right after it was created."""
        now, started, forked = self._dependencies.clock.now_ns(), point.shared[0], fork.events[0].run_forked
        run = run_pb2.Run(
            run_id=address.run_id,
            session_id=ids.new_uuid7(now),
            user_id=address.principal.user_id,
            agent=started.run_started.agent,
            state=execution_pb2.EXECUTION_STATE_RUNNING,
            labels=forked.labels,
            last_sequence=point.sequence + len(fork.events),
            forked_from=forked.origin,
            deadline_time=forked.deadline_time if forked.HasField("deadline_time") else None,
            evaluation=forked.evaluation if forked.HasField("evaluation") else None,
        )
        run.create_time.FromNanoseconds(now)
        run.start_time.CopyFrom(run.create_time)
        return RunRow(
            run=run,
            principal=address.principal,
            epoch=1,
            request_digest=address.digest,
            owner=self._dependencies.worker,
        )
