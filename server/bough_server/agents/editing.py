"""Create, update and delete a tenant's stored agents, with field masks."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message

from bough.v1 import agent_pb2, error_pb2
from bough_server.agents.catalog import AgentCatalog, TenantCatalog, refuse
from bough_server.agents.definition import received
from bough_server.clock import Clock
from bough_server.errors import (
    AgentExists,
    AgentFixed,
    AgentLinked,
    CatalogFull,
    FieldViolation,
    InvalidRequest,
    NotFound,
    RevisionMoved,
)
from bough_server.store.worker_ports import AgentStore, CatalogMoved

MOST_AGENTS: Final = 1_000
"""How many agents a tenant may store."""

MOST_BYTES: Final = 8 * 1024 * 1024
"""How many bytes they may have together."""

_TRIES: Final = 5
_NAMED: Final = 20

T = TypeVar("T")

_ALL: Final = ["*"]
_FIXED: Final = ("name", "revision", "create_time")


class AgentEditor:
    """Creates, updates and deletes the agents that calls store. One tenant's changes are made one after the other."""

    def __init__(self, catalog: AgentCatalog, store: AgentStore, clock: Clock) -> None:
        self._catalog, self._store, self._clock = catalog, store, clock
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(self, tenant_id: str, definition: agent_pb2.AgentDefinition) -> agent_pb2.AgentDefinition:
        """Stores a new agent, and gives it with its revision and time.

        Raises AgentExists, InvalidRequest with everything that is wrong, CatalogFull and StorageFailed.
        """

        async def put(catalog: TenantCatalog) -> agent_pb2.AgentDefinition:
            _check_free(catalog, definition.name)
            return await self._put(tenant_id, catalog, received(definition))

        return await self._change(tenant_id, put)

    async def update(
        self, tenant_id: str, definition: agent_pb2.AgentDefinition, *, mask: FieldMask, revision: str
    ) -> agent_pb2.AgentDefinition:
        """Changes the fields of a mask, or all, of an agent that was read at `revision`; gives it as it is then.

        Where it is already as the change would make it, nothing is changed and the revision does not matter: the same
        call may come twice. Raises NotFound, AgentFixed, RevisionMoved, InvalidRequest, CatalogFull and StorageFailed.
        """
        if problems := mask_problems(mask):
            raise InvalidRequest(problems)
        if not definition.name:
            raise InvalidRequest([FieldViolation(field="agent.name", description="is required.")])

        async def put(catalog: TenantCatalog) -> agent_pb2.AgentDefinition:
            current = _stored(catalog, definition.name)
            changed = received(masked(current, definition, mask.paths))
            if changed.revision == current.revision:
                return current
            _check_revision(current, revision)
            return await self._put(tenant_id, catalog, changed)

        return await self._change(tenant_id, put)

    async def delete(self, tenant_id: str, name: str, *, revision: str) -> None:
        """Removes an agent that no other links to; where a revision is given, only if it has that one.

        Raises NotFound, AgentFixed, RevisionMoved, AgentLinked and StorageFailed.
        """

        async def remove(catalog: TenantCatalog) -> None:
            current = _stored(catalog, name)
            if revision:
                _check_revision(current, revision)
            linking = [each for each in catalog.stored.values() if any(link.agent == name for link in each.sub_agents)]
            if linking:
                raise _linked(current, sorted(each.name for each in linking))
            await self._store.remove(tenant_id, name, version=catalog.version)

        await self._change(tenant_id, remove)

    async def _change(self, tenant_id: str, change: Callable[[TenantCatalog], Awaitable[T]]) -> T:
        turn = self._turns.setdefault(tenant_id, asyncio.Lock())
        async with turn:
            for _ in range(_TRIES):
                try:
                    return await change(await self._catalog.of(tenant_id))
                except CatalogMoved:
                    continue
        raise RevisionMoved("Other servers change these agents at this moment. Read them again, and try again.")

    async def _put(
        self, tenant_id: str, catalog: TenantCatalog, definition: agent_pb2.AgentDefinition
    ) -> agent_pb2.AgentDefinition:
        # Beside the event loop: schemas take seconds a MiB.
        await asyncio.to_thread(refuse, [definition], catalog.known([definition]), lambda _: "agent")
        definition.create_time.FromNanoseconds(self._clock.now_ns())
        _check_room(catalog, definition)
        await self._store.put(tenant_id, definition, version=catalog.version)
        return definition


