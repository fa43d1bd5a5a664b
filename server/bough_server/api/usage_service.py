"""UsageService: what was used, and what it is charged."""

from collections.abc import Callable

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough.v1 import usage_pb2, usage_service_pb2_grpc
from bough.v1 import usage_service_pb2 as pb
from bough_server.api.pagination import page_of
from bough_server.clock import Clock
from bough_server.errors import AccountsDisabled, FieldViolation, InvalidRequest, PermissionDenied
from bough_server.identity import Caller, is_user
from bough_server.runs.accounts import Accounts
from bough_server.runs.quotas import RunQuotas
from bough_server.store.ports.accounts import AccountKey, AccountStore, StoredAdjustment
from bough_server.store.ports.usage import UsageFilter, UsageLedger, UsageLine


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Reads the ledger of usage, quotas and accounts, and changes balances."""

    def __init__(
        self,
        *,
        ledger: UsageLedger,
        accounts: Accounts | None,
        store: AccountStore,
        quotas: RunQuotas,
        caller: Callable[[], Caller],
        clock: Clock,
    ) -> None:
        self._ledger, self._accounts, self._store, self._quotas = ledger, accounts, store, quotas
        self._caller, self._clock = caller, clock

    async def GetUsage(
        self, request: pb.GetUsageRequest, context: aio.ServicerContext[pb.GetUsageRequest, pb.GetUsageResponse]
    ) -> pb.GetUsageResponse:
        """Return sums over lines of the ledger."""
        groups, token = await self._ledger.list_groups(
            self._caller().usage_scope,
            _usage_filter(request.filter),
            request.group_by,
            page_of(request.page_size, request.page_token),
        )
        return pb.GetUsageResponse(groups=groups, next_page_token=token)

    async def ListUsageEntries(
        self,
        request: pb.ListUsageEntriesRequest,
        context: aio.ServicerContext[pb.ListUsageEntriesRequest, pb.ListUsageEntriesResponse],
    ) -> pb.ListUsageEntriesResponse:
        """List lines of the ledger, newest first."""
        lines, token = await self._ledger.list_attempts(
            self._caller().usage_scope,
            _usage_filter(request.filter),
            page_of(request.page_size, request.page_token),
        )
        return pb.ListUsageEntriesResponse(entries=map(_build_entry, lines), next_page_token=token)

    async def GetQuotas(
        self, request: pb.GetQuotasRequest, context: aio.ServicerContext[pb.GetQuotasRequest, pb.GetQuotasResponse]
    ) -> pb.GetQuotasResponse:
        """Return the quotas in force."""
        caller = self._caller()
        scope, own = caller.usage_scope, caller.principal.user_id
        user_id = request.user_id or own
        if scope.user_id is not None and user_id != scope.user_id:
            raise PermissionDenied("To see quotas other than its own, the caller needs the role READ or BILLING.")
        statuses = await self._quotas.list_statuses(scope.tenant_id, user_id, with_tenant=scope.user_id is None)
        return pb.GetQuotasResponse(quotas=statuses)

    async def GetAccount(
        self, request: pb.GetAccountRequest, context: aio.ServicerContext[pb.GetAccountRequest, pb.GetAccountResponse]
    ) -> pb.GetAccountResponse:
        """Return an account."""
        accounts = self._require_accounts()
        return pb.GetAccountResponse(account=await self._read(accounts, self._find(accounts, request.user_id)))

    async def AdjustBalance(
        self,
        request: pb.AdjustBalanceRequest,
        context: aio.ServicerContext[pb.AdjustBalanceRequest, pb.AdjustBalanceResponse],
    ) -> pb.AdjustBalanceResponse:
        """Change the balance of an account."""
        accounts, caller = self._require_accounts(), self._caller().principal
        if request.currency_code != accounts.currency_code:
            description = f"must be {accounts.currency_code}, the currency of the server's prices"
            raise InvalidRequest([FieldViolation(field="currency_code", description=description)])
        if accounts.per == "user" and not request.user_id:
            description = "names no user, and accounts are those of users at this server"
            raise InvalidRequest([FieldViolation(field="user_id", description=description)])
        key = accounts.key(caller.tenant_id, _check_owner(accounts, request.user_id))
        adjustment = StoredAdjustment(
            request_id=request.request_id,
            amount_nanos=request.amount_nanos,
            currency_code=request.currency_code,
            note=request.note,
            time_ns=self._clock.now_ns(),
            made_by=caller.user_id,
        )
        recorded = await self._store.adjust(key, adjustment)
        await accounts.refresh(key)
        return pb.AdjustBalanceResponse(
            account=await self._read(accounts, key), adjustment=_build_adjustment(key, recorded)
        )

    async def ListAdjustments(
        self,
        request: pb.ListAdjustmentsRequest,
        context: aio.ServicerContext[pb.ListAdjustmentsRequest, pb.ListAdjustmentsResponse],
    ) -> pb.ListAdjustmentsResponse:
        """List the adjustments of an account, newest first."""
        key = self._find(self._require_accounts(), request.user_id)
        found, token = await self._store.list_adjustments(key, page_of(request.page_size, request.page_token))
        adjustments = [_build_adjustment(key, each) for each in found]
        return pb.ListAdjustmentsResponse(adjustments=adjustments, next_page_token=token)

    def _require_accounts(self) -> Accounts:
        if self._accounts is None:
            raise AccountsDisabled("This server has no accounts: set `accounts.per` in its configuration.")
        return self._accounts

    def _find(self, accounts: Accounts, user_id: str) -> AccountKey:
        """Return the account that a request asks for. Raises InvalidRequest and PermissionDenied."""
        caller = self._caller()
        scope, own = caller.usage_scope, caller.principal.user_id
        user_id = _check_owner(accounts, user_id) or (own if accounts.per == "user" else "")
        if scope.user_id is not None and user_id != scope.user_id:
            # Whatever the account: what others have is not told by how this fails.
            raise PermissionDenied("To see accounts other than its own, the caller needs the role READ or BILLING.")
        return accounts.key(scope.tenant_id, user_id)

    async def _read(self, accounts: Accounts, key: AccountKey) -> usage_pb2.Account:
        now_ns = self._clock.now_ns()
        sums = await accounts.read(key)
        account = usage_pb2.Account(
            user_id=key.user_id,
            balance_nanos=sums.balance_nanos,
            currency_code=key.currency_code,
            reserved_nanos=sums.reserved_nanos,
        )
        account.as_of_time.FromNanoseconds(now_ns)
        return account


def _check_owner(accounts: Accounts, user_id: str) -> str:
    """Return the user of an account as a request names it. Raises InvalidRequest if it can have none."""
    if accounts.per == "tenant" and user_id:
        description = "must be empty: accounts are those of tenants at this server"
    elif user_id and not is_user(user_id):
        description = "is not the id of a user"
    else:
        return user_id
    raise InvalidRequest([FieldViolation(field="user_id", description=description)])


def _build_adjustment(key: AccountKey, stored: StoredAdjustment) -> usage_pb2.Adjustment:
    adjustment = usage_pb2.Adjustment(
        request_id=stored.request_id,
        user_id=key.user_id,
        amount_nanos=stored.amount_nanos,
        currency_code=stored.currency_code,
        note=stored.note,
        made_by=stored.made_by,
    )
    adjustment.time.FromNanoseconds(stored.time_ns)
    return adjustment


def _usage_filter(asked: usage_pb2.UsageFilter) -> UsageFilter:
    return UsageFilter(
        user_id=asked.user_id,
        session_id=asked.session_id,
        run_id=asked.run_id,
        invocation_id=asked.invocation_id,
        agent=asked.agent,
        model=asked.model,
        from_ns=asked.time_from.ToNanoseconds() if asked.HasField("time_from") else None,
        before_ns=asked.time_before.ToNanoseconds() if asked.HasField("time_before") else None,
    )


def _build_entry(line: UsageLine) -> usage_pb2.UsageEntry:
    time = Timestamp()
    time.FromNanoseconds(line.time_ns)
    return usage_pb2.UsageEntry(
        run_id=line.run_id,
        sequence=line.sequence,
        user_id=line.user_id,
        session_id=line.session_id,
        agent=line.agent,
        invocation_id=line.invocation_id,
        model=line.model,
        time=time,
        usage=line.usage,
        charge_nanos=line.charge.nanos,
        currency_code=line.charge.currency_code,
        estimated=line.is_estimated,
    )
