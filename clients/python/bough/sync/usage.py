"""Usage of a server's runs, as its ledger has it: sums and single lines."""

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
