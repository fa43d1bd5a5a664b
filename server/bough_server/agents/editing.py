"""Create, update and delete a tenant's stored agents, with field masks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from bough.v1 import agent_pb2
from bough_server.agents.catalog import AgentCatalog, TenantCatalog, check_definitions
from bough_server.agents.definition import drop_unknown_fields, kind_of, revision
from bough_server.clock import Clock
from bough_server.errors import (
    AgentExists,
    AgentFixed,
    AgentLinked,
    CatalogFull,
    FieldViolation,
    InvalidRequest,
    RevisionMoved,
    UnknownAgent,
)
from bough_server.store.ports.workers import AgentStore, CatalogMoved
from bough_server.threads import run_in_thread

MOST_AGENTS: Final = 1_000
"""The most agents that a tenant may store."""

MOST_BYTES: Final = 8 * 1024 * 1024
"""The most bytes that a tenant's stored agents may have together."""

_TRIES: Final = 5

T = TypeVar("T")

_ALL: Final = ["*"]
_FIXED: Final = "name"


class AgentEditor:
    """Creates, updates and deletes stored agents. Changes of one tenant are made one at a time."""

    def __init__(self, catalog: AgentCatalog, store: AgentStore, clock: Clock) -> None:
        self._catalog, self._store, self._clock = catalog, store, clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(self, tenant_id: str, definition: agent_pb2.AgentDefinition) -> agent_pb2.Agent:
        """Store a new agent and return it.

        Raises AgentExists, InvalidRequest with every problem, CatalogFull and StorageFailed.
        """

        async def put(catalog: TenantCatalog) -> agent_pb2.Agent:
            _check_free(catalog, definition.name)
            agent = self._agent(drop_unknown_fields(definition))
            agent.create_time.CopyFrom(agent.revision_create_time)
            return await self._put(tenant_id, catalog, agent)

        return await self._change(tenant_id, put)

    async def update(
        self, tenant_id: str, definition: agent_pb2.AgentDefinition, *, mask: FieldMask, revision: str
    ) -> agent_pb2.Agent:
        """Change the masked fields (default: all) of an agent that was read at `revision`; return the changed agent.

        If the agent already has this content, nothing is changed and `revision` is not checked, so that a call can be
        repeated. Raises NotFound, AgentFixed, RevisionMoved, InvalidRequest, CatalogFull and StorageFailed.
        """
        if problems := mask_problems(mask):
            raise InvalidRequest(problems)
        if not definition.name:
            raise InvalidRequest([FieldViolation(field="definition.name", description="is required.")])

        async def put(catalog: TenantCatalog) -> agent_pb2.Agent:
            current = _find_stored_agent(catalog, definition.name)
            changed = self._agent(drop_unknown_fields(apply_mask(current.definition, definition, mask.paths)))
            if changed.revision == current.revision:
                return current
            _check_revision(current, revision)
            changed.create_time.CopyFrom(current.create_time)
            return await self._put(tenant_id, catalog, changed)

        return await self._change(tenant_id, put)

    async def delete(self, tenant_id: str, name: str, *, revision: str) -> None:
        """Delete an agent that no other links to; if `revision` is not empty, only if it is the agent's current one.

        Raises NotFound, AgentFixed, RevisionMoved, AgentLinked and StorageFailed.
        """

        async def remove(catalog: TenantCatalog) -> None:
            current = _find_stored_agent(catalog, name)
            if revision:
                _check_revision(current, revision)
            if linking := sorted(_linking(catalog, name)):
                raise AgentLinked(current.definition.name, linking)
            await self._store.remove(tenant_id, name, version=catalog.version)

        await self._change(tenant_id, remove)

    async def _change(self, tenant_id: str, change: Callable[[TenantCatalog], Awaitable[T]]) -> T:
        # The local variable keeps the lock alive: the dictionary holds it weakly, so that idle tenants cost nothing.
        lock = self._locks.setdefault(tenant_id, asyncio.Lock())
        async with lock:
            for _ in range(_TRIES):
                try:
                    return await change(await self._catalog.of(tenant_id))
                except CatalogMoved:  # another server changed the catalog: apply the change to its new version
                    continue
        raise RevisionMoved("Other servers are changing these agents. Read them again and retry.")

    def _agent(self, definition: agent_pb2.AgentDefinition) -> agent_pb2.Agent:
        """Return a new revision of a stored agent."""
        agent = agent_pb2.Agent(
            definition=definition,
            revision=revision(definition),
            source=agent_pb2.AGENT_SOURCE_STORED,
            kind=kind_of(definition),
        )
        agent.revision_create_time.FromNanoseconds(self._clock.now_ns())
        return agent

    async def _put(self, tenant_id: str, catalog: TenantCatalog, agent: agent_pb2.Agent) -> agent_pb2.Agent:
        known = catalog.collect_known_names([agent.definition])
        # In a thread: checking schemas takes seconds per MiB and would block the event loop.
        await run_in_thread(check_definitions, [agent.definition], known, lambda _: "definition")
        _check_room(catalog, agent)
        await self._store.put(tenant_id, agent, version=catalog.version)
        return agent


