"""Results of projecting events: the values to write to the tables derived from a log."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1.evaluation_ref_pb2 import EvaluationRef
from bough_server.log.run_state import RunState
from bough_server.store.ports.sessions import StoredCall, StoredMessage
from bough_server.store.ports.usage import UsageLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAddress:
    """Run, tenant, user and session of a log; fixed when the run is created, and recorded in no event.

    Of an evaluation's log, `run_id` is the evaluation, and there is no session.
    """

    run_id: str
    tenant_id: str
    user_id: str
    session_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Columns of a row that come from the first event of its log and, for a fork, from run_forked."""

    agent: str
    labels: dict[str, str]
    input_excerpt: str
    start_time_ns: int
    deadline_time_ns: int | None
    request_id: str
    request_digest: str
    revisions: tuple[str, ...]
    origin_run_id: str = ""
    """For a fork: the run whose log it begins with."""
    origin_sequence: int = 0
    evaluation: EvaluationRef | None = None
    """Of a run: what it is in the evaluation that started it."""
    eval_set_name: str = ""
    """Of an evaluation: its set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Columns of a row that come from the terminal event; `error` and `tree_usage` are serialized messages."""

    state: int
    end_time_ns: int
    error: bytes | None
    tree_usage: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationChange:
    """New values of the columns that only evaluations use."""

    totals: bytes
    """The numbers so far, a serialized EvalTotals."""
    verdict: int
    """The verdict, a Verdict; 0 until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Changes to the derived tables that some events of a log cause."""

    start: RunStart | None
    messages: Sequence[StoredMessage]
    usage: Sequence[UsageLine]
    end: RunEnd | None
    run_state: RunState | None = None
    """The run's new state; None if it has not changed or `end` says it."""
    state_json: str | None = None
    """The new session state, empty if it has no values; None if the events do not change it."""
    tree_usage: bytes | None = None
    """The tree's usage so far, a serialized Usage; None if the events change neither it nor `reserved_nanos`."""
    reserved_nanos: int = 0
    """What the run's model calls in flight have reserved, in billionths of the prices' currency."""
    begin_time_ns: int | None = None
    """When the run left the queue of its session; None if it did not within these events."""
    shared: Sequence[StoredMessage] = ()
    """For a fork: the run's messages from before the fork point. Creating a fork copies them to its session, so only a
    rebuild writes them."""
    calls: Sequence[StoredCall] = ()
    """Calls of linked agents and their results, which are not among `messages`."""
    shared_calls: Sequence[StoredCall] = ()
    """For a fork: the run's calls from before the fork point, as `shared`."""
    evaluation: EvaluationChange | None = None
    """The new numbers of an evaluation; None if the events do not change them, and for runs."""

    @property
    def changes_session(self) -> bool:
        """True if the row of the session changes with them."""
        moves = self.end is not None or self.begin_time_ns is not None
        return moves or self.state_json is not None or bool(self.messages)


NOTHING: Final = Projected(start=None, messages=(), usage=(), end=None)
