"""The agents that a tenant's callers can run: its stored agents on top of those in files and code.

A catalog is immutable: a change makes a new one, and a run keeps the catalog it started with. editing.py makes the
changes.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog

from bough.v1 import agent_pb2, catalog_service_pb2
from bough_server.agents.definition import drop_unknown_fields
from bough_server.agents.registry import (
    Registry,
    VersionHashes,
    describe_agent,
    find_reachable,
    overlay_definitions,
    resolve_versions,
)
from bough_server.agents.validation import Known, validate, validate_reachable, violations
from bough_server.errors import FieldViolation, InvalidRequest, NotFound, UnknownAgent
from bough_server.matching.schemas import caller_pattern_problem
from bough_server.runtime.agent import Agent, Resolver, llm_of
from bough_server.store.ports.workers import AgentStore, StoredAgents
from bough_server.threads import run_in_thread

HELD_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of stored agents kept in memory, over all tenants."""

_OVERHEAD: Final = 1024
"""Estimated bytes that a catalog takes in addition to its definitions."""

_log = structlog.get_logger(__name__)


class TenantCatalog:
    """The agents of one tenant at one version.

    A stored agent is hidden if a file or code has since defined an agent with its name.
    """

    def __init__(self, registry: Registry, tenant_id: str, read: StoredAgents) -> None:
        self.registry, self.version = registry, read.version
        self._tenant_id = tenant_id
        self.offers_version = registry.tool_servers.offers.version
        """Which offers of tool servers it has."""
        self.stored: Mapping[str, agent_pb2.Agent] = {
            each.definition.name: each for each in read.agents if not registry.source(each.definition.name)
        }
        self.resolver = overlay_definitions(
            registry.add_server_tools(tenant_id), [each.definition for each in self.stored.values()]
        )
        self._versions: dict[str, VersionHashes] = {}
        self.bytes_held = _OVERHEAD + sum(each.ByteSize() for each in self.stored.values())
        names = [each.definition.name for each in read.agents]
        if hidden := [name for name in names if name not in self.stored]:
            _log.warning("stored agents are hidden by agents of the same names in files or code", agents=hidden)

    def agent(self, name: str) -> Agent:
        """Return the agent with this name. Raises NotFound."""
        return _find_agent(self.resolver, name, self.names)

    def versions(self, root: str) -> VersionHashes:
        """Return the versions of what a run of `root` can reach, computed once. Raises AgentUnusable."""
        if root not in self._versions:
            self._versions[root] = resolve_versions(self.resolver, root, self.explain_missing_tool)
        return self._versions[root]

    def explain_missing_tool(self, name: str) -> str:
        """Return why a tool is missing, as a clause."""
        return self.registry.explain_missing_tool(self._tenant_id, name)

    def current(self, name: str) -> agent_pb2.Agent:
        """Return the agent with this name, as the catalog shows it. Raises NotFound."""
        stored = self.stored.get(name)
        return stored if stored is not None else describe_agent(self.agent(name), self.registry.source(name))

    def find_at_revision(self, name: str, revision: str) -> agent_pb2.Agent | None:
        """Return the agent with this name if `revision` is its current revision, else None."""
        try:
            current = self.current(name)
        except NotFound:
            return None
        return current if current.revision == revision else None

    def list_agents(self) -> Sequence[agent_pb2.Agent]:
        """Return every agent in its current revision, sorted by name."""
        return sorted([*self.registry.list_agents(), *self.stored.values()], key=lambda each: each.definition.name)

    def names(self) -> Sequence[str]:
        """Return the name of every agent, sorted."""
        return [each.definition.name for each in self.list_agents()]

    def collect_known_names(self, definitions: Sequence[agent_pb2.AgentDefinition]) -> Known:
        """Return the names that these definitions may refer to."""
        stored = [each.definition for each in self.stored.values()]
        return self.registry.collect_known_names(definitions, stored, tenant_id=self._tenant_id)


