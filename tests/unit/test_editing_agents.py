"""Changes of stored agents that other servers make at the same time: judged again, or given up; never half right."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from bough.v1 import agent_pb2
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.definition import drop_unknown_fields, revision
from bough_server.agents.editing import AgentEditor
from bough_server.agents.registry import Registry
from bough_server.clock import SystemClock
from bough_server.errors import AgentLinked, InvalidRequest, RevisionMoved
from bough_server.models.registry import ConfiguredModels
from bough_server.models.scripted.model import ScriptedModel
from bough_server.models.scripted.script import parse_script
from bough_server.store.opening import open_store
from bough_server.store.ports.workers import AgentStore, StoredAgents

MODELS = ConfiguredModels({"m": ScriptedModel(name="m", script=parse_script("agents: {'*': [a]}"))}, {}, default="m")

Meanwhile = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Contested:
    """The agents of a store, to which another server comes first: right before each of the next writes."""

    agents: AgentStore
    meanwhile: list[Meanwhile] = field(default_factory=list)

    async def version(self, tenant_id: str) -> int:
        return await self.agents.version(tenant_id)

    async def read(self, tenant_id: str) -> StoredAgents:
        return await self.agents.read(tenant_id)

    async def put(self, tenant_id: str, agent: agent_pb2.Agent, *, version: int) -> None:
        await self._give_way()
        await self.agents.put(tenant_id, agent, version=version)

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        await self._give_way()
        await self.agents.remove(tenant_id, name, version=version)

    async def _give_way(self) -> None:
        if self.meanwhile:
            await self.meanwhile.pop(0)()


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Two editors of one store: what `other` does is done right before what `mine` writes."""

    mine: AgentEditor
    other: AgentEditor
    contested: Contested

    async def names(self) -> list[str]:
        """The agents that are stored."""
        return [each.definition.name for each in (await self.contested.read("a")).agents]


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    """Two servers on an empty store."""
    async with open_store(f"sqlite:///{tmp_path}/bough.db", durability="process") as store:
        contested = Contested(store.agents)
        yield Servers(mine=_editor(contested), other=_editor(store.agents), contested=contested)


def _editor(store: AgentStore) -> AgentEditor:
    return AgentEditor(AgentCatalog(Registry([], models=MODELS), store), store, SystemClock())


def define(name: str, *links: str) -> agent_pb2.AgentDefinition:
    return drop_unknown_fields(
        agent_pb2.AgentDefinition(
            name=name,
            description=f"Is {name}.",
            llm=agent_pb2.LlmAgent(),
            sub_agents=[agent_pb2.AgentLink(agent=link) for link in links],
        )
    )


async def test_a_link_to_an_agent_that_is_deleted_meanwhile_is_refused(servers: Servers) -> None:
    await servers.other.create("a", define("poet"))
    servers.contested.meanwhile.append(lambda: servers.other.delete("a", "poet", revision=""))
    with pytest.raises(InvalidRequest, match=r"definition\.sub_agents\[0\]\.agent: There is no agent 'poet'"):
        await servers.mine.create("a", define("lead", "poet"))
    assert await servers.names() == []


async def test_an_agent_that_is_linked_meanwhile_is_not_deleted(servers: Servers) -> None:
    await servers.other.create("a", define("poet"))
    servers.contested.meanwhile.append(lambda: servers.other.create("a", define("lead", "poet")))
    with pytest.raises(AgentLinked):
        await servers.mine.delete("a", "poet", revision="")
    assert await servers.names() == ["lead", "poet"]


async def test_an_agent_that_is_changed_meanwhile_keeps_that_change(servers: Servers) -> None:
    first = await servers.other.create("a", define("poet"))
    theirs = define("poet")
    theirs.description = "Writes odes."
    change = servers.other.update("a", theirs, mask=FieldMask(), revision=first.revision)
    servers.contested.meanwhile.append(lambda: change)
    asked = define("poet")
    asked.llm.instruction = "Rhyme."
    with pytest.raises(RevisionMoved) as moved:
        await servers.mine.update("a", asked, mask=FieldMask(paths=["llm"]), revision=first.revision)
    assert moved.value.details == {"name": "poet", "revision": revision(drop_unknown_fields(theirs))}


async def test_other_agents_that_come_meanwhile_do_no_harm(servers: Servers) -> None:
    for name in ("one", "two"):
        servers.contested.meanwhile.append(lambda name=name: servers.other.create("a", define(name)))  # type: ignore[misc]
    await servers.mine.create("a", define("poet"))
    assert await servers.names() == ["one", "poet", "two"]


async def test_a_change_that_never_gets_its_turn_is_given_up(servers: Servers) -> None:
    for number in range(5):
        made = servers.other.create("a", define(f"agent{number}"))
        servers.contested.meanwhile.append(lambda made=made: made)  # type: ignore[misc]
    with pytest.raises(RevisionMoved, match="Other servers are changing these agents"):
        await servers.mine.create("a", define("poet"))
    assert "poet" not in await servers.names()
