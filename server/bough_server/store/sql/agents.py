"""Stored agents, and the definitions of runs by their revisions."""

from functools import partial
from typing import Final

from sqlalchemy import Connection, Select, bindparam, delete, exists, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from bough.v1 import agent_pb2, tool_pb2
from bough_server.store.ports.workers import CatalogMoved, StoredAgents
from bough_server.store.sql import tables
from bough_server.store.sql.driver import Reach, build_lock_name
from bough_server.store.sql.readers import Readers
from bough_server.store.sql.write_queue import WriteQueue

MAX_CACHED_DEFINITIONS: Final = 256
MAX_CACHED_BYTES: Final = 16 * 1024
"""The most definitions that are kept in memory, and the longest of them in bytes."""

MOST_KNOWN: Final = 4096
"""The most tenants whose version is kept in memory."""

_agents, _catalogs = tables.agents.c, tables.catalogs.c

_VERSION: Final = select(_catalogs.version).where(_catalogs.tenant_id == bindparam("tenant"))
_ALL: Final = (
    select(_catalogs.version, _agents.data)
    .join_from(tables.catalogs, tables.agents, _agents.tenant_id == _catalogs.tenant_id, isouter=True)
    .where(_catalogs.tenant_id == bindparam("tenant"))
    .order_by(_agents.name)
)
"""One statement, because readers autocommit: two statements could see two versions."""

_DATA: Final = select(_agents.data).where(
    _agents.tenant_id == bindparam("tenant"), _agents.name == bindparam("agent_name")
)
_REMOVE: Final = delete(tables.agents).where(
    _agents.tenant_id == bindparam("tenant"), _agents.name == bindparam("agent_name")
)
_put = upsert(tables.agents)
_PUT: Final = _put.on_conflict_do_update(index_elements=["tenant_id", "name"], set_={"data": _put.excluded.data})
_BEGIN: Final = upsert(tables.catalogs).on_conflict_do_nothing()
_LOCKED_VERSION: Final = _VERSION.with_for_update()
_INCREMENT_VERSION: Final = (
    update(tables.catalogs).where(_catalogs.tenant_id == bindparam("tenant")).values(version=bindparam("new_version"))
)

_definitions, _named, _runs = tables.definitions.c, tables.run_definitions.c, tables.runs.c

_DEFINITION: Final = select(_definitions.data).where(_definitions.revision == bindparam("revision"))
_DEFINITION_OF_TENANT: Final = select(_definitions.data).where(
    _definitions.revision == bindparam("revision"),
    exists().where(
        _named.revision == bindparam("revision"), _runs.run_id == _named.run_id, _runs.tenant_id == bindparam("tenant")
    ),
)


class SqlAgents:
    """AgentStore on SQL.

    Versions are cached unless other processes write to the database: then none changes without this one's knowledge.
    """

    def __init__(self, queue: WriteQueue, readers: Readers, *, is_shared: bool) -> None:
        self._queue, self._readers, self._is_shared = queue, readers, is_shared
        self._versions: dict[str, int] = {}
        self._changes = 0

    async def version(self, tenant_id: str) -> int:
        """See AgentStore."""
        known = self._versions.get(tenant_id)
        if known is None:
            changes = self._changes
            known = await self._readers.run(partial(_version, tenant_id=tenant_id))
            # Not if a change was made meanwhile, which the read may have come before.
            if changes == self._changes and not self._is_shared:
                if len(self._versions) >= MOST_KNOWN:
                    del self._versions[next(iter(self._versions))]  # the entry that was added first
                self._versions[tenant_id] = known
        return known

    async def read(self, tenant_id: str) -> StoredAgents:
        """See AgentStore."""
        return await self._readers.run(partial(_read, tenant_id=tenant_id))

    async def put(self, tenant_id: str, agent: agent_pb2.Agent, *, version: int) -> None:
        """See AgentStore."""
        data = agent.SerializeToString(deterministic=True)
        await self._write(tenant_id, agent.definition.name, data, version)

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        """See AgentStore."""
        await self._write(tenant_id, name, None, version)

    async def _write(self, tenant_id: str, name: str, data: bytes | None, version: int) -> None:
        write = partial(_write, tenant_id=tenant_id, name=name, data=data, version=version)
        reach = Reach(names=[build_lock_name("agents", tenant_id)])
        if not await self._queue.execute(write, reach=reach, then=partial(self._forget_version, tenant_id)):
            raise CatalogMoved

    def _forget_version(self, tenant_id: str) -> None:
        self._changes += 1
        self._versions.pop(tenant_id, None)


def _version(connection: Connection, *, tenant_id: str) -> int:
    return int(connection.execute(_VERSION, {"tenant": tenant_id}).scalar_one_or_none() or 0)


def _read(connection: Connection, *, tenant_id: str) -> StoredAgents:
    rows = connection.execute(_ALL, {"tenant": tenant_id}).all()
    stored = [agent_pb2.Agent.FromString(row.data) for row in rows if row.data is not None]
    return StoredAgents(version=rows[0].version if rows else 0, agents=tuple(stored))


def _write(connection: Connection, *, tenant_id: str, name: str, data: bytes | None, version: int) -> bool:
    """Put or remove (if `data` is None) an agent and increment the version; return False if `version` is outdated."""
    here = {"tenant": tenant_id, "agent_name": name}
    connection.execute(_BEGIN, {"tenant_id": tenant_id, "version": 0})
    current = connection.execute(_LOCKED_VERSION, {"tenant": tenant_id}).scalar_one()
    if current == version + 1:
        # An earlier attempt of this transaction may have been committed although its commit reported an error.
        return connection.execute(_DATA, here).scalar_one_or_none() == data
    if current != version:
        return False
    connection.execute(_INCREMENT_VERSION, {"tenant": tenant_id, "new_version": version + 1})
    if data is None:
        connection.execute(_REMOVE, here)
    else:
        connection.execute(_PUT, {"tenant_id": tenant_id, "name": name, "data": data})
    return True


class SqlCatalog:
    """Catalog on SQL.

    The definitions that workers read are cached: a revision is a digest of the content, so none changes.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._cached: dict[str, bytes] = {}

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """See Catalog."""
        data = await self._read(revision)
        return None if data is None else agent_pb2.AgentDefinition.FromString(data)

    async def get_tool(self, revision: str) -> tool_pb2.ToolInfo | None:
        """See Catalog."""
        data = await self._read(revision)
        return None if data is None else tool_pb2.ToolInfo.FromString(data)

    async def _read(self, revision: str) -> bytes | None:
        data = self._cached.get(revision)
        if data is None:
            data = await self._data(_DEFINITION, {"revision": revision})
            if data is not None and len(data) <= MAX_CACHED_BYTES:
                if len(self._cached) >= MAX_CACHED_DEFINITIONS:
                    del self._cached[next(iter(self._cached))]  # the entry that was added first
                self._cached[revision] = data
        return data

    def clear(self) -> None:
        """Drop what is cached: with a session its runs may have been deleted, and with them revisions."""
        self._cached.clear()

    async def get_for_tenant(self, tenant_id: str, revision: str) -> agent_pb2.AgentDefinition | None:
        """See Catalog."""
        data = await self._data(_DEFINITION_OF_TENANT, {"tenant": tenant_id, "revision": revision})
        return None if data is None else agent_pb2.AgentDefinition.FromString(data)

    async def _data(self, statement: Select[tuple[bytes]], parameters: dict[str, str]) -> bytes | None:
        return await self._readers.run(
            lambda connection: connection.execute(statement, parameters).scalar_one_or_none()
        )
