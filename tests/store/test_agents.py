"""Agents that calls have stored: by tenant, one change at a time, whatever becomes of the commit."""

import pytest

from bough.v1 import agent_pb2
from bough_server.errors import StorageFailed
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.workers import CatalogMoved, StoredAgents
from bough_server.store.sql.writer import CommitHooks


def _agent(name: str, description: str = "Is one.") -> agent_pb2.Agent:
    definition = agent_pb2.AgentDefinition(name=name, description=description)
    return agent_pb2.Agent(definition=definition, revision=f"{name}-{description}")


async def test_a_tenant_has_no_agents_before_it_stores_one(store: Store) -> None:
    assert await store.agents.version("anne's") == 0
    assert await store.agents.read("anne's") == StoredAgents(version=0)


async def test_agents_are_of_their_tenant_and_come_by_name(store: Store) -> None:
    writer, lead = _agent("writer"), _agent("lead")
    await store.agents.put("anne's", writer, version=0)
    await store.agents.put("anne's", lead, version=1)
    await store.agents.put("bert's", writer, version=0)
    assert await store.agents.read("anne's") == StoredAgents(version=2, agents=(lead, writer))
    assert await store.agents.read("bert's") == StoredAgents(version=1, agents=(writer,))
    assert [await store.agents.version(tenant) for tenant in ("anne's", "bert's", "carl's")] == [2, 1, 0]


async def test_a_change_takes_the_place_of_what_was_and_a_removal_leaves_nothing(store: Store) -> None:
    await store.agents.put("anne's", _agent("lead"), version=0)
    changed = _agent("lead", "Leads.")
    await store.agents.put("anne's", changed, version=1)
    assert await store.agents.read("anne's") == StoredAgents(version=2, agents=(changed,))
    await store.agents.remove("anne's", "lead", version=2)
    assert await store.agents.read("anne's") == StoredAgents(version=3)


async def test_what_was_judged_against_another_version_changes_nothing(store: Store) -> None:
    for number in range(3):
        await store.agents.put("anne's", _agent(f"a{number}"), version=number)
    before = await store.agents.read("anne's")
    for version in (0, 1, 2, 4):
        with pytest.raises(CatalogMoved):
            await store.agents.put("anne's", _agent("late"), version=version)
        with pytest.raises(CatalogMoved):
            await store.agents.remove("anne's", "a0", version=version)
    assert await store.agents.read("anne's") == before


async def test_the_version_is_known_again_after_every_change(store: Store) -> None:
    for number in range(3):
        assert await store.agents.version("anne's") == number
        await store.agents.put("anne's", _agent("lead", f"{number}"), version=number)
    assert await store.agents.version("anne's") == 3


async def test_agents_are_there_when_the_database_is_opened_again(url: str) -> None:
    async with open_store(url) as store:
        await store.agents.put("anne's", _agent("lead"), version=0)
    async with open_store(url) as store:
        assert await store.agents.version("anne's") == 1
        assert await store.agents.read("anne's") == StoredAgents(version=1, agents=(_agent("lead"),))


def _failure() -> OSError:
    return OSError("the database failed")


async def test_a_change_whose_commit_was_in_doubt_is_made_once(url: str) -> None:
    doubts = 0

    def doubt() -> None:
        nonlocal doubts
        doubts += 1
        if doubts in (1, 3):
            raise _failure()

    async with open_store(url, retry_delays=(0.0, 0.0), hooks=CommitHooks(after=doubt)) as store:
        await store.agents.put("anne's", _agent("lead"), version=0)
        assert await store.agents.read("anne's") == StoredAgents(version=1, agents=(_agent("lead"),))
        await store.agents.remove("anne's", "lead", version=1)
        assert await store.agents.read("anne's") == StoredAgents(version=2)
    assert doubts == 4


async def test_a_change_that_cannot_be_written_changes_nothing(url: str) -> None:
    broken = True

    def fail() -> None:
        if broken:
            raise _failure()

    async with open_store(url, retry_delays=(0.0,), hooks=CommitHooks(before=fail)) as store:
        with pytest.raises(StorageFailed):
            await store.agents.put("anne's", _agent("lead"), version=0)
        assert await store.agents.read("anne's") == StoredAgents(version=0)
        broken = False
        await store.agents.put("anne's", _agent("lead"), version=0)
        assert await store.agents.version("anne's") == 1
