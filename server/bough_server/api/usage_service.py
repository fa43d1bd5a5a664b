"""UsageService: what was used, and what it is charged."""

from collections.abc import Callable

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from bough.v1 import usage_pb2, usage_service_pb2_grpc
from bough.v1 import usage_service_pb2 as pb
from bough_server.api.pagination import page_of
from bough_server.identity import Caller
from bough_server.store.ports.usage import UsageFilter, UsageLedger, UsageLine


class UsageService(usage_service_pb2_grpc.UsageServiceServicer):
    """Reads the ledger of usage."""

    def __init__(self, *, ledger: UsageLedger, caller: Callable[[], Caller]) -> None:
        self._ledger, self._caller = ledger, caller

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
