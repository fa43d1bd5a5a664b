"""Resume an interrupted run: check the answers to its requests and deliver them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bough.v1 import agent_service_pb2, event_pb2, input_pb2
from bough_server import events
from bough_server.agents.pinned import MissingVersion
from bough_server.engine.input_requests import mistakes, received, same_answer
from bough_server.engine.journal import Journal
from bough_server.errors import (
    AgentUnusable,
    AlreadyAnswered,
    Fenced,
    FieldViolation,
    InvalidRequest,
    RequestIdReused,
    RunEnded,
    SequenceOutOfRange,
    SessionBusy,
)
from bough_server.runs.admission import request_digest
from bough_server.runs.close import policy_of, read_log
from bough_server.runs.commands import RemoteCommands
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.live import LiveRun
from bough_server.runs.supervisor import RunSupervisor
from bough_server.store.ports import Principal, RunMoved, RunRecord

_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswers:
    """What a resume changes: events to record, none where all is answered already; then `since` is where to follow."""

    fresh: Sequence[event_pb2.AgentEvent]
    since: int


def check_answers(
    request: agent_service_pb2.ResumeRunRequest, log: Sequence[event_pb2.AgentEvent], *, digest: str, user_id: str
) -> CheckedAnswers:
    """Checks every answer before any is taken. `log` is the run's without deltas.

    Raises InvalidRequest, AlreadyAnswered, RequestIdReused and RunEnded.
    """
    _check_unique(request.answers)
    asked = {event.input_requested.request.input_id: event for event in log if event.HasField("input_requested")}
    answered = {event.input_received.answer.input_id: event for event in log if event.HasField("input_received")}
    _check_repeated(request, answered.values(), digest)
    known = [answer for answer in request.answers if answer.input_id in answered]
    for answer in known:
        if not same_answer(answer, answered[answer.input_id].input_received.answer):
            raise AlreadyAnswered(
                f"The request {answer.input_id!r} has another answer; the first one stands.",
                details={"input_id": answer.input_id},
            )
    if len(known) == len(request.answers):
        return CheckedAnswers(fresh=(), since=_followed_from(log, [answered[answer.input_id] for answer in known]))
    if events.kind_of(log[-1]) in events.TERMINAL_KINDS:
        raise RunEnded("The run has ended: it takes no answers any more.", details={"run_id": request.run_id})
    _check_answers(request, asked, answered, log)
    fresh = [
        received(
            asked[answer.input_id],
            _from_caller(answer, user_id),
            request_id=request.request_id,
            request_digest=digest if request.request_id else "",
        )
        for answer in request.answers
        if answer.input_id not in answered
    ]
    return CheckedAnswers(fresh=fresh, since=log[-1].sequence)


def _check_unique(answers: Iterable[input_pb2.InputAnswer]) -> None:
    """Refuses an answer to a request that an answer before it is to."""
    seen: set[str] = set()
    wrong: list[FieldViolation] = []
    for index, answer in enumerate(answers):
        if answer.input_id in seen:
            said = "Another answer before it is to the same request."
            wrong.append(FieldViolation(field=f"answers[{index}].input_id", description=said))
        seen.add(answer.input_id)
    if wrong:
        raise InvalidRequest(wrong)


def _check_repeated(
    request: agent_service_pb2.ResumeRunRequest, answered: Iterable[event_pb2.AgentEvent], digest: str
) -> None:
    if not request.request_id:
        return
    for event in answered:
        known = event.input_received
        if known.request_id == request.request_id and known.request_digest != digest:
            raise RequestIdReused(
                f"The request id {request.request_id!r} brought other answers. Use a new one.",
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
            said = ["The run asks nothing of this id."]
        elif answer.input_id in answered:
            said = []
        elif answer.input_id not in is_open:
            said = ["What asked this has ended."]
        else:
            said = mistakes(event.input_requested.request, answer)
            field = f"answers[{index}].{answer.WhichOneof('answer') or 'answer'}"
        wrong += [FieldViolation(field=field, description=each) for each in said]
    if wrong:
        raise InvalidRequest(wrong)


def _from_caller(answer: input_pb2.InputAnswer, user_id: str) -> input_pb2.InputAnswer:
    taken = input_pb2.InputAnswer()
    taken.CopyFrom(answer)
    taken.source, taken.answered_by = input_pb2.ANSWER_SOURCE_CALLER, user_id
    return taken


def _followed_from(log: Sequence[event_pb2.AgentEvent], known: Sequence[event_pb2.AgentEvent]) -> int:
    """The sequence before the run_resumed that answers caused, or before themselves where the run was still going."""
    first = min(known, key=lambda event: event.sequence)
    for event in reversed([event for event in log if event.sequence < first.sequence]):
        if not _is_beside(event, first):
            is_cause = (
                event.run_resumed.cause == event_pb2.RESUME_CAUSE_ANSWER and event.record_time == first.record_time
            )
            return event.sequence - 1 if is_cause else first.sequence - 1
    return first.sequence - 1


def _is_beside(event: event_pb2.AgentEvent, answered: event_pb2.AgentEvent) -> bool:
    """Whether an event is another answer that was brought with this one: an append has one time."""
    one, other = event.input_received, answered.input_received
    is_same = (one.request_id, one.request_digest) == (
        other.request_id,
        other.request_digest,
    )
    return event.HasField("input_received") and is_same and event.record_time == answered.record_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run that was answered, and after which sequence to follow it."""

    record: RunRecord
    since: int


