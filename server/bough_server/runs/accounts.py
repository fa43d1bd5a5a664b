"""Accounts: what runs may spend of a balance that they share with other runs, here and on other servers."""

from collections.abc import Sequence
from typing import Final, Literal

from bough.v1 import error_pb2, event_pb2
from bough_server.clock import Clock
from bough_server.engine.limits import Amount
from bough_server.errors import InsufficientBalance, RunError
from bough_server.identity import OWN_USERS, Principal
from bough_server.log import events
from bough_server.log.charges import ChargeFold
from bough_server.observability.metrics import Metrics
from bough_server.runs.shared_amounts import SharedAmount, SharedAmounts
from bough_server.store.ports.accounts import AccountKey, AccountStore, AccountSums

_DAY_NS: Final = 86_400_000_000_000

Per = Literal["user", "tenant"]


class Accounts:
    """The accounts of a server: `per` says whose they are; they are in the currency of all prices."""

    def __init__(
        self,
        store: AccountStore,
        *,
        per: Per,
        currency_code: str,
        worker: str,
        clock: Clock,
        metrics: Metrics | None = None,
    ) -> None:
        self.per, self.currency_code, self._worker = per, currency_code, worker
        self._store, self._clock, self._metrics = store, clock, metrics
        self._amounts = SharedAmounts(self._read_balances, clock)
        self._summed_from_ns: dict[AccountKey, int] = {}
        """From when on the charges of the accounts in use were added up, as far as they have begun."""

    def key_of(self, principal: Principal) -> AccountKey | None:
        """Return the account that pays for a principal's runs; None if they are free: those of the server's users."""
        if self.per == "tenant":
            return self.key(principal.tenant_id)
        return None if principal.user_id.startswith(OWN_USERS) else self.key(principal.tenant_id, principal.user_id)

    def key(self, tenant_id: str, user_id: str = "") -> AccountKey:
        """Return the key of an account."""
        return AccountKey(tenant_id=tenant_id, user_id=user_id, currency_code=self.currency_code)

    async def check_start(self, principal: Principal) -> None:
        """Raise InsufficientBalance if nothing is left for a principal's run. Raises StorageFailed."""
        key = self.key_of(principal)
        if key is None:
            return
        account = await self._amounts.get_fresh(key, 1)
        if account.lacks(1):
            self._count_refusal()
            raise InsufficientBalance(
                f"Nothing is left of the account {_describe(key)}: its balance is {_amount(account)}. Add to it, then "
                "call again."
            )

    def open(self, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> "AccountOfRun | None":
        """Return the account of a run that is to be executed here, from its log; close it when the run has ended."""
        key = self.key_of(principal)
        return None if key is None else AccountOfRun(self, self._amounts.get(key), log)

    async def read(self, key: AccountKey) -> AccountSums:
        """Return the sums of an account, with what all model calls have reserved of it. Raises StorageFailed."""
        (sums,) = await self._store.read_sums([key])
        return sums

    async def refresh(self, key: AccountKey) -> None:
        """Read a balance that was changed, if runs here use it. Raises StorageFailed."""
        await self._amounts.refresh(key)

    async def prepare(self, account: SharedAmount[AccountKey], nanos: int) -> None:
        """Read what is left, if it is unknown or seems to be too little for an amount: a refusal is final."""
        await self._amounts.prepare(account, nanos)

    async def watch(self) -> None:
        """Read the balances of the accounts in use once a second, until cancelled, and take the snapshots due."""
        await self._amounts.watch(self._take_snapshots)

    async def refresh_all(self) -> None:
        """Read the balances of all accounts in use, and take the snapshots that are due. Raises StorageFailed."""
        await self._amounts.refresh_all()
        await self._take_snapshots()

    async def close(self) -> None:
        """Wait for reads in progress."""
        await self._amounts.close()

    async def _read_balances(self, keys: Sequence[AccountKey]) -> Sequence[int]:
        """Return balances less what runs of other servers have reserved."""
        found = await self._store.read_sums(keys, but_worker=self._worker)
        for key, sums in zip(keys, found, strict=True):
            if sums.summed_from_ns is not None:
                self._summed_from_ns[key] = sums.summed_from_ns
        return [sums.balance_nanos - sums.reserved_nanos for sums in found]

    async def _take_snapshots(self) -> None:
        # A day is over for good once it has been for a day: clocks of servers differ, and appends may wait.
        due_ns = (self._clock.now_ns() - _DAY_NS) // _DAY_NS * _DAY_NS
        known, self._summed_from_ns = self._summed_from_ns, {}
        for key, summed_from_ns in known.items():
            if summed_from_ns < due_ns:
                await self._store.take_snapshot(key, before_ns=due_ns)

    def build_error(self, account: SharedAmount[AccountKey], nanos: int) -> RunError:
        """Return the error of a model call for which too little is left, and count it."""
        self._count_refusal()
        return RunError(
            f"Too little is left of the account {_describe(account.key)}: {_amount(account)}, and the call may cost "
            f"{nanos} billionths. Add to the account.",
            reason=error_pb2.ERROR_REASON_INSUFFICIENT_BALANCE,
        )

    def _count_refusal(self) -> None:
        if self._metrics is not None:
            self._metrics.on_balance_refusal()


def _describe(key: AccountKey) -> str:
    return f"of the user {key.user_id!r}" if key.user_id else f"of the tenant {key.tenant_id!r}"


def _amount(account: SharedAmount[AccountKey]) -> str:
    return f"{account.left} billionths of {account.key.currency_code}"


class AccountOfRun:
    """The account that pays for one run, as a SharedLimit."""

    def __init__(
        self, accounts: Accounts, account: SharedAmount[AccountKey], log: Sequence[event_pb2.AgentEvent]
    ) -> None:
        self._accounts, self._account = accounts, account
        self._charges = ChargeFold()
        self._held: dict[str, int] = {}
        """Effect of a model call in flight to what it has reserved of the account."""
        self._uncommitted: dict[int, int] = {}
        """Sequence of an end that is not committed yet to its charge."""
        account.users += 1
        for event in log:
            self._charges.apply(event, events.kind_of(event))
        for key in self._charges.open_calls():
            self._hold(key)

    async def prepare(self, amount: Amount) -> None:
        """See SharedLimit."""
        await self._accounts.prepare(self._account, amount.cost_nanos)

    def check(self, amount: Amount) -> None:
        """See SharedLimit."""
        if self._account.lacks(amount.cost_nanos):
            raise self._accounts.build_error(self._account, amount.cost_nanos)

    def on_record(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """See SharedLimit."""
        charge = self._charges.apply(event, kind)
        if charge is None:
            self._hold(event.effect_key)
            return
        nanos = charge.nanos if charge.currency_code == self._account.key.currency_code else 0
        self._uncommitted[event.sequence] = nanos
        self._account.charge(nanos)
        if kind != events.LLM_RETRYING:
            self._account.reserved -= self._held.pop(event.effect_key, 0)

    def on_commit(self, sequence: int) -> None:
        """See SharedLimit."""
        self._account.commit(self._uncommitted.pop(sequence, 0))

    def close(self) -> None:
        """See SharedLimit."""
        self._account.reserved -= sum(self._held.values())
        self._held.clear()
        self._account.forget(sum(self._uncommitted.values()))
        self._uncommitted.clear()
        self._account.users -= 1

    def _hold(self, key: str) -> None:
        self._held[key] = self._charges.get_reserved_nanos(key)
        self._account.reserved += self._held[key]