def _check_free(catalog: TenantCatalog, name: str) -> None:
    source, stored = catalog.registry.source(name), catalog.stored.get(name)
    if source:
        hint = f"It is defined in {catalog.registry.place(name)} of the server."
        details = {"name": name, "source": _source_name(source)}
    elif stored is not None:
        hint = "It is stored: update it, or delete it first."
        details = {"name": name, "source": _source_name(stored.source), "revision": stored.revision}
    else:
        return
    raise AgentExists(f"An agent named {name!r} already exists. {hint}", details=details)


def _source_name(source: agent_pb2.AgentSource.ValueType) -> str:
    return agent_pb2.AgentSource.Name(source).removeprefix("AGENT_SOURCE_")


def _find_stored_agent(catalog: TenantCatalog, name: str) -> agent_pb2.Agent:
    """Return the stored agent with this name. Raises AgentFixed and NotFound."""
    if source := catalog.registry.source(name):
        place = catalog.registry.place(name)
        message = f"The agent {name!r} is defined in {place} of the server, and can only be changed there."
        raise AgentFixed(message, details={"name": name, "source": _source_name(source)})
    current = catalog.stored.get(name)
    if current is None:
        raise UnknownAgent(name, catalog.stored)
    return current


def _check_revision(current: agent_pb2.Agent, revision: str) -> None:
    if current.revision != revision:
        name = current.definition.name
        raise RevisionMoved(
            f"The agent {name!r} is now at revision {current.revision}, not {revision!r}. Read it again.",
            details={"name": name, "revision": current.revision},
        )


def _linking(catalog: TenantCatalog, name: str) -> Iterator[str]:
    """Yield the names of the stored agents that link to an agent."""
    # Stored agents alone: those in files and code were checked without them, so they cannot link to one.
    for each in catalog.stored.values():
        if any(link.agent == name for link in each.definition.sub_agents):
            yield each.definition.name


def _check_room(catalog: TenantCatalog, agent: agent_pb2.Agent) -> None:
    others = [each for each in catalog.stored.values() if each.definition.name != agent.definition.name]
    if len(others) >= MOST_AGENTS:
        raise CatalogFull(f"{len(others):,} agents are stored, which is the limit. Delete some first.")
    if sum(each.ByteSize() for each in others) + agent.ByteSize() > MOST_BYTES:
        raise CatalogFull(f"The stored agents would exceed {MOST_BYTES // 1024**2} MiB. Delete some first.")


def mask_problems(mask: FieldMask) -> list[FieldViolation]:
    """Return the problems of the paths of a definition's field mask."""
    if list(mask.paths) == _ALL:
        return []
    descriptor = agent_pb2.AgentDefinition.DESCRIPTOR
    problems: list[FieldViolation] = []
    for index, path in enumerate(mask.paths):
        if path == _FIXED:
            description = f"{path!r} cannot be changed."
        elif not FieldMask(paths=[path]).IsValidForDescriptor(descriptor):
            description = f"{path!r} is not a field of an agent definition, or is inside a list: name the whole list."
        else:
            continue
        problems.append(FieldViolation(field=f"update_mask.paths[{index}]", description=description))
    return problems


def apply_mask(
    current: agent_pb2.AgentDefinition, asked: agent_pb2.AgentDefinition, paths: Sequence[str]
) -> agent_pb2.AgentDefinition:
    """Return `current` with the fields of these paths taken from `asked`; all fields if there are no paths."""
    if list(paths) in ([], _ALL):
        return asked
    merged = agent_pb2.AgentDefinition()
    merged.CopyFrom(current)
    for path in paths:
        _take(path.split("."), asked, merged)
    return merged


def _take(names: Sequence[str], source: Message, target: Message) -> None:
    """Copy one field from the source; clear it if the source does not have it."""
    *outer, leaf = names
    for name in outer:
        # Absent in both: to clear a field in it would make the message around that field present.
        if not source.HasField(name) and not target.HasField(name):
            return
        source, target = getattr(source, name), getattr(target, name)
    # MergeFrom would append to lists and merge messages, so the field is cleared first and merged in alone.
    only = type(source)()
    only.CopyFrom(source)
    for descriptor, _ in source.ListFields():
        if descriptor.name != leaf:
            only.ClearField(descriptor.name)
    target.ClearField(leaf)
    if only.ListFields():
        target.MergeFrom(only)