def _check_free(catalog: TenantCatalog, name: str) -> None:
    place = catalog.registry.place(name)
    if not place and name not in catalog.stored:
        return
    where = f"It stands in {place} of the server." if place else "It is stored: update it, or delete it first."
    details = {"name": name, "place": place or "stored", "revision": catalog.agent(name).definition.revision}
    raise AgentExists(f"There is an agent {name!r} already. {where}", details=details)


def _stored(catalog: TenantCatalog, name: str) -> agent_pb2.AgentDefinition:
    """The stored agent of a name."""
    if place := catalog.registry.place(name):
        said = f"The agent {name!r} stands in {place} of the server, and is changed there, not by a call."
        raise AgentFixed(said, details={"name": name, "place": place})
    current = catalog.stored.get(name)
    if current is None:
        raise NotFound("agent", name, reason=error_pb2.ERROR_REASON_UNKNOWN_AGENT)
    return current


def _check_revision(current: agent_pb2.AgentDefinition, revision: str) -> None:
    if current.revision != revision:
        raise RevisionMoved(
            f"The agent {current.name!r} has the revision {current.revision} by now, not {revision!r}. Read it again.",
            details={"name": current.name, "revision": current.revision},
        )


def _linked(definition: agent_pb2.AgentDefinition, names: Sequence[str]) -> AgentLinked:
    shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    return AgentLinked(
        f"The agent {definition.name!r} is linked by {shown}: take the links away first.",
        details={"name": definition.name, "linked_by": shown},
    )


def _check_room(catalog: TenantCatalog, definition: agent_pb2.AgentDefinition) -> None:
    others = [each for each in catalog.stored.values() if each.name != definition.name]
    if len(others) >= MOST_AGENTS:
        raise CatalogFull(f"{len(others):,} agents are stored, and no more may be. Delete some first.")
    if sum(each.ByteSize() for each in others) + definition.ByteSize() > MOST_BYTES:
        raise CatalogFull(f"The stored agents would have more than {MOST_BYTES // 1024**2} MiB. Delete some first.")


def mask_problems(mask: FieldMask) -> list[FieldViolation]:
    """What is wrong with the paths of a mask of definitions."""
    if list(mask.paths) == _ALL:
        return []
    descriptor = agent_pb2.AgentDefinition.DESCRIPTOR
    problems: list[FieldViolation] = []
    for index, path in enumerate(mask.paths):
        if path in _FIXED:
            said = f"{path!r} cannot be changed."
        elif not FieldMask(paths=[path]).IsValidForDescriptor(descriptor):
            said = f"{path!r} is no field of an agent, or lies in a list: name the whole list."
        else:
            continue
        problems.append(FieldViolation(field=f"update_mask.paths[{index}]", description=said))
    return problems


def masked(
    current: agent_pb2.AgentDefinition, asked: agent_pb2.AgentDefinition, paths: Sequence[str]
) -> agent_pb2.AgentDefinition:
    """The definition with the fields of these paths as `asked` has them; with all of them where there are none."""
    if list(paths) in ([], _ALL):
        return asked
    merged = agent_pb2.AgentDefinition()
    merged.CopyFrom(current)
    for path in paths:
        _take(path.split("."), asked, merged)
    return merged


def _take(names: Sequence[str], source: Message, target: Message) -> None:
    """Makes one field the source's, which clears it where the source does not have it."""
    *outer, leaf = names
    for name in outer:
        if not source.HasField(name) and not target.HasField(name):
            return
        source, target = getattr(source, name), getattr(target, name)
    only = type(source)()
    only.CopyFrom(source)
    for descriptor, _ in source.ListFields():
        if descriptor.name != leaf:
            only.ClearField(descriptor.name)
    target.ClearField(leaf)
    if only.ListFields():
        target.MergeFrom(only)
