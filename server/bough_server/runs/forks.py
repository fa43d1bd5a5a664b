"""Accepts forks: the origin is read, the fork made durable with its session, and launched from the log they share."""

from bough.v1 import agent_service_pb2, event_pb2, fork_pb2
from bough_server import ids
from bough_server.agents.pinned import MissingVersion
from bough_server.errors import ForkRefused
from bough_server.runs.closing import as_records, read_log
from bough_server.runs.equipment import Equipment
from bough_server.runs.forking import Fork, fork_of
from bough_server.runs.live import LiveRun
from bough_server.runs.takeover import Takeover
from bough_server.store.ports import NewFork, Principal, RunRecord


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
        log = await read_log(equipment.log, request.run_id)
        try:
            fork = fork_of(
                request,
                log,
                last_sequence=await equipment.log.last_sequence(request.run_id),
                resolver=await self._takeover.resolver(log),
                digest=digest,
                deadline_time_ns=deadline_time_ns,
            )
            record = self._record(origin, request, fork, run_id, digest)
            records = as_records(fork.events, after=fork.origin_sequence, now_ns=equipment.clock.now_ns())
            await equipment.log.fork(
                NewFork(
                    run_id=run_id,
                    principal=principal,
                    session_id=record.run.session_id,
                    origin_run_id=request.run_id,
                    origin_sequence=fork.origin_sequence,
                    request_id=request.request_id,
                    request_digest=digest if request.request_id else "",
                    create_time_ns=record.run.create_time.ToNanoseconds(),
                    records=records,
                    definitions=fork.definitions,
                    owner=equipment.worker,
                )
            )
            return await self._takeover.launch(record, [*fork.shared, *fork.events])
        except MissingVersion as missing:
            raise ForkRefused(str(missing)) from None

    def _record(
        self, origin: RunRecord, request: agent_service_pb2.ForkRunRequest, fork: Fork, run_id: str, digest: str
    ) -> RunRecord:
        now = self._equipment.clock.now_ns()
        run = agent_service_pb2.Run(
            run_id=run_id,
            session_id=ids.new_uuid7(now),
            agent=origin.run.agent,
            state=event_pb2.STATE_RUNNING,
            labels=request.labels or origin.run.labels,
            last_sequence=fork.origin_sequence + len(fork.events),
            forked_from=fork_pb2.ForkOrigin(run_id=request.run_id, sequence=fork.origin_sequence),
        )
        run.create_time.FromNanoseconds(now)
        run.start_time.FromNanoseconds(now)
        return RunRecord(
            run=run, principal=origin.principal, epoch=1, request_digest=digest, owner=self._equipment.worker
        )
