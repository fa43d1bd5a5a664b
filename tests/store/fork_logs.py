"""Forks to put into a store; nothing here knows an implementation."""

from bough.v1 import event_pb2, fork_pb2
from bough_server.identity import Principal
from bough_server.store.ports.log import LogEvent, NewFork
from tests.store.logs import ANNE, Made


class Fork(Made):
    """A fork of which a test appends the rest: its root is the one that it shares."""

    root = ""

    def next(self, *batch: event_pb2.AgentEvent) -> list[LogEvent]:
        """The next records; events that name no invocation are of the root that is shared."""
        for event in batch:
            event.invocation_id = event.invocation_id or self.root
        return super().next(*batch)

    def of(
        self,
        origin: Made,
        sequence: int,
        *then: event_pb2.AgentEvent,
        changes: event_pb2.RunForked | None = None,
        principal: Principal = ANNE,
    ) -> NewFork:
        """The fork as a log is asked to accept it, with its own first events; `changes` go into its run_forked."""
        forked = event_pb2.RunForked(origin=fork_pb2.ForkOrigin(run_id=origin.run_id, sequence=sequence))
        forked.request_id, forked.request_digest = self.request_id, self.request_digest
        forked.MergeFrom(changes or event_pb2.RunForked())
        self.last_sequence = sequence
        self.root = origin.root if isinstance(origin, Fork) else origin.run_id
        event = event_pb2.AgentEvent(agent=origin.agent, run_forked=forked)
        return NewFork(
            run_id=self.run_id,
            principal=principal,
            session_id=self.session_id,
            origin_run_id=origin.run_id,
            origin_sequence=sequence,
            request_id=self.request_id,
            request_digest=self.request_digest,
            create_time_ns=self.create_time_ns,
            log_events=self.next(event, *then),
            definitions={one.description: one for one in self.definitions},
            owner="forker",
        )