class RunResumer:
    """Takes answers from callers."""

    def __init__(self, equipment: RunDependencies, keeper: RunSupervisor, letters: RemoteCommands) -> None:
        self._equipment = equipment
        self._keeper = keeper
        self._letters = letters

    async def resume(
        self,
        principal: Principal,
        request: agent_service_pb2.ResumeRunRequest,
        *,
        deadline_time_ns: int | None,
    ) -> Resumed:
        """Checks all answers, records those that are new, and lets the run go on.

        Raises NotFound, InvalidRequest, SequenceOutOfRange, AlreadyAnswered, RunEnded, AgentUnusable (it is parked),
        RequestIdReused, ServerStopping and StorageFailed.
        """
        digest = request_digest(request)
        for _ in range(_TRIES):
            live = await self._keeper.roster.find(request.run_id)
            if live is not None and await self._is_leaving(live):
                continue
            record = await self._equipment.index.get(principal, request.run_id)
            await self._check_place(request)
            log = await read_log(self._equipment.log, request.run_id)
            verdict = check_answers(request, log, digest=digest, user_id=principal.user_id)
            if not verdict.fresh:
                return Resumed(record=record, since=verdict.since)
            if live is not None:
                since = await self._answer(live, verdict)
            elif await self._keeper.is_elsewhere(record):
                await self._letters.answer(
                    record, request, user_id=principal.user_id, deadline_time_ns=deadline_time_ns
                )
                continue
            else:
                is_background = policy_of(log).background
                since = await self._go_on(record, verdict, None if is_background else deadline_time_ns)
            if since is not None:
                return Resumed(record=record, since=since)
        details = {"run_id": request.run_id}
        raise SessionBusy("The run goes on and stops again at this moment. Try again.", details=details)

    async def _check_place(self, request: agent_service_pb2.ResumeRunRequest) -> None:
        """Refuses a stream that could not begin before anything is recorded."""
        if not request.after_sequence:
            return
        last = await self._equipment.log.last_sequence(request.run_id)
        if request.after_sequence > last:
            raise SequenceOutOfRange(
                f"The log of this run ends at sequence {last}; there is nothing after {request.after_sequence}.",
                details={"last_sequence": str(last)},
            )

    async def _is_leaving(self, live: LiveRun) -> bool:
        """Whether a run takes no answers here any more; waits until that is settled."""
        await live.lived()
        if live.is_over:
            await live.over()
            return True
        return False

    async def _answer(self, live: LiveRun, verdict: CheckedAnswers) -> int | None:
        """Records answers in a run that goes on; None where it does not wait for all of them any more."""
        execution = live.execution
        if not all(execution.waits_for(event) for event in verdict.fresh):
            await execution.writer.committed()  # then the log says who answered, or ended what asked
            return None
        for event in verdict.fresh:
            execution.answer(event)
        await execution.writer.committed()
        return min(event.sequence for event in verdict.fresh) - 1

    async def _go_on(self, record: RunRecord, verdict: CheckedAnswers, deadline_time_ns: int | None) -> int | None:
        try:
            await self._keeper.go_on(
                record, event_pb2.RESUME_CAUSE_ANSWER, answers=verdict.fresh, deadline_time_ns=deadline_time_ns
            )
        except (RunMoved, Fenced):
            return None
        except MissingVersion as missing:
            raise AgentUnusable(f"The run waits on, and takes no answers now: {missing}") from None
        return record.run.last_sequence
