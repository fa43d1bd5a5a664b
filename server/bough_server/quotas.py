"""Quotas of tenants and users, by the names of their settings, and the error of one that is used up."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from google.rpc import code_pb2

from bough.v1 import error_pb2
from bough_server.errors import CallError
from bough_server.identity import OWN_USERS, Principal

QuotaName: TypeAlias = Literal["concurrent_runs", "runs_per_minute", "tokens_per_day", "cost_nanos_per_month"]

_UNITS: Final[Mapping[QuotaName, str]] = {
    "concurrent_runs": "runs at the same time",
    "runs_per_minute": "runs a minute",
    "tokens_per_day": "tokens a day",
    "cost_nanos_per_month": "billionths of cost a month",
}

CONCURRENT_RUNS_DELAY: Final = 5.0
"""Seconds after which to try again if a quota on concurrent runs is used up: when one of them ends is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """The quotas of a tenant, or of each of its users; None for no bound."""

    concurrent_runs: int | None = None
    """Runs at the same time that are queued or executed; those that wait for input do not count."""
    runs_per_minute: int | None = None
    """Runs that start within any 60 seconds, by the times of their first events; those that were deleted count too."""
    tokens_per_day: int | None = None
    """Input and output tokens of a day, in UTC."""
    cost_nanos_per_month: int | None = None
    """Charges of a month, in UTC, in billionths of the currency of all prices."""

    @property
    def bounds_starts(self) -> bool:
        """True if one of them is checked in the transaction that creates a run."""
        return self.concurrent_runs is not None or self.runs_per_minute is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Quotas in force: those of a tenant, or of one of its users."""

    tenant_id: str
    user_id: str | None
    """None for those of the tenant."""
    limits: QuotaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuotas:
    """The quotas of a tenant, and of each of its users."""

    of_tenant: QuotaLimits = QuotaLimits()
    of_user: QuotaLimits = QuotaLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The quotas of all tenants, by their ids; `"*"` for each that is not named."""

    tenants: Mapping[str, TenantQuotas] = field(default_factory=dict)

    def find(self, principal: Principal) -> list[Quota]:
        """Return the quotas on what a principal's user does; on the server's own users there are only the tenant's."""
        tenant_id, user_id = principal.tenant_id, principal.user_id
        found = self.tenants.get(tenant_id) or self.tenants.get("*")
        if found is None:
            return []
        quotas = [Quota(tenant_id=tenant_id, user_id=None, limits=found.of_tenant)]
        if not user_id.startswith(OWN_USERS):
            quotas.append(Quota(tenant_id=tenant_id, user_id=user_id, limits=found.of_user))
        return [quota for quota in quotas if quota.limits != QuotaLimits()]

    def find_on_starts(self, principal: Principal) -> list[Quota]:
        """Return those that are checked in the transaction that creates a run."""
        return [quota for quota in self.find(principal) if quota.limits.bounds_starts]


def describe_quota(quota: Quota, name: QuotaName) -> str:
    """Return a quota in words."""
    owner = f"the tenant {quota.tenant_id!r}" if quota.user_id is None else f"the user {quota.user_id!r}"
    return f"the quota of {getattr(quota.limits, name):,} {_UNITS[name]} of {owner}"


class QuotaExceeded(CallError):
    """A run that a quota of its tenant, or of its user, does not allow; nothing of it has happened."""

    code = code_pb2.RESOURCE_EXHAUSTED
    reason = error_pb2.ERROR_REASON_QUOTA_EXCEEDED

    def __init__(self, quota: Quota, name: QuotaName, *, retry_delay: float | None = None) -> None:
        """Default of `retry_delay`: CONCURRENT_RUNS_DELAY."""
        retry_delay = CONCURRENT_RUNS_DELAY if retry_delay is None else retry_delay
        super().__init__(
            f"Nothing is left of {describe_quota(quota, name)}. Try again in {math.ceil(retry_delay):,} s.",
            details={"quota": name},
        )
        self.name: QuotaName = name
        self.limit: int = getattr(quota.limits, name)
        self.subject = f"tenant:{quota.tenant_id}" if quota.user_id is None else f"user:{quota.user_id}"
        self.retry_delay = retry_delay

    @property
    def is_on_starts(self) -> bool:
        """True if runs that end, or a minute that passes, make room for the same run."""
        return self.name in ("concurrent_runs", "runs_per_minute")
