"""Dependencies shared by this package, and the locks of sessions.

A run starts with the session state that it has read. Without a lock, a caller that keeps changing values could
invalidate that read on every try. The lock is only for progress, not for correctness: creating a run compares the
session with the read in any case.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from bough.v1 import event_pb2
from bough_server.agents.catalog import AgentCatalog
from bough_server.clock import Clock
from bough_server.engine.files import FileCache
from bough_server.engine.limits import SharedLimit
from bough_server.history.session import SessionHistories, SessionHistory
from bough_server.identity import Principal
from bough_server.log.blobs import MAX_FILES_BYTES
from bough_server.observability.metrics import Metrics
from bough_server.observability.tracing import Tracing
from bough_server.runs.accounts import Accounts
from bough_server.runs.admission import RunDefaults
from bough_server.runs.quotas import RunQuotas
from bough_server.runs.shared_amounts import LimitsOfRun
from bough_server.store.ports.workers import RunStore
from bough_server.tasks import AbandonedTasks


class SessionLocks:
    """A lock for each session, acquired in order of arrival; it exists only while it is held or waited for."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[tuple[str, str, str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def hold(self, principal: Principal, session_id: str) -> AsyncIterator[None]:
        """Hold the lock of a principal's session, which callers who only name the session's id cannot hold up."""
        line = self._lines.setdefault((principal.tenant_id, principal.user_id, session_id), asyncio.Lock())
        async with line:
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDependencies:
    """The collaborators of everything in this package; `worker` is the name under which this process owns runs.

    New runs look up their agents in `agents`; continued runs read the definitions they name from the store, and find
    tools, models and agents in code there.
    """

    store: RunStore
    agents: AgentCatalog
    tracing: Tracing
    clock: Clock
    defaults: RunDefaults
    worker: str
    quotas: RunQuotas
    """The quotas of tenants and users."""
    metrics: Metrics | None = None
    """The process's metrics; None if they are disabled."""
    accounts: Accounts | None = None
    """The accounts that pay for runs; None if nothing has to."""
    session_locks: SessionLocks = field(default_factory=SessionLocks)
    """Shared by starting runs and calls that change session state."""
    session_histories: SessionHistories = field(default_factory=SessionHistories)
    """The messages of the sessions that had runs last."""
    abandoned: AbandonedTasks = field(default_factory=AbandonedTasks)
    """Tasks of agents' and tools' code that ignore their cancellation."""
    max_files_bytes: int = MAX_FILES_BYTES
    """The bytes that all files of one message may have."""
    max_live_runs: int | None = None
    """How many runs this worker executes before it accepts more without an owner; None for any number."""
    file_cache: FileCache = field(default_factory=FileCache)
    """Files that models were sent last."""

    async def check_spending(self, principal: Principal) -> None:
        """Raise InsufficientBalance or QuotaExceeded if nothing is left for what a principal's runs use."""
        await self.quotas.check_start(principal)
        if self.accounts is not None:
            await self.accounts.check_start(principal)

    def open_limits(self, principal: Principal, log: Sequence[event_pb2.AgentEvent]) -> SharedLimit | None:
        """Return what a run that is to be executed here shares with others; close it when the run has ended."""
        quotas = self.quotas.open(principal, log)
        account = None if self.accounts is None else self.accounts.open(principal, log)
        limits = [limit for limit in (quotas, account) if limit is not None]
        return LimitsOfRun(*limits) if limits else None

    async def close_limits(self) -> None:
        """Wait for reads in progress of what is left of accounts and quotas."""
        await self.quotas.amounts.close()
        if self.accounts is not None:
            await self.accounts.close()

    async def read_session_history(self, principal: Principal, session_id: str, *, through: int) -> SessionHistory:
        """Return the messages of a session up to the cut of a run."""
        return await self.session_histories.read(self.store.sessions, principal, session_id, through=through)
