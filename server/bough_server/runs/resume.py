"""Resume an interrupted run: check the answers to its requests and deliver them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bough.v1 import agent_service_pb2, event_pb2, input_pb2
from bough_server.agents.pinned import MissingVersion
from bough_server.engine.input_requests import answer_mistakes, build_answer_event, is_same_answer
from bough_server.engine.journal import Journal
from bough_server.errors import (
    AgentUnusable,
    AlreadyAnswered,
    ConcurrentChange,
    Fenced,
    FieldViolation,
    InvalidRequest,
    RequestIdReused,
    RunEnded,
    SequenceOutOfRange,
)
from bough_server.identity import Scope
from bough_server.log import events
from bough_server.log.blobs import UNKNOWN, StoredBlob, extract_files_within
from bough_server.messages import copy_of
from bough_server.runs.admission import digest_request
from bough_server.runs.close import policy_of, read_log
from bough_server.runs.commands import RemoteCommands
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.supervisor import RunSupervisor
from bough_server.store.ports.log import RunMoved
from bough_server.store.ports.runs import RunRow

_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswers:
    """The events that a resume has to record, and the sequence after which to follow the run.

    `fresh` is empty if all requests already have these answers.
    """

    fresh: Sequence[event_pb2.AgentEvent]
    since: int


def check_answers(
    request: agent_service_pb2.ResumeRunRequest, log: Sequence[event_pb2.AgentEvent], *, digest: str, user_id: str
) -> CheckedAnswers:
    """Check all answers before any is recorded. `log` is the run's without deltas.

    Raises InvalidRequest, AlreadyAnswered, RequestIdReused and RunEnded.
    """
    _check_unique(request.answers)
    asked = {event.input_requested.request.input_id: event for event in log if event.HasField("input_requested")}
    answered = {event.input_received.answer.input_id: event for event in log if event.HasField("input_received")}
    _check_request_id(request, answered.values(), digest, user_id)
    known = [answer for answer in request.answers if answer.input_id in answered]
    for answer in known:
        if not is_same_answer(answer, answered[answer.input_id].input_received.answer):
            raise AlreadyAnswered(
                f"The request {answer.input_id!r} already has another answer, which is final.",
                details={"input_id": answer.input_id},
            )
    if len(known) == len(request.answers):
        return CheckedAnswers(fresh=(), since=_find_follow_start(log, [answered[answer.input_id] for answer in known]))
    if events.kind_of(log[-1]) in events.TERMINAL_KINDS:
        raise RunEnded("The run has ended: it accepts no more answers.", details={"run_id": request.run_id})
    _check_answers(request, asked, answered, log)
    fresh = [
        build_answer_event(
            asked[answer.input_id],
            _attribute_answer(answer, user_id),
            request_id=request.request_id,
            request_digest=digest if request.request_id else "",
        )
        for answer in request.answers
        if answer.input_id not in answered
    ]
    return CheckedAnswers(fresh=fresh, since=log[-1].sequence)


def _check_unique(answers: Iterable[input_pb2.InputAnswer]) -> None:
    """Raise InvalidRequest if two answers are to the same request."""
    seen: set[str] = set()
    wrong: list[FieldViolation] = []
    for index, answer in enumerate(answers):
        if answer.input_id in seen:
            description = "An earlier answer in this call is to the same request."
            wrong.append(FieldViolation(field=f"answers[{index}].input_id", description=description))
        seen.add(answer.input_id)
    if wrong:
        raise InvalidRequest(wrong)


def _check_request_id(
    request: agent_service_pb2.ResumeRunRequest, answered: Iterable[event_pb2.AgentEvent], digest: str, user_id: str
) -> None:
    if not request.request_id:
        return
    for event in answered:
        known = event.input_received
        is_same = (known.request_id, known.answer.answered_by) == (request.request_id, user_id)
        if is_same and known.request_digest != digest:
            raise RequestIdReused(
                f"The request id {request.request_id!r} was used for other answers. Use a new one.",
                details={"run_id": request.run_id},
            )


def _check_answers(
    request: agent_service_pb2.ResumeRunRequest,
    asked: dict[str, event_pb2.AgentEvent],
    answered: dict[str, event_pb2.AgentEvent],
    log: Sequence[event_pb2.AgentEvent],
) -> None:
    is_open = {one.input_id for _, one in Journal(log).open_requests()}
    wrong: list[FieldViolation] = []
    for index, answer in enumerate(request.answers):
        event = asked.get(answer.input_id)
        field = f"answers[{index}].input_id"
        if event is None:
            descriptions = ["The run has no request with this id."]
        elif answer.input_id in answered:
            descriptions = []
        elif answer.input_id not in is_open:
            descriptions = ["The agent or tool that made this request has ended."]
        else:
            descriptions = answer_mistakes(event.input_requested.request, answer)
            field = f"answers[{index}].{answer.WhichOneof('answer') or 'answer'}"
        wrong += [FieldViolation(field=field, description=each) for each in descriptions]
    if wrong:
        raise InvalidRequest(wrong)


def _attribute_answer(answer: input_pb2.InputAnswer, user_id: str) -> input_pb2.InputAnswer:
    attributed = copy_of(answer)
    attributed.source, attributed.answered_by = input_pb2.ANSWER_SOURCE_CALLER, user_id
    return attributed


def _find_follow_start(log: Sequence[event_pb2.AgentEvent], known: Sequence[event_pb2.AgentEvent]) -> int:
    """Return the sequence before the run_resumed that the answers caused.

    If the answers were recorded in a run that was still executing, return the sequence before the first of them.
    """
    first = min(known, key=lambda event: event.sequence)
    for event in reversed([event for event in log if event.sequence < first.sequence]):
        if not _is_in_same_append(event, first):
            # run_resumed and the answers that caused it are one append, so they have the same time.
            is_cause = (
                event.run_resumed.cause == event_pb2.RESUME_CAUSE_ANSWER and event.record_time == first.record_time
            )
            return event.sequence - 1 if is_cause else first.sequence - 1
    return first.sequence - 1


def _is_in_same_append(event: event_pb2.AgentEvent, answered: event_pb2.AgentEvent) -> bool:
    """True if an event is an answer from the same call as this one; all events of an append have the same time."""
    one, other = event.input_received, answered.input_received
    is_same = (one.request_id, one.request_digest) == (
        other.request_id,
        other.request_digest,
    )
    return event.HasField("input_received") and is_same and event.record_time == answered.record_time


Check: TypeAlias = Callable[[RunRow, Sequence[input_pb2.InputRequest]], Collection[str]]
"""Judges whether requests of a run may be answered by who answers them; returns the ids of those that do not exist for
that caller."""


def _requests_of(
    request: agent_service_pb2.ResumeRunRequest, log: Sequence[event_pb2.AgentEvent]
) -> Sequence[input_pb2.InputRequest]:
    """Return the requests that are answered, as far as the run has made them."""
    names = {answer.input_id for answer in request.answers}
    asked = (event.input_requested.request for event in log if event.HasField("input_requested"))
    return [each for each in asked if each.input_id in names]


def _drop_requests(log: Sequence[event_pb2.AgentEvent], input_ids: Collection[str]) -> Sequence[event_pb2.AgentEvent]:
    """Return a log without some requests and their answers."""
    if not input_ids:
        return log
    return [
        event
        for event in log
        if event.input_requested.request.input_id not in input_ids
        and event.input_received.answer.input_id not in input_ids
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOutcome:
    """A run whose answers are recorded, and the sequence after which to follow it."""

    run_row: RunRow
    since: int


class RunResumer:
    """Records callers' answers to runs, and continues runs that were waiting for them."""

    def __init__(
        self, dependencies: RunDependencies, supervisor: RunSupervisor, remote_commands: RemoteCommands
    ) -> None:
        self._dependencies = dependencies
        self._supervisor = supervisor
        self._remote_commands = remote_commands

    async def resume(
        self,
        scope: Scope,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        user_id: str,
        deadline_time_ns: int | None,
        check: Check | None = None,
    ) -> ResumeOutcome:
        """Check all answers of a user to a run in a scope, record those that are new, and continue the run.

        `check` raises the error of a user who may not answer; None if another server has judged that.
        Raises NotFound, InvalidRequest, SequenceOutOfRange, AlreadyAnswered, RunEnded, AgentUnusable (the run is
        parked), RequestIdReused, SessionBusy, InsufficientBalance, ServerStopping and StorageFailed.
        """
        given = copy_of(request)  # sent to another worker as it is
        request, files = await extract_files_within(request, most=self._dependencies.max_files_bytes, field="answers")
        digest = digest_request(request)
        for _ in range(_TRIES):
            # Before anything of the run is waited for: a caller who may not see it must not notice that it exists.
            await self._dependencies.store.runs.get(scope, request.run_id)
            live = await self._supervisor.live_runs.find(request.run_id)
            if live is not None and await self._is_leaving(live):
                continue
            record = await self._dependencies.store.runs.get(scope, request.run_id)
            await self._check_place(request)
            log: Sequence[event_pb2.AgentEvent] = await read_log(self._dependencies.store.log, request.run_id)
            if check is not None:
                log = _drop_requests(log, check(record, _requests_of(request, log)))
            checked = check_answers(request, log, digest=digest, user_id=user_id)
            if not checked.fresh:
                return ResumeOutcome(run_row=record, since=checked.since)
            await self._dependencies.check_spending(record.principal)
            await self._check_files(record, files)
            if live is not None:
                since = await self._answer(live, checked, files)
            elif await self._supervisor.worker.is_elsewhere(record):
                await self._remote_commands.answer(record, given, user_id=user_id, deadline_time_ns=deadline_time_ns)
                continue  # look again: the log says whether these answers were recorded, or others
            else:
                is_background = policy_of(log).background
                deadline = None if is_background else deadline_time_ns
                since = await self._continue_run(record, checked, files, deadline_time_ns=deadline)
            if since is not None:
                return ResumeOutcome(run_row=record, since=since)
        details = {"run_id": request.run_id}
        raise ConcurrentChange("The run keeps changing while it is being answered. Try again.", details=details)

    async def _check_place(self, request: agent_service_pb2.ResumeRunRequest) -> None:
        """Raise SequenceOutOfRange for a stream that could not start, before any answer is recorded."""
        if not request.after_sequence:
            return
        last = await self._dependencies.store.log.last_sequence(request.run_id)
        if request.after_sequence > last:
            raise SequenceOutOfRange(
                f"The log of this run ends at sequence {last}; there is nothing after {request.after_sequence}.",
                details={"last_sequence": str(last)},
            )

    async def _check_files(self, run_row: RunRow, files: Sequence[StoredBlob]) -> None:
        """Raise InvalidRequest if answers name files without their bytes that the run's session does not have."""
        named = [file for file in files if file.data is None]
        hashes = {file.sha256 for file in named}
        session_id = run_row.run.session_id
        missing = await self._dependencies.store.blobs.find_missing(run_row.principal, session_id, hashes)
        if wrong := [FieldViolation(field=file.field, description=UNKNOWN) for file in named if file.sha256 in missing]:
            raise InvalidRequest(wrong)

    async def _is_leaving(self, live: LiveRun) -> bool:
        """Return True if a run accepts no more answers here, after waiting for its end; else wait for its replay."""
        await live.wait_for_replay()
        if live.is_over:
            await live.wait_for_end()
            return True
        return False

    async def _answer(self, live: LiveRun, checked: CheckedAnswers, files: Sequence[StoredBlob]) -> int | None:
        """Record answers in a live run and return the sequence before them.

        Return None if it no longer waits for all of them, or if another worker has taken it over.
        """
        execution = live.execution
        try:
            if not all(execution.waits_for(event) for event in checked.fresh):
                await execution.writer.wait_for_commit()  # then the log has the other answer, or the end of the request
                return None
            execution.writer.attach_files(files)
            for event in checked.fresh:
                execution.answer(event)
            await execution.writer.wait_for_commit()
        except Fenced as error:
            live.stop(error)  # else it would wait for its effects in flight
            await live.wait_for_end()
            return None
        return min(event.sequence for event in checked.fresh) - 1

    async def _continue_run(
        self,
        run_row: RunRow,
        checked: CheckedAnswers,
        files: Sequence[StoredBlob],
        *,
        deadline_time_ns: int | None,
    ) -> int | None:
        try:
            await self._supervisor.continue_run(
                run_row,
                event_pb2.RESUME_CAUSE_ANSWER,
                answers=checked.fresh,
                files=files,
                deadline_time_ns=deadline_time_ns,
            )
        except (RunMoved, Fenced):
            return None
        except MissingVersion as missing:
            raise AgentUnusable(f"The run cannot continue here, so it accepts no answers now: {missing}") from None
        return run_row.run.last_sequence
