"""Quotas: what a tenant and each of its users may start and use."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from bough.v1 import error_pb2, event_pb2, usage_pb2
from bough_server.clock import Clock
from bough_server.engine.limits import Amount
from bough_server.errors import RunError
from bough_server.identity import Principal
from bough_server.log import events
from bough_server.log.charges import Charge, ChargeFold, usage_of
from bough_server.log.usage import count_tokens
from bough_server.observability.metrics import Metrics
from bough_server.quotas import Quota, QuotaExceeded, QuotaName, Quotas, describe_quota
from bough_server.runs.shared_amounts import SharedAmount, SharedAmounts
from bough_server.store.ports.usage import RunCounter, UsageLedger

_TOKENS: Final[QuotaName] = "tokens_per_day"
_COST: Final[QuotaName] = "cost_nanos_per_month"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPeriod:
    """A quota of tokens or of cost in one of its days or months."""

    quota: Quota
    name: QuotaName
    begin_ns: int
    end_ns: int

    @property
    def limit(self) -> int:
        """The most that may be used in it."""
        limit: int = getattr(self.quota.limits, self.name)
        return limit


def list_periods(quotas: Sequence[Quota], now_ns: int) -> list[QuotaPeriod]:
    """Return the periods, in UTC, of the quotas of tokens and of cost at a time."""
    if not quotas:
        return []
    now = datetime.fromtimestamp(now_ns // 10**9, UTC)
    day = now.replace(hour=0, minute=0, second=0)
    month = day.replace(day=1)
    bounds = {_TOKENS: (day, day + timedelta(days=1)), _COST: (month, (month + timedelta(days=31)).replace(day=1))}
    return [
        QuotaPeriod(
            quota=quota, name=name, begin_ns=int(begin.timestamp()) * 10**9, end_ns=int(end.timestamp()) * 10**9
        )
        for quota in quotas
        for name, (begin, end) in bounds.items()
        if getattr(quota.limits, name) is not None
    ]


class RunQuotas:
    """The quotas of all tenants, as this server applies them to runs."""

    def __init__(
        self,
        quotas: Quotas,
        ledger: UsageLedger,
        counter: RunCounter,
        *,
        currency_code: str,
        worker: str,
        clock: Clock,
        metrics: Metrics | None = None,
    ) -> None:
        """`currency_code` is the currency of all prices, `worker` the name under which this server owns runs."""
        self._quotas, self._ledger, self._counter, self._metrics = quotas, ledger, counter, metrics
        self.currency_code, self._worker, self.clock = currency_code, worker, clock
        self.amounts = SharedAmounts(self._read_rests, clock)
        """What is left of quotas of tokens and of cost."""

    def find_on_starts(self, principal: Principal) -> Sequence[Quota]:
        """Return the quotas that are checked in the transaction that creates a run."""
        return self._quotas.find_on_starts(principal)

    def list_periods(self, principal: Principal, time_ns: int) -> Sequence[QuotaPeriod]:
        """Return the periods of the quotas on what a principal's runs use at a time."""
        return list_periods(self._quotas.find(principal), time_ns)

    async def check_start(self, principal: Principal) -> None:
        """Raise QuotaExceeded if nothing is left of a quota of tokens or cost. Raises StorageFailed."""
        now_ns = self.clock.now_ns()
        for period in self.list_periods(principal, now_ns):
            if (await self.amounts.get_fresh(period, 1)).lacks(1):
                error = QuotaExceeded(period.quota, period.name, retry_delay=(period.end_ns - now_ns) / 1e9)
                self.count_refusal(error.name)
                raise error

    def open(self, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> "QuotasOfRun | None":
        """Return the quotas of a run that is to be executed here, from its log; close them when the run has ended."""
        if not self.list_periods(principal, self.clock.now_ns()):
            return None
        return QuotasOfRun(self, principal, log)

    def count_refusal(self, name: QuotaName) -> None:
        """Count a run or a model call that a quota does not allow."""
        if self._metrics is not None:
            self._metrics.on_quota_refusal(name)

    async def list_statuses(
        self, tenant_id: str, user_id: str, *, with_tenant: bool
    ) -> Sequence[usage_pb2.QuotaStatus]:
        """Return the quotas of a user and, if asked for, those of its tenant first. Raises StorageFailed."""
        found = self._quotas.find(Principal(tenant_id=tenant_id, user_id=user_id))
        shown = [quota for quota in found if with_tenant or quota.user_id is not None]
        return [status for quota in shown for status in await self._read_statuses(quota)]

    async def _read_statuses(self, quota: Quota) -> Sequence[usage_pb2.QuotaStatus]:
        now_ns = self.clock.now_ns()
        counts = await self._counter.count_runs(quota, now_ns=now_ns)
        used: dict[QuotaName, tuple[int, int | None]] = {
            "concurrent_runs": (counts.concurrent, None),
            "runs_per_minute": (counts.started, counts.next_leave_ns),
        }
        for period in list_periods([quota], now_ns):
            used[period.name] = await self._sum_usage(period), period.end_ns
        return [
            self._build_status(quota, name, *used[name]) for name in used if getattr(quota.limits, name) is not None
        ]

    def _build_status(self, quota: Quota, name: QuotaName, used: int, reset_ns: int | None) -> usage_pb2.QuotaStatus:
        status = usage_pb2.QuotaStatus(
            kind=usage_pb2.QuotaKind.Value(f"QUOTA_KIND_{name.upper()}"),
            user_id=quota.user_id or "",
            limit=getattr(quota.limits, name),
            used=used,
            currency_code=self.currency_code if name == _COST else "",
        )
        if reset_ns is not None:
            status.reset_time.FromNanoseconds(reset_ns)
        return status

    async def _read_rests(self, periods: Sequence[QuotaPeriod]) -> Sequence[int]:
        return [
            period.limit - await self._sum_usage(period) - await self._sum_reservations(period) for period in periods
        ]

    async def _sum_reservations(self, period: QuotaPeriod) -> int:
        """Return what runs of other servers have reserved, which is known of costs only."""
        if period.name != _COST:
            return 0
        return await self._counter.sum_reservations(period.quota, but_worker=self._worker)

    async def _sum_usage(self, period: QuotaPeriod) -> int:
        quota = period.quota
        totals = await self._ledger.sum_lines(
            quota.tenant_id, user_id=quota.user_id, from_ns=period.begin_ns, before_ns=period.end_ns
        )
        return totals.tokens if period.name == _TOKENS else totals.charges.get(self.currency_code, 0)


_Shares = Sequence[tuple[SharedAmount[QuotaPeriod], int]]
"""Amounts, each with what one model call holds or has used of it."""


class QuotasOfRun:
    """The quotas of tokens and cost of one run, as a SharedLimit."""

    def __init__(self, quotas: RunQuotas, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> None:
        self._quotas, self._principal = quotas, principal
        self._charges = ChargeFold()
        self._held: dict[str, _Shares] = {}
        """Effect of a model call in flight to what it has reserved."""
        self._uncommitted: dict[int, _Shares] = {}
        """Sequence of an end that is not committed yet to what the attempt has used."""
        self._amounts: Sequence[SharedAmount[QuotaPeriod]] = ()
        started: dict[str, event_pb2.AgentEvent] = {}
        for event in log:
            kind = events.kind_of(event)
            self._charges.apply(event, kind)
            if kind == events.LLM_STARTED:
                started[event.effect_key] = event
            elif kind in (events.LLM_COMPLETED, events.LLM_FAILED):
                started.pop(event.effect_key, None)
        for event in started.values():
            self._hold(event)

    async def prepare(self, amount: Amount) -> None:
        """See SharedLimit."""
        for shared in self._use_current():
            await self._quotas.amounts.prepare(shared, _select(shared.key, amount.tokens, amount.cost_nanos))

    def check(self, amount: Amount) -> None:
        """See SharedLimit."""
        for shared in self._use_current():
            needed = _select(shared.key, amount.tokens, amount.cost_nanos)
            if shared.lacks(needed):
                self._quotas.count_refusal(shared.key.name)
                raise _build_error(shared, needed)

    def on_record(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """See SharedLimit."""
        charge = self._charges.apply(event, kind)
        if charge is None:
            self._hold(event)
            return
        if kind != events.LLM_RETRYING:
            self._release(self._held.pop(event.effect_key, ()))
        self._uncommitted[event.sequence] = shares = self._build_shares(event, kind, charge)
        for shared, used in shares:
            shared.charge(used)

    def on_commit(self, sequence: int) -> None:
        """See SharedLimit."""
        for shared, used in self._uncommitted.pop(sequence, ()):
            shared.commit(used)

    def close(self) -> None:
        """See SharedLimit."""
        for held in self._held.values():
            self._release(held)
        for shares in self._uncommitted.values():
            for shared, used in shares:
                shared.forget(used)
        self._held.clear()
        self._uncommitted.clear()
        self._use(())

    def _use_current(self) -> Sequence[SharedAmount[QuotaPeriod]]:
        """Return what is left of the quotas of this moment; from then on they are read once a second."""
        periods = self._quotas.list_periods(self._principal, self._quotas.clock.now_ns())
        if [shared.key for shared in self._amounts] != periods:
            self._use([self._quotas.amounts.get(period) for period in periods])
        return self._amounts

    def _use(self, amounts: Sequence[SharedAmount[QuotaPeriod]]) -> None:
        for shared in amounts:
            shared.users += 1
        for shared in self._amounts:
            shared.users -= 1
        self._amounts = amounts

    def _hold(self, event: event_pb2.AgentEvent) -> None:
        """Reserve what the model call of a start has reserved."""
        started = event.llm_started
        held = [
            (shared, _select(shared.key, started.reserved_tokens, started.reserved_cost_nanos))
            for shared in self._use_current()
        ]
        for shared, reserved in held:
            shared.reserved += reserved
        self._held[event.effect_key] = held

    def _release(self, held: _Shares) -> None:
        for shared, reserved in held:
            shared.reserved -= reserved

    def _build_shares(self, event: event_pb2.AgentEvent, kind: int, charge: Charge) -> _Shares:
        """Return what the attempt that ends with an event has used of each quota: of its day and its month."""
        quotas, tokens = self._quotas, count_tokens(usage_of(event, kind))
        nanos = charge.nanos if charge.currency_code == quotas.currency_code else 0
        periods = quotas.list_periods(self._principal, event.record_time.ToNanoseconds())
        return [(quotas.amounts.get(period), _select(period, tokens, nanos)) for period in periods]


def _select(period: QuotaPeriod, tokens: int, nanos: int) -> int:
    """Return that one of two numbers which is in the unit of a quota."""
    return tokens if period.name == _TOKENS else nanos


def _build_error(shared: SharedAmount[QuotaPeriod], needed: int) -> RunError:
    left = max(0, shared.left or 0)
    return RunError(
        f"Too little is left of {describe_quota(shared.key.quota, shared.key.name)}: {left:,}, and the call may take "
        f"{needed:,}.",
        reason=error_pb2.ERROR_REASON_QUOTA_EXCEEDED,
    )
