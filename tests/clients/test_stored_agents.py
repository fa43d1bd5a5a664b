"""Agents stored by the client, and agents that a client brings for one run, on a whole server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough import (
    AgentFixed,
    AgentLinked,
    AlreadyExists,
    AsyncClient,
    Client,
    InvalidRequest,
    NotFound,
    RevisionMoved,
    answer_of,
    collect,
    collect_sync,
)
from tests.rpc.catalog_server import define, team_settings
from tests.rpc.run_server import served


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    """A client of a server with agents in a file and in code."""
    async with served(team_settings(tmp_path)) as server, AsyncClient(server.app.address) as connected:
        yield connected


async def test_an_agent_that_was_read_can_be_changed_and_given_back(client: AsyncClient) -> None:
    created = await client.catalog.create_agent(define("coach", links=["writer"]))
    read = await client.catalog.get_agent("coach")
    assert read == created
    read.definition.description = "Trains."
    changed = await client.catalog.update_agent(read.definition, revision=read.revision)
    assert (changed.definition.description, changed.revision != created.revision) == ("Trains.", True)
    with pytest.raises(RevisionMoved) as moved:
        await client.catalog.update_agent(define("coach"), revision=created.revision)
    assert moved.value.revision == changed.revision
    assert await client.ask("coach", "Go.") == "The coach's word."
    await client.catalog.delete_agent("coach", revision=changed.revision)
    with pytest.raises(NotFound):
        await client.catalog.get_agent("coach")


async def test_an_update_may_name_its_fields(client: AsyncClient) -> None:
    created = await client.catalog.create_agent(define("coach", instruction="Coach."))
    asked = define("coach", description="Trains.", instruction="Train.")
    changed = await client.catalog.update_agent(asked, fields=["llm.instruction"], revision=created.revision)
    assert (changed.definition.description, changed.definition.llm.instruction) == (
        created.definition.description,
        "Train.",
    )


async def test_refusals_have_their_classes(client: AsyncClient) -> None:
    await client.catalog.create_agent(define("poet"))
    await client.catalog.create_agent(define("coach", links=["poet"]))
    with pytest.raises(AlreadyExists):
        await client.catalog.create_agent(define("coach"))
    with pytest.raises(AgentFixed):
        await client.catalog.delete_agent("writer")
    with pytest.raises(AgentLinked) as linked:
        await client.catalog.delete_agent("poet")
    with pytest.raises(InvalidRequest) as wrong:
        await client.catalog.create_agent(define("trainer", links=["absent"], tools=["nothing"]))
    assert linked.value.linked_by == ("coach",)
    assert [each.field for each in wrong.value.violations] == [
        "definition.llm.tools[0].name",
        "definition.sub_agents[0].agent",
    ]


async def test_a_run_takes_definitions_of_its_own(client: AsyncClient) -> None:
    coach = define("coach", links=["writer"])
    async with client.run("coach", "Go.", definitions=[coach]) as stream:
        assert answer_of(await collect(stream)) == "The coach's word."
    with pytest.raises(NotFound):
        await client.catalog.get_agent("coach")


async def test_so_does_one_of_the_synchronous_client(client: AsyncClient) -> None:
    def run() -> str:
        with Client(client.address) as synchronous, synchronous.run("coach", "Go.", definitions=[coach]) as stream:
            return answer_of(collect_sync(list(stream)))

    coach = define("coach", links=["writer"])
    assert await asyncio.to_thread(run) == "The coach's word."
