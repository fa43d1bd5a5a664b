"""Accounts: what runs may spend of a balance that they share with other runs, here and on other servers.

The store has no row that runs change: a balance is a sum. This server adds the charges and reservations of the runs
that it executes to the sum that it read last, and reads the sums of the accounts that its runs use once a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Literal

from bough.v1 import error_pb2, event_pb2
from bough_server.clock import Clock
from bough_server.engine.limits import Amount
from bough_server.errors import InsufficientBalance, RunError, StorageFailed
from bough_server.identity import OWN_USERS, Principal
from bough_server.log import events
from bough_server.log.charges import ChargeFold
from bough_server.observability.metrics import Metrics
from bough_server.store.ports.accounts import AccountKey, AccountStore, AccountSums

REFRESH_SECONDS: Final = 1.0
"""How often the balances of the accounts in use are read: so long another server may not know of a charge."""

_DAY_NS: Final = 86_400_000_000_000

MAX_QUIET_SECONDS: Final = 0.05
"""How long a read that decides about a refusal waits for commits of charges, which the sum may hold or not."""

_MAX_READS: Final = 3
"""How often a sum is read again because charges were committed meanwhile, which it may hold or not."""

Per = Literal["user", "tenant"]


class AccountBalance:
    """The balance of one account, as this server knows it."""

    def __init__(self, key: AccountKey) -> None:
        self.key = key
        self.users = 0
        """How many live runs use it."""
        self.reserved_nanos = 0
        """What the model calls in flight here have reserved."""
        self._balance: int | None = None
        """The balance as it was read last, less what runs of other servers had reserved."""
        self._charged_before = 0
        """What had been charged here when the read of that balance began."""
        self._charged = 0
        """What has been charged here and is committed, since this account is known."""
        self._uncommitted = 0
        """What has been charged here and is not committed yet."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._reads = self._applied = 0
        self._reading: asyncio.Task[None] | None = None

    @property
    def left_nanos(self) -> int | None:
        """What is left for further model calls; None if it is not known yet.

        It can be too low: charges of the last moments may count twice until the next read.
        """
        if self._balance is None:
            return None
        charged = self._charged - self._charged_before + self._uncommitted
        return self._balance - charged - self.reserved_nanos

    def lacks(self, nanos: int) -> bool:
        """Return True if less than an amount is left, or it is not known what is."""
        left = self.left_nanos
        return left is None or left < nanos

    def charge(self, nanos: int) -> None:
        """Count a charge whose event is recorded."""
        self._add_pending(nanos)

    def commit(self, nanos: int) -> None:
        """Note that the event of a charge is committed."""
        self._add_pending(-nanos)
        self._charged += nanos

    def forget(self, nanos: int) -> None:
        """Forget charges of which it is not known whether they are committed: the next read tells."""
        self._add_pending(-nanos)

    def _add_pending(self, nanos: int) -> None:
        self._uncommitted += nanos
        if self._uncommitted:
            self._is_quiet.clear()
        else:
            self._is_quiet.set()

    async def wait_until_quiet(self) -> None:
        """Wait until no charge is being committed here, for MAX_QUIET_SECONDS at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_QUIET_SECONDS):
                await self._is_quiet.wait()

    def begin_read(self) -> Callable[[AccountSums], bool]:
        """Return what applies the sums that a read which begins now returns.

        It returns whether they are exact: no charge was being committed here during the read.
        """
        self._reads += 1
        number, charged, was_quiet = self._reads, self._charged, not self._uncommitted

        def apply(sums: AccountSums) -> bool:
            if number > self._applied:  # else a read that began later was faster
                balance = sums.balance_nanos - sums.reserved_nanos
                self._applied, self._balance, self._charged_before = number, balance, charged
            return was_quiet and self._charged == charged

        return apply

    async def share_read(self, read: Callable[["AccountBalance"], Awaitable[None]]) -> None:
        """Read what is left; callers at the same time share one read, which is not cancelled with one of them.

        The read begins after the call: one in progress may not hold what was paid before it.
        """
        earlier = self._reading
        if earlier is not None:
            await asyncio.wait({earlier})
        if self._reading is earlier or self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(_await(read(self)))
        await asyncio.shield(self._reading)

    async def close(self) -> None:
        """Wait for a read in progress."""
        if self._reading is not None:
            await asyncio.wait({self._reading})


async def _await(reading: Awaitable[None]) -> None:
    await reading


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
        self._accounts: dict[AccountKey, AccountBalance] = {}

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
        account = self._get(key)
        if account.lacks(1):
            await account.share_read(self._read_exactly)
        if account.lacks(1):
            self._count_refusal()
            raise InsufficientBalance(
                f"Nothing is left of the account {_describe(key)}: its balance is {_amount(account)}. Add to it, then "
                "call again."
            )

    def open(self, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> "AccountOfRun | None":
        """Return the account of a run that is to be executed here, from its log; close it when the run has ended."""
        key = self.key_of(principal)
        return None if key is None else AccountOfRun(self, self._get(key), log)

    async def read(self, key: AccountKey) -> AccountSums:
        """Return the sums of an account, with what all model calls have reserved of it. Raises StorageFailed."""
        (sums,) = await self._store.read_sums([key])
        return sums

    async def refresh(self, key: AccountKey) -> None:
        """Read a balance that was changed, if runs here use it. Raises StorageFailed."""
        if (account := self._accounts.get(key)) is not None:
            await self._read_exactly(account)

    async def prepare(self, account: AccountBalance, nanos: int) -> None:
        """Read what is left, if it is unknown or seems to be too little for an amount: a refusal is final."""
        while account.lacks(nanos):
            try:
                await account.share_read(self._read_exactly)
                return
            except StorageFailed:  # which cannot be written either: the model call would have to wait as well
                await self._clock.sleep(REFRESH_SECONDS)

    async def watch(self) -> None:
        """Read the balances of the accounts in use once a second, until cancelled."""
        while True:
            await self._clock.sleep(REFRESH_SECONDS)
            for account in [each for each in self._accounts.values() if not each.users]:
                del self._accounts[account.key]
            with suppress(StorageFailed):  # it has been logged; what is known here is true until then
                await self.refresh_all()

    async def refresh_all(self) -> None:
        """Read the balances of all accounts in use, and take the snapshots that are due. Raises StorageFailed."""
        used = list(self._accounts.values())
        if not used:
            return
        applies = [account.begin_read() for account in used]
        found = await self._store.read_sums([account.key for account in used], but_worker=self._worker)
        for apply, sums in zip(applies, found, strict=True):
            apply(sums)
        # A day is over for good once it has been for a day: clocks of servers differ, and appends may wait.
        due_ns = (self._clock.now_ns() - _DAY_NS) // _DAY_NS * _DAY_NS
        for account, sums in zip(used, found, strict=True):
            if sums.summed_from_ns is not None and sums.summed_from_ns < due_ns:
                await self._store.take_snapshot(account.key, before_ns=due_ns)

    async def close(self) -> None:
        """Wait for reads in progress."""
        for account in self._accounts.values():
            await account.close()

    def build_error(self, account: AccountBalance, nanos: int) -> RunError:
        """Return the error of a model call for which too little is left, and count it."""
        self._count_refusal()
        return RunError(
            f"Too little is left of the account {_describe(account.key)}: {_amount(account)}, and the call may cost "
            f"{nanos} billionths. Add to the account.",
            reason=error_pb2.ERROR_REASON_INSUFFICIENT_BALANCE,
        )

    def _get(self, key: AccountKey) -> AccountBalance:
        return self._accounts.setdefault(key, AccountBalance(key))

    def _count_refusal(self) -> None:
        if self._metrics is not None:
            self._metrics.on_balance_refusal()

    async def _read_exactly(self, account: AccountBalance) -> None:
        """Read a sum until it does not matter which charges it holds, if that is soon."""
        for _ in range(_MAX_READS):
            await account.wait_until_quiet()
            apply = account.begin_read()
            (sums,) = await self._store.read_sums([account.key], but_worker=self._worker)
            if apply(sums):
                return


def _describe(key: AccountKey) -> str:
    return f"of the user {key.user_id!r}" if key.user_id else f"of the tenant {key.tenant_id!r}"


def _amount(account: AccountBalance) -> str:
    return f"{account.left_nanos} billionths of {account.key.currency_code}"


class AccountOfRun:
    """The account that pays for one run, as a SharedLimit."""

    def __init__(self, accounts: Accounts, account: AccountBalance, log: Sequence[event_pb2.AgentEvent]) -> None:
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
            self._account.reserved_nanos -= self._held.pop(event.effect_key, 0)

    def on_commit(self, sequence: int) -> None:
        """See SharedLimit."""
        self._account.commit(self._uncommitted.pop(sequence, 0))

    def close(self) -> None:
        """Release what the run has reserved: it is not executed here any more."""
        self._account.reserved_nanos -= sum(self._held.values())
        self._held.clear()
        self._account.forget(sum(self._uncommitted.values()))
        self._uncommitted.clear()
        self._account.users -= 1

    def _hold(self, key: str) -> None:
        self._held[key] = self._charges.get_reserved_nanos(key)
        self._account.reserved_nanos += self._held[key]
