"""Definitions by revision on SQL; they are kept and dropped with the runs that name them, not here."""

from typing import Final

from sqlalchemy import Select, bindparam, exists, select

from bough.v1 import agent_pb2
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers

_definitions, _named, _runs = tables.definitions.c, tables.run_definitions.c, tables.runs.c

_ONE: Final = select(_definitions.data).where(_definitions.revision == bindparam("revision"))
_ONE_OF: Final = select(_definitions.data).where(
    _definitions.revision == bindparam("revision"),
    exists().where(
        _named.revision == bindparam("revision"), _runs.run_id == _named.run_id, _runs.tenant_id == bindparam("tenant")
    ),
)


class SqlCatalog:
    """Catalog on one SQLite file."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """See Catalog."""
        return await self._read(_ONE, {"revision": revision})

    async def get_of(self, tenant_id: str, revision: str) -> agent_pb2.AgentDefinition | None:
        """See Catalog."""
        return await self._read(_ONE_OF, {"tenant": tenant_id, "revision": revision})

    async def _read(
        self, statement: Select[tuple[bytes]], parameters: dict[str, str]
    ) -> agent_pb2.AgentDefinition | None:
        data = await self._readers.run(
            lambda connection: connection.execute(statement, parameters).scalar_one_or_none()
        )
        return None if data is None else agent_pb2.AgentDefinition.FromString(data)
