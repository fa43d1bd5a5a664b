"""What the server asks of a store for the agents that calls have stored; which of them make sense is not judged there.

Their revisions, as runs name them, are ports.Catalog's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.v1 import agent_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAgents:
    """A tenant's agents at one moment, by name, each with its revision and the time when that was stored."""

    version: int
    """How often they have been changed; 0 where that was never."""
    definitions: Sequence[agent_pb2.AgentDefinition] = ()


class CatalogMoved(Exception):
    """The tenant's agents are others by now than the caller judged: read them again and try again."""


class AgentStore(Protocol):
    """Agents by tenant and name. Every change is judged against one version, and refused where that is over."""

    async def version(self, tenant_id: str) -> int:
        """How often a tenant's agents have been changed; asked at every start of a run, so it costs next to nothing."""
        ...

    async def read(self, tenant_id: str) -> StoredAgents:
        """All agents of a tenant."""
        ...

    async def put(self, tenant_id: str, definition: agent_pb2.AgentDefinition, *, version: int) -> None:
        """Stores an agent in place of the one of its name; `version` is the one that it was judged against.

        Raises CatalogMoved and StorageFailed.
        """
        ...

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        """Removes an agent; `version` is the one that this was judged against. Raises CatalogMoved, StorageFailed."""
        ...
