"""What a store is asked to accept as a run, and why it may not take it; accepting it is the implementation's."""

from collections.abc import Sequence
from dataclasses import dataclass

from bough.v1 import agent_pb2
from bough_server.store.ports import Principal, Record


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be accepted, with everything that is written in the one transaction of its run_started."""

    run_id: str
    principal: Principal
    session_id: str
    new_session: bool
    session_cut: int
    """The session's last position that run_started names; refused with SessionMoved where it is another by now."""
    state_json: str = ""
    """The session's state that run_started names; the same holds of it."""
    request_id: str
    request_digest: str
    create_time_ns: int
    first: Record
    definitions: Sequence[agent_pb2.AgentDefinition] = ()
    """The definitions that run_started names, each with its revision; kept once by revision."""
    owner: str = ""
    """The worker that executes it from the start."""
    queued: Record | None = None
    """The second event, run_queued, of a run that waits for its session: then `session_cut` is 0, the state is empty,
    and neither is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFork:
    """A fork to be accepted, with everything that is written in its one transaction.

    Its log begins with the origin's events up to `origin_sequence`, byte for byte; `records` are its own first, from
    run_forked. Its session is a new one, with the messages that the origin's run could see or had said by then.
    """

    run_id: str
    principal: Principal
    session_id: str
    origin_run_id: str
    origin_sequence: int
    request_id: str
    request_digest: str
    create_time_ns: int
    records: Sequence[Record]
    definitions: Sequence[agent_pb2.AgentDefinition] = ()
    """Those that run_forked names; those of the origin are kept for the fork as well."""
    owner: str = ""


class SessionMoved(Exception):
    """The session has other messages or another state than the NewRun says: read it again and try again."""


class RunMoved(Exception):
    """A run's log or owner is another by now than the caller read: read it again and try again."""


class RequestIdTaken(Exception):
    """The tenant used this request id before; says for which run and with which content."""

    def __init__(self, run_id: str, request_digest: str) -> None:
        super().__init__(run_id)
        self.run_id, self.request_digest = run_id, request_digest
