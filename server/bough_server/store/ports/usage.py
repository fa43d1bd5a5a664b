"""Ports of the store for the usage ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from bough.v1 import usage_pb2
from bough_server.identity import Scope
from bough_server.log.charges import NOTHING, Charge
from bough_server.quotas import Quota
from bough_server.store.ports.runs import Page


class LineKind(IntEnum):
    """What a line of the ledger says happened."""

    ATTEMPT = 0
    """An attempt of a model call was sent and has ended."""
    START = 1
    """A run started, by `run_started` or, a fork, by `run_forked`; it used nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """A line of the ledger, keyed by its run and the sequence of the event that says it."""

    run_id: str
    sequence: int
    tenant_id: str
    user_id: str
    session_id: str
    agent: str
    invocation_id: str
    model: str
    time_ns: int
    usage: usage_pb2.Usage
    kind: LineKind = LineKind.ATTEMPT
    charge: Charge = NOTHING

    @property
    def is_estimated(self) -> bool:
        """True if the charge is what the call had reserved, because no cost is known."""
        return self.charge.nanos > 0 and not self.usage.HasField("cost_nanos")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Sums over lines of the ledger."""

    starts: int = 0
    """How many runs started."""
    tokens: int = 0
    """Input and output tokens, as far as providers reported them."""
    charges: Mapping[str, int] = field(default_factory=dict)
    """Charges in billionths of each currency; currencies without a charge are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFilter:
    """Conditions on lines of the ledger; an empty field is no condition.

    Times are nanoseconds since the Unix epoch; `before_ns` is exclusive.
    """

    user_id: str = ""
    session_id: str = ""
    run_id: str = ""
    invocation_id: str = ""
    agent: str = ""
    model: str = ""
    from_ns: int | None = None
    before_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCounts:
    """The runs of a quota's tenant or user."""

    concurrent: int
    """Those that are queued or executed."""
    started: int
    """Those that started within a minute."""
    next_leave_ns: int | None
    """When the oldest start leaves that minute, in nanoseconds since the Unix epoch; None if there is none."""


class RunCounter(Protocol):
    """Counts of the runs of a quota's tenant or user, as quotas on them are checked."""

    async def count_runs(self, quota: Quota, *, now_ns: int) -> RunCounts:
        """Return the runs of a quota's tenant or user at a time in nanoseconds since the Unix epoch."""
        ...

    async def sum_reservations(self, quota: Quota, *, but_worker: str) -> int:
        """Return what model calls in flight have reserved of costs, those of runs of one worker left out."""
        ...


class UsageLedger(Protocol):
    """Lines of the ledger: one for each attempt that was sent to a model, and one for each start of a run.

    EventLog writes them, in the transactions of the events that say them. They outlive their runs and sessions.
    """

    async def list_for_run(self, run_id: str) -> Sequence[UsageLine]:
        """Return the lines of a run's attempts, ordered by sequence."""
        ...

    async def sum_lines(
        self, tenant_id: str, *, user_id: str | None = None, from_ns: int, before_ns: int | None = None
    ) -> UsageTotals:
        """Return the sums over a tenant's lines, or over one user's, by the times of their events.

        Times are nanoseconds since the Unix epoch; `before_ns` is exclusive, None for no bound.
        """
        ...

    async def list_groups(
        self,
        scope: Scope,
        usage_filter: UsageFilter,
        group_by: Sequence[usage_pb2.UsageDimension.ValueType],
        page: Page,
    ) -> tuple[Sequence[usage_pb2.UsageGroup], str]:
        """Return a page of the sums over a scope's lines, in the order of the fields of UsageGroup.

        Also return the token of the next page, empty after the last. Raises InvalidRequest for a token that is not from
        this list with these filters.
        """
        ...

    async def list_attempts(
        self, scope: Scope, usage_filter: UsageFilter, page: Page
    ) -> tuple[Sequence[UsageLine], str]:
        """Return a page of the lines of attempts, newest first, and the token of the next page, as `list_groups`."""
        ...
