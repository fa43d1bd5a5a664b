"""Brings answers to the runs that asked: to one that goes on here, to one that waits, to one of another worker."""

from dataclasses import dataclass

from bough.v1 import agent_service_pb2, event_pb2
from bough_server.agents.pinned import MissingVersion
from bough_server.errors import AgentUnusable, Fenced, SequenceOutOfRange, SessionBusy
from bough_server.runs.admission import request_digest
from bough_server.runs.closing import read_log
from bough_server.runs.equipment import Equipment
from bough_server.runs.keeping import Keeper
from bough_server.runs.letters import Letters
from bough_server.runs.live import LiveRun
from bough_server.runs.resuming import Verdict, judged
from bough_server.store.ports import Principal, RunMoved, RunRecord

_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run that was answered, and after which sequence to follow it."""

    record: RunRecord
    since: int


class Answering:
    """Takes answers from callers."""

    def __init__(self, equipment: Equipment, keeper: Keeper, letters: Letters) -> None:
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
            verdict = judged(request, log, digest=digest, user_id=principal.user_id)
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
                is_background = log[0].run_started.policy.background
                since = await self._go_on(record, verdict, None if is_background else deadline_time_ns)
            if since is not None:
                return Resumed(record=record, since=since)
        raise SessionBusy("The run goes on and stops again at this moment. Try again.")

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

    async def _answer(self, live: LiveRun, verdict: Verdict) -> int | None:
        """Records answers in a run that goes on; None where it does not wait for all of them any more."""
        execution = live.execution
        if not all(execution.waits_for(event) for event in verdict.fresh):
            await execution.committed()  # then the log says who answered, or ended what asked
            return None
        for event in verdict.fresh:
            execution.answer(event)
        await execution.committed()
        return min(event.sequence for event in verdict.fresh) - 1

    async def _go_on(self, record: RunRecord, verdict: Verdict, deadline_time_ns: int | None) -> int | None:
        try:
            await self._keeper.go_on(
                record, event_pb2.RESUME_CAUSE_ANSWER, answers=verdict.fresh, deadline_time_ns=deadline_time_ns
            )
        except (RunMoved, Fenced):
            return None
        except MissingVersion as missing:
            raise AgentUnusable(f"The run waits on, and takes no answers now: {missing}") from None
        return record.run.last_sequence
