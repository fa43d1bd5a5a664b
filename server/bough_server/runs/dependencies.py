"""Dependencies shared by this package, and the locks of sessions.

A run begins with the state that it has read of its session. Without a lock, a caller that changes values continuously
would change them between the two at every try. Other processes do not take it: the state that was read is checked in
any case.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from bough_server.agents.catalog import AgentCatalog
from bough_server.clock import Clock
from bough_server.metrics import Metrics
from bough_server.runs.admission import RunDefaults
from bough_server.runtime.agent import Resolver
from bough_server.store.ports import Catalog, EventLog, Principal, RunIndex, Sessions
from bough_server.store.worker_ports import Lease, Mailbox
from bough_server.telemetry import Tracing


class SessionLocks:
    """One line for each session, first come, first served; there is none where nobody waits."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, principal: Principal, session_id: str) -> AsyncIterator[None]:
        """While this is open, nobody else of the tenant's is here for the session; other tenants hold up nobody."""
        line = self._lines.setdefault((principal.tenant_id, session_id), asyncio.Lock())
        async with line:
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDependencies:
    """The collaborators of everything in this package; `worker` is this process's name among those that own runs.

    New runs look their agents up in `agents`, and runs that go on take what they name from `catalog`; both find tools,
    models and agents in code by `resolver`.
    """

    log: EventLog
    index: RunIndex
    sessions: Sessions
    catalog: Catalog
    leases: Lease
    mailbox: Mailbox
    resolver: Resolver
    agents: AgentCatalog
    tracing: Tracing
    clock: Clock
    defaults: RunDefaults
    worker: str
    metrics: Metrics | None = None
    """What the process counts; None where nobody asks for it."""
    changing: SessionLocks = field(default_factory=SessionLocks)
    """Where runs that begin and calls that change values wait for each other."""
