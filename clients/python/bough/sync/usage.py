"""Usage of a server's runs, as its ledger has it, and the accounts that pay for it."""

# Generated from bough/usage.py by `make proto`, which overwrites changes.

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from bough import requests
from bough.arguments import build
from bough.calls import PAGE_SIZE, USE_CLIENT_DEFAULT, SyncCalls, Timeout
from bough.requests import UsageDimension
from bough.v1 import usage_pb2, usage_service_pb2

if TYPE_CHECKING:
    # For types alone, as in the asynchronous client.
    from bough.v1.usage_service_pb2_grpc import UsageServiceStub


class SyncLedger:
    """Calls of the UsageService, for programs without an event loop."""

    def __init__(self, stub: "UsageServiceStub", calls: SyncCalls) -> None:
        self._stub, self._calls = stub, calls

    def list_groups(
        self,
        group_by: Iterable[UsageDimension] = (),
        *,
        user_id: str = "",
        session_id: str = "",
        run_id: str = "",
        invocation_id: str = "",
        agent: str = "",
        model: str = "",
        time_from: datetime | None = None,
        time_before: datetime | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[usage_pb2.UsageGroup]:
        """List the sums over the lines that match every filter that is set, grouped by some dimensions.

        Without a dimension there is one group in each currency. `time_from` is inclusive, `time_before` exclusive; a
        time without a zone is local time.
        """
        wanted = requests.usage_filter(
            user_id=user_id,
            session_id=session_id,
            run_id=run_id,
            invocation_id=invocation_id,
            agent=agent,
            model=model,
            time_from=time_from,
            time_before=time_before,
        )
        request = build(usage_service_pb2.GetUsageRequest, page_size=page_size, filter=wanted, group_by=group_by)
        return self._calls.pages(self._stub.GetUsage, request, lambda response: response.groups, timeout=timeout)

    def list_entries(
        self,
        *,
        user_id: str = "",
        session_id: str = "",
        run_id: str = "",
        invocation_id: str = "",
        agent: str = "",
        model: str = "",
        time_from: datetime | None = None,
        time_before: datetime | None = None,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[usage_pb2.UsageEntry]:
        """List the lines that match every filter that is set, newest first; the filters are those of `list_groups`."""
        wanted = requests.usage_filter(
            user_id=user_id,
            session_id=session_id,
            run_id=run_id,
            invocation_id=invocation_id,
            agent=agent,
            model=model,
            time_from=time_from,
            time_before=time_before,
        )
        request = build(usage_service_pb2.ListUsageEntriesRequest, page_size=page_size, filter=wanted)
        return self._calls.pages(
            self._stub.ListUsageEntries, request, lambda response: response.entries, timeout=timeout
        )

    def list_quotas(self, user_id: str = "", *, timeout: Timeout = USE_CLIENT_DEFAULT) -> list[usage_pb2.QuotaStatus]:
        """List the quotas in force: the tenant's, if the caller may see them, then those of a user; default: its own.

        Raises CallFailed with PERMISSION_DENIED.
        """
        request = build(usage_service_pb2.GetQuotasRequest, user_id=user_id)
        return list(self._calls.call(self._stub.GetQuotas, request, timeout).quotas)

    def get_account(self, user_id: str = "", *, timeout: Timeout = USE_CLIENT_DEFAULT) -> usage_pb2.Account:
        """Return the account of a user of the tenant; default: the caller's, or the tenant's if tenants have accounts.

        Raises CallFailed: PERMISSION_DENIED, and FAILED_PRECONDITION if the server has no accounts.
        """
        request = build(usage_service_pb2.GetAccountRequest, user_id=user_id)
        return self._calls.call(self._stub.GetAccount, request, timeout).account

    def adjust_balance(
        self,
        amount_nanos: int,
        *,
        currency_code: str,
        request_id: str,
        user_id: str = "",
        note: str = "",
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> usage_pb2.Account:
        """Add an amount to an account, or take it if it is below 0, once for each request id; return the account.

        The account is that of a user, or the tenant's if accounts are those of tenants. Raises AlreadyExists if the
        request id was used with other content, InvalidRequest, and CallFailed with FAILED_PRECONDITION if the server
        has no accounts.
        """
        request = build(
            usage_service_pb2.AdjustBalanceRequest,
            amount_nanos=amount_nanos,
            currency_code=currency_code,
            request_id=request_id,
            user_id=user_id,
            note=note,
        )
        return self._calls.call(self._stub.AdjustBalance, request, timeout).account

    def list_adjustments(
        self, user_id: str = "", *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[usage_pb2.Adjustment]:
        """List the adjustments of an account, newest first; the account is named as in `get_account`."""
        request = build(usage_service_pb2.ListAdjustmentsRequest, page_size=page_size, user_id=user_id)
        return self._calls.pages(
            self._stub.ListAdjustments, request, lambda response: response.adjustments, timeout=timeout
        )
