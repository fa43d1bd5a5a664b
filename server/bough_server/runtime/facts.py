"""What a run is before it does anything: its ids, its first event, the session as it found it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bough.v1 import event_pb2
from bough_server.store.ports import StoredMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run is: its ids, its first event, and the session as it was when it began."""

    run_id: str
    session_id: str
    user_id: str
    started: event_pb2.AgentEvent
    session: Sequence[StoredMessage] = ()

    @property
    def key_root(self) -> str:
        """The UUID that the run's ids are derived from."""
        return self.started.run_started.key_root
