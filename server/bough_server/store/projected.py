"""What a projection adds to the rows beside a log, as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough_server.run_state import RunStanding
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
    start_time_ns: int
    request_id: str
    request_digest: str
    revisions: tuple[str, ...]
    origin_run_id: str = ""
    """Of a fork: the run whose log it begins with."""
    origin_sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What the run's row takes from its last event; `error` is a serialized AgentError, None where there is none."""

    state: int
    end_time_ns: int
    error: bytes | None
    tree_usage: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """What some events of a run add to what is kept beside them."""

    start: RunStart | None
    messages: Sequence[StoredMessage]
    usage: Sequence[UsageEntry]
    end: RunEnd | None
    standing: RunStanding | None = None
    """Where the run stands, where that has changed and the end does not say it."""
    state_json: str | None = None
    """The session's state, empty for none; None where the events leave it as it is."""


NOTHING: Final = Projected(start=None, messages=(), usage=(), end=None)
