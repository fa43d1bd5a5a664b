"""What the callers of a tenant can run: its stored agents over those of files and code; editing.py changes them.

A catalog never changes: a change makes another one, and a run keeps the one that it began with.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import structlog

from bough.v1 import agent_pb2, catalog_service_pb2, error_pb2
from bough_server.agents.definition import received
from bough_server.agents.registry import Overlay, Registry, shown
from bough_server.agents.validation import Known, judge, judge_reached, violations
from bough_server.documents import nearest
from bough_server.errors import FieldViolation, InvalidRequest, NotFound
from bough_server.runtime.agent import Agent
from bough_server.store.worker_ports import AgentStore, StoredAgents

HELD_BYTES: Final = 64 * 1024 * 1024
"""How much of tenants' stored agents is kept in memory, over all tenants."""

_OVERHEAD: Final = 1024
"""About what a catalog takes beside its definitions, in bytes."""

_log = structlog.get_logger(__name__)


class TenantCatalog:
    """The agents of one tenant at one version. A stored one whose name a file or code has taken meanwhile is hidden."""

    def __init__(self, registry: Registry, read: StoredAgents) -> None:
        self.registry, self.version = registry, read.version
        self.stored: Mapping[str, agent_pb2.Agent] = {
            each.definition.name: each for each in read.agents if not registry.source(each.definition.name)
        }
        self.agents = Overlay(registry, [each.definition for each in self.stored.values()])
        self.bytes_held = _OVERHEAD + sum(each.ByteSize() for each in self.stored.values())
        names = [each.definition.name for each in read.agents]
        if hidden := [name for name in names if name not in self.stored]:
            _log.warning("stored agents are hidden by files or code with their names", agents=hidden)

    def agent(self, name: str) -> Agent:
        """The agent of a name. Raises NotFound."""
        return _found(self.agents, name, self.names)

    def current(self, name: str) -> agent_pb2.Agent:
        """The agent of a name, as the catalog shows it. Raises NotFound."""
        stored = self.stored.get(name)
        return stored if stored is not None else shown(self.agent(name), self.registry.source(name))

    def in_force(self, name: str, revision: str) -> agent_pb2.Agent | None:
        """The same if this is its revision; None if it has another one, or if there is no such agent."""
        try:
            current = self.current(name)
        except NotFound:
            return None
        return current if current.revision == revision else None

    def list_agents(self) -> Sequence[agent_pb2.Agent]:
        """Every agent in its current revision, by name."""
        return sorted([*self.registry.list_agents(), *self.stored.values()], key=lambda each: each.definition.name)

    def names(self) -> Sequence[str]:
        """The name of every agent."""
        return [each.definition.name for each in self.list_agents()]

    def known(self, definitions: Sequence[agent_pb2.AgentDefinition]) -> Known:
        """What these definitions may name."""
        return self.registry.known(definitions, [each.definition for each in self.stored.values()])


class AgentCatalog:
    """The catalogs of all tenants, made when they are asked for and kept while nothing changes them."""

    def __init__(self, registry: Registry, store: AgentStore) -> None:
        self.registry = registry
        """What is the same for every tenant."""
        self._store = store
        self._held: OrderedDict[str, TenantCatalog] = OrderedDict()

    async def of(self, tenant_id: str) -> TenantCatalog:
        """A tenant's catalog as it is now. Raises StorageFailed."""
        version = await self._store.version(tenant_id)
        held = self._held.get(tenant_id)
        if held is None or held.version != version:
            held = TenantCatalog(self.registry, await self._store.read(tenant_id))
            self._held[tenant_id] = held
            self._let_go()
        if tenant_id in self._held:
            self._held.move_to_end(tenant_id)
        return held

    async def resolver(
        self, tenant_id: str, root: str, definitions: Sequence[agent_pb2.AgentDefinition] = ()
    ) -> Overlay:
        """What a run of `root` looks up from its start to its end; `definitions` are the request's own, and come first.

        Raises NotFound, InvalidRequest with everything that is wrong with the definitions, AgentUnusable where what the
        run can reach names something that is gone, and StorageFailed.
        """
        catalog = await self.of(tenant_id)
        resolver = catalog.agents
        if definitions:
            own = [received(each) for each in definitions]
            known = catalog.known(own)
            # Beside the event loop: schemas take seconds a MiB.
            await asyncio.to_thread(refuse, own, known, lambda index: f"definitions[{index}]")
            resolver = Overlay(resolver, own)
        _found(resolver, root, lambda: [*catalog.names(), *(each.name for each in definitions)])
        resolver.versions(root)
        return resolver

    async def validate(
        self, tenant_id: str, definitions: Sequence[agent_pb2.AgentDefinition]
    ) -> list[catalog_service_pb2.DefinitionViolation]:
        """What would be wrong with definitions in a tenant's catalog, where they replace those of their names."""
        catalog = await self.of(tenant_id)
        return await asyncio.to_thread(violations, definitions, catalog.known(definitions))

    def _let_go(self) -> None:
        """Drops the catalogs that were asked for the longest ago, until the rest has room; the last one stays."""
        held = sum(each.bytes_held for each in self._held.values())
        while held > HELD_BYTES and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            held -= dropped.bytes_held


def refuse(definitions: Sequence[agent_pb2.AgentDefinition], known: Known, path: Callable[[int], str]) -> None:
    """Judges definitions of a request; `path` says where in it each of them is.

    Raises InvalidRequest with everything that is wrong with them, and with what they reach.
    """
    found = [
        FieldViolation(
            field=f"{path(index)}.{mistake.field}" if mistake.field else path(index),
            description=mistake.description,
            reason=mistake.reason,
        )
        for index, mistakes in enumerate(judge(definitions, known))
        for mistake in mistakes
    ]
    found += [
        FieldViolation(
            field=path(0).partition("[")[0],
            description=f"The agent {reached.name!r} would be wrong with it: {mistake.field}: {mistake.description}",
            reason=mistake.reason,
        )
        for reached, mistakes in judge_reached(definitions, known)
        for mistake in mistakes
    ]
    if found:
        raise InvalidRequest(found)


def _found(agents: Overlay, name: str, names: Callable[[], Iterable[str]]) -> Agent:
    """The agent of a name. The error names the nearest of `names`, those that the caller can list."""
    try:
        return agents.agent(name)
    except KeyError:
        near = nearest(name, names())
        hint = f"{near} CatalogService.ListAgents lists those there are.".lstrip()
        raise NotFound("agent", name, reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT, hint=hint) from None
