"""Accepts forks: the origin is read, the fork made durable with its session, and launched from the log they share."""

from bough.v1 import agent_service_pb2, event_pb2, fork_pb2
from bough_server import ids
from bough_server.agents.pinned import MissingVersion
from bough_server.errors import ForkRefused
from bough_server.runs.closing import as_records, read_log
from bough_server.runs.equipment import Equipment
from bough_server.runs.forking import Cut, Fork, cut_of, fork_of
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
