"""What a projection adds to the rows beside a log, as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough_server.run_state import RunState
from bough_server.store.ports import StoredMessage, UsageEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAddress:
    """What a log is of: fixed when its run is accepted, and in no event."""

    run_id: str
    tenant_id: str
    user_id: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What the run's row takes from its first event, and a fork's from its run_forked as well."""

    agent: str
    labels: dict[str, str]
    input_excerpt: str
    start_time_ns: int
    deadline_time_ns: int | None
    request_id: str
    request_digest: str
    revisions: tuple[str, ...]
    origin_run_id: str = ""
    """Of a fork: the run whose log it begins with."""
    origin_sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What the run's row takes from its last event; both messages are serialized, and `error` is None for none."""

    state: int
    end_time_ns: int
    error: bytes | None
    tree_usage: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """What some events of a run add to what is kept beside them."""

    start: RunStart | None
    messages: Sequence[StoredMessage]
    usage: Sequence[UsageEntry]
    end: RunEnd | None
    standing: RunState | None = None
    """Where the run stands, where that has changed and the end does not say it."""
    state_json: str | None = None
    """The session's state, empty for none; None where the events leave it as it is."""
    tree_usage: bytes | None = None
    """What the tree has used so far, a serialized Usage; None if the events add nothing to it."""
    begin_time_ns: int | None = None
    """When the run was given the session that it has waited for, if the events say that."""
    shared: Sequence[StoredMessage] = ()
    """Of a fork: what its run has said before it was one. The fork's session has them already when it is accepted."""


NOTHING: Final = Projected(start=None, messages=(), usage=(), end=None)
