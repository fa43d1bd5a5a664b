"""Ports of the store for accounts: their adjustments, and sums of what they have and were charged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bough_server.store.ports.runs import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountKey:
    """An account: of a user or, with an empty `user_id`, of a whole tenant; in one currency."""

    tenant_id: str
    user_id: str
    currency_code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountSums:
    """What an account has, in billionths of its currency."""

    balance_nanos: int = 0
    """The adjustments less the charges since the first of them."""
    summed_from_ns: int | None = None
    """From when on charges were added up for it: the newest snapshot, or the first adjustment. None before that."""
    reserved_nanos: int = 0
    """What model calls in flight have reserved, those of the runs that the reader executes itself left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdjustment:
    """An adjustment of an account."""

    request_id: str
    amount_nanos: int
    currency_code: str
    note: str
    time_ns: int
    made_by: str


class AccountStore(Protocol):
    """Adjustments of accounts, and their balances: there is no row that runs change."""

    async def read_sums(self, keys: Sequence[AccountKey], *, but_worker: str = "") -> Sequence[AccountSums]:
        """Return the sums of accounts, in their order, each as of one moment since the call.

        What runs of the worker `but_worker` have reserved is left out.
        """
        ...

    async def adjust(self, key: AccountKey, adjustment: StoredAdjustment) -> StoredAdjustment:
        """Record an adjustment once for its request id, and return it as it is recorded.

        Raises RequestIdReused if there is another one with that id, and InvalidRequest if the adjustments of the
        account would exceed 64 bits.
        """
        ...

    async def list_adjustments(self, key: AccountKey, page: Page) -> tuple[Sequence[StoredAdjustment], str]:
        """Return a page of an account's adjustments, newest first, and the token of the next page.

        Raises InvalidRequest for a token that is not from this list.
        """
        ...

    async def take_snapshot(self, key: AccountKey, *, before_ns: int) -> None:
        """Keep the charges of an account from before a time, which no later line may change, so that sums are short."""
        ...
