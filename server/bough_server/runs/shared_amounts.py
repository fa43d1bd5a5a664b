"""Amounts that runs spend of together, here and on other servers: balances of accounts, and quotas of tokens and cost.

The store has no row that runs change: what is left is a sum over the ledger. This server adds what the runs that it
executes spend and reserve to the sum that it read last, and reads the sums of the amounts in use once a second.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

from bough.v1 import event_pb2
from bough_server.clock import Clock
from bough_server.engine.limits import Amount, SharedLimit
from bough_server.errors import StorageFailed

REFRESH_SECONDS: Final = 1.0
"""How often the amounts in use are read: so long another server may not know of what was spent here."""

MAX_QUIET_SECONDS: Final = 0.05
"""How long a read that decides about a refusal waits for commits of charges, which the sum may hold or not."""

_MAX_READS: Final = 3
"""How often a sum is read again because charges were committed meanwhile, which it may hold or not."""

Key = TypeVar("Key", bound=Hashable)


class SharedAmount(Generic[Key]):
    """What is left of one amount, as this server knows it."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.users = 0
        """How many live runs use it."""
        self.reserved = 0
        """What the model calls in flight here have reserved."""
        self._rest: int | None = None
        """What was left when it was read last, without what runs here had reserved."""
        self._charged_before = 0
        """What had been charged here when that read began."""
        self._charged = 0
        """What has been charged here and is committed, since this amount is known."""
        self._uncommitted = 0
        """What has been charged here and is not committed yet."""
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._reads = self._applied = 0
        self._reading: asyncio.Task[None] | None = None

    @property
    def left(self) -> int | None:
        """What is left for further model calls; None if it is not known yet.

        It can be too low, as charges of the last moments may count twice until the next read.
        """
        if self._rest is None:
            return None
        charged = self._charged - self._charged_before + self._uncommitted
        return self._rest - charged - self.reserved

    def lacks(self, needed: int) -> bool:
        """Return True if less than this is left, or it is not known what is."""
        left = self.left
        return left is None or left < needed

    def charge(self, used: int) -> None:
        """Count a charge whose event is recorded."""
        self._add_pending(used)

    def commit(self, used: int) -> None:
        """Note that the event of a charge is committed."""
        self._add_pending(-used)
        self._charged += used

    def forget(self, used: int) -> None:
        """Forget charges of which it is not known whether they are committed: the next read tells."""
        self._add_pending(-used)

    def _add_pending(self, used: int) -> None:
        self._uncommitted += used
        if self._uncommitted:
            self._is_quiet.clear()
        else:
            self._is_quiet.set()

    async def wait_until_quiet(self) -> None:
        """Wait until no charge is being committed here, for MAX_QUIET_SECONDS at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_QUIET_SECONDS):
                await self._is_quiet.wait()

    def begin_read(self) -> Callable[[int], bool]:
        """Return what applies the rest that a read which begins now returns.

        It returns whether that is exact: no charge was being committed here during the read.
        """
        self._reads += 1
        number, charged, was_quiet = self._reads, self._charged, not self._uncommitted

        def apply(rest: int) -> bool:
            if number > self._applied:  # else a read that began later was faster
                self._applied, self._rest, self._charged_before = number, rest, charged
            return was_quiet and self._charged == charged

        return apply

    async def share_read(self, read: Callable[["SharedAmount[Key]"], Awaitable[None]]) -> None:
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


class SharedAmounts(Generic[Key]):
    """The amounts of one kind that runs here use, by their keys."""

    def __init__(self, read: Callable[[Sequence[Key]], Awaitable[Sequence[int]]], clock: Clock) -> None:
        """`read` returns what the store says is left of amounts, in their order. It raises StorageFailed."""
        self._read, self._clock = read, clock
        self._amounts: dict[Key, SharedAmount[Key]] = {}

    def get(self, key: Key) -> SharedAmount[Key]:
        """Return the amount of a key, which may not be known yet."""
        return self._amounts.setdefault(key, SharedAmount(key))

    async def get_fresh(self, key: Key, needed: int) -> SharedAmount[Key]:
        """Return the amount of a key, read if it is unknown or lacks what is needed. Raises StorageFailed."""
        amount = self.get(key)
        if amount.lacks(needed):
            await amount.share_read(self._read_exactly)
        return amount

    async def prepare(self, amount: SharedAmount[Key], needed: int) -> None:
        """Read what is left, if it is unknown or seems to be too little: a refusal is final."""
        while amount.lacks(needed):
            try:
                await amount.share_read(self._read_exactly)
                return
            except StorageFailed:  # which cannot be written either: the model call would have to wait as well
                await self._clock.sleep(REFRESH_SECONDS)

    async def refresh(self, key: Key) -> None:
        """Read an amount that was changed, if runs here use it. Raises StorageFailed."""
        if (amount := self._amounts.get(key)) is not None:
            await self._read_exactly(amount)

    async def refresh_all(self) -> None:
        """Read all amounts in use. Raises StorageFailed."""
        used = list(self._amounts.values())
        if used:
            applies = [amount.begin_read() for amount in used]
            found = await self._read([amount.key for amount in used])
            for apply, rest in zip(applies, found, strict=True):
                apply(rest)

    async def watch(self, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Read the amounts in use once a second, until cancelled; `then` is called after each time."""
        while True:
            await self._clock.sleep(REFRESH_SECONDS)
            for amount in [each for each in self._amounts.values() if not each.users]:
                del self._amounts[amount.key]
            with suppress(StorageFailed):  # it has been logged; what is known here is true until then
                await self.refresh_all()
                if then is not None:
                    await then()

    async def close(self) -> None:
        """Wait for reads in progress."""
        for amount in self._amounts.values():
            await amount.close()

    async def _read_exactly(self, amount: SharedAmount[Key]) -> None:
        """Read a sum until it does not matter which charges it holds, if that is soon."""
        for _ in range(_MAX_READS):
            await amount.wait_until_quiet()
            apply = amount.begin_read()
            (rest,) = await self._read([amount.key])
            if apply(rest):
                return


class LimitsOfRun:
    """The limits that one run shares with others, as one SharedLimit."""

    def __init__(self, *limits: SharedLimit) -> None:
        self._limits = limits

    async def prepare(self, amount: Amount) -> None:
        """See SharedLimit."""
        for limit in self._limits:
            await limit.prepare(amount)

    def check(self, amount: Amount) -> None:
        """See SharedLimit."""
        for limit in self._limits:
            limit.check(amount)

    def on_record(self, event: event_pb2.AgentEvent, kind: int) -> None:
        """See SharedLimit."""
        for limit in self._limits:
            limit.on_record(event, kind)

    def on_commit(self, sequence: int) -> None:
        """See SharedLimit."""
        for limit in self._limits:
            limit.on_commit(sequence)

    def close(self) -> None:
        """See SharedLimit."""
        for limit in self._limits:
            limit.close()