class AgentCatalog:
    """The catalogs of all tenants, built on first use and cached until something changes them."""

    def __init__(
        self, registry: Registry, store: AgentStore, models: Mapping[str, Sequence[str] | None] | None = None
    ) -> None:
        """`models` are those that exist for tenants, by their ids: None for all; `"*"` for tenants that it lacks.

        Raises ConfigurationError for an unknown model.
        """
        self.registry = registry
        """The whole catalog of the operator."""
        self._registries = {
            tenant: registry if names is None else registry.select_models(names)
            for tenant, names in (models or {}).items()
        }
        self._store = store
        self._held: OrderedDict[str, TenantCatalog] = OrderedDict()

    def for_tenant(self, tenant_id: str) -> Registry:
        """Return the operator's catalog with the models that exist for a tenant."""
        return self._registries.get(tenant_id) or self._registries.get("*") or self.registry

    async def of(self, tenant_id: str) -> TenantCatalog:
        """Return a tenant's current catalog. Raises StorageFailed."""
        # Read each time: another server may have changed the agents.
        version = await self._store.version(tenant_id)
        held = self._held.get(tenant_id)
        offers = self.registry.tool_servers.offers.version
        if held is None or (held.version, held.offers_version) != (version, offers):
            held = TenantCatalog(self.for_tenant(tenant_id), tenant_id, await self._store.read(tenant_id))
            self._held[tenant_id] = held
            self._evict()
        # Assigning to an existing key keeps its place in the order, so eviction may have removed this very catalog.
        if tenant_id in self._held:
            self._held.move_to_end(tenant_id)
        return held

    async def for_run(
        self, tenant_id: str, root: str, definitions: Sequence[agent_pb2.AgentDefinition] = ()
    ) -> tuple[Resolver, VersionHashes]:
        """Return the resolver that a run of `root` uses from start to end, and the versions of what it can reach.

        `definitions` are those of the request and take precedence. Raises NotFound, InvalidRequest with every problem
        of the definitions, AgentUnusable if an agent the run can reach names something that no longer exists, and
        StorageFailed.
        """
        catalog = await self.of(tenant_id)
        if unlisted := self._find_servers_to_wait_for(catalog, tenant_id, root, definitions):
            # Right after a start the lists are still being read.
            await self.registry.tool_servers.wait_until_settled(unlisted)
            catalog = await self.of(tenant_id)
        resolver = catalog.resolver
        if definitions:
            own = [drop_unknown_fields(each) for each in definitions]
            known = catalog.collect_known_names(own)
            # In a thread: checking schemas takes seconds per MiB and would block the event loop.
            await run_in_thread(check_definitions, own, known, lambda index: f"definitions[{index}]")
            resolver = overlay_definitions(resolver, own)
        # A function, because the names are sorted for the suggestion of an error only.
        _find_agent(resolver, root, lambda: [*catalog.names(), *(each.name for each in definitions)])
        # The request's own definitions change what a run can reach: the catalog's versions do not hold for it.
        if definitions:
            return resolver, resolve_versions(resolver, root, catalog.explain_missing_tool)
        return resolver, catalog.versions(root)

    def _find_servers_to_wait_for(
        self, catalog: TenantCatalog, tenant_id: str, root: str, definitions: Sequence[agent_pb2.AgentDefinition]
    ) -> Collection[str]:
        """Return the tool servers whose tools a run of `root` may use, and are not known yet."""
        offers = self.registry.tool_servers.offers.visible_to(tenant_id)
        unlisted = {name: each.section.prefix_of(name) for name, each in offers.items() if not each.is_listed}
        if not unlisted:
            return ()
        brought = {each.name: each for each in definitions}
        reached = catalog.resolver.agents.keys() | brought.keys() if brought else ()
        if not brought and root in catalog.resolver.agents:
            reached = {each.name for each in find_reachable(catalog.resolver, root)}
        links = [
            link
            for name in reached
            for link in (llm_of(brought[name]).tools if name in brought else catalog.resolver.agents[name].tool_links)
        ]
        return {
            server
            for server, prefix in unlisted.items()
            if any(link.server == server or link.name.startswith(prefix) for link in links)
        }

    async def validate(
        self, tenant_id: str, definitions: Sequence[agent_pb2.AgentDefinition]
    ) -> list[catalog_service_pb2.DefinitionViolation]:
        """Return the problems of definitions in a tenant's catalog, in which they replace agents of the same names."""
        catalog = await self.of(tenant_id)
        # In a thread for the same reason as in for_run().
        return await run_in_thread(violations, definitions, catalog.collect_known_names(definitions))

    def _evict(self) -> None:
        """Evict the least recently used catalogs until the rest fits HELD_BYTES; at least one stays."""
        held = sum(each.bytes_held for each in self._held.values())
        # The last one is in use: a tenant whose agents alone exceed the bound is still served.
        while held > HELD_BYTES and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            held -= dropped.bytes_held


def check_definitions(
    definitions: Sequence[agent_pb2.AgentDefinition], known: Known, path: Callable[[int], str]
) -> None:
    """Check the definitions of a request; `path` maps an index to the field that holds the definition.

    Raises InvalidRequest with every problem of the definitions and of the agents that they reach, and for patterns in
    schemas that are not RE2's: others may take for ever.
    """
    found = [
        FieldViolation(
            field=f"{path(index)}.{problem.field}" if problem.field else path(index),
            description=problem.description,
            reason=problem.reason,
        )
        for index, problems in enumerate(validate(definitions, known))
        for problem in problems
    ]
    found += [
        FieldViolation(
            field=path(0).partition("[")[0],
            description=f"It would make the agent {reached.name!r} invalid: {problem.field}: {problem.description}",
            reason=problem.reason,
        )
        for reached, problems in validate_reachable(definitions, known)
        for problem in problems
    ]
    found += [
        FieldViolation(field=f"{path(index)}.{field}", description=problem)
        for index, definition in enumerate(definitions)
        for field in ("input_schema_json", "output_schema_json")
        if (problem := caller_pattern_problem(getattr(definition, field)))
    ]
    if found:
        raise InvalidRequest(found)


def _find_agent(resolver: Resolver, name: str, names: Callable[[], Iterable[str]]) -> Agent:
    """Return the agent with this name.

    Raises NotFound, which suggests the closest of `names`, those that the caller can list.
    """
    try:
        return resolver.agents[name]
    except KeyError:
        raise UnknownAgent(name, names(), hint="CatalogService.ListAgents lists all agents.") from None
