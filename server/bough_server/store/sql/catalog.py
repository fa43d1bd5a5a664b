"""Definitions by revision on SQL; they are kept and dropped with the runs that name them, not here."""

from typing import Final

from sqlalchemy import bindparam, select

from bough.v1 import agent_pb2
from bough_server.store.sql import tables
from bough_server.store.sql.readers import Readers

_ONE: Final = select(tables.definitions.c.data).where(tables.definitions.c.revision == bindparam("revision"))


class SqlCatalog:
    """Catalog on one SQLite file."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """See Catalog."""
        parameters = {"revision": revision}
        data = await self._readers.run(lambda connection: connection.execute(_ONE, parameters).scalar_one_or_none())
        return None if data is None else agent_pb2.AgentDefinition.FromString(data)
