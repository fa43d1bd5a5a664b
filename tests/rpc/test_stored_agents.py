"""Stored agents: created, changed and deleted over gRPC, and the effects on runs."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import PreconditionFailure
from grpc import aio

from bough.v1 import agent_pb2, catalog_service_pb2, execution_pb2
from bough.v1.session_service_pb2 import DeleteSessionRequest
from bough_server.agents.definition import revision
from tests.rpc.catalog_server import (
    ANNE,
    BERT,
    IN_FILES_AND_CODE,
    CurrentCaller,
    answer,
    create,
    define,
    delete,
    get,
    info_of,
    listed,
    refused,
    revisions,
    team_settings,
    update,
    wrong_fields,
)
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import begin, served


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> CurrentCaller:
    """The caller of every call, in place of one that a token identifies."""
    made = CurrentCaller()
    monkeypatch.setattr("bough_server.app.current_caller", made)
    return made


async def test_a_created_agent_is_shown_with_its_revision_and_runs_with_agents_of_files(tmp_path: Path) -> None:
    coach = define("coach", links=["writer"])
    async with served(team_settings(tmp_path)) as server:
        created = await create(server, coach)
        assert await get(server, "coach") == created
        assert await listed(server) == sorted(["coach", *IN_FILES_AND_CODE])
        turn = await begin(server, "coach", "Go.").to_the_end()
        writer = await get(server, "writer")
    assert created == agent_pb2.Agent(
        definition=coach,
        revision=revision(coach),
        source=agent_pb2.AGENT_SOURCE_STORED,
        kind=execution_pb2.AGENT_KIND_LLM,
        create_time=created.create_time,
        revision_create_time=created.create_time,
    )
    assert created.create_time.ToNanoseconds() > 0
    assert (len(writer.revision), writer.source) == (64, agent_pb2.AGENT_SOURCE_FILE)
    assert not writer.HasField("create_time")
    assert not writer.HasField("revision_create_time")
    assert answer(turn) == "The coach's word."
    assert revisions(turn) == {"coach": created.revision, "writer": writer.revision}


async def test_a_name_that_is_taken_is_refused_saying_by_what(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        stored = await create(server, define("coach"))
        for name, metadata in (
            ("coach", {"source": "STORED", "revision": stored.revision}),
            ("writer", {"source": "FILE"}),
            ("echo", {"source": "CODE"}),
        ):
            told = await refused(create(server, define(name)))
            expected = info_of("AGENT_EXISTS", name=name, **metadata)
            assert told == (grpc.StatusCode.ALREADY_EXISTS, expected)


async def test_everything_that_is_wrong_is_told_at_once_by_its_path(tmp_path: Path) -> None:
    wrong = define("coach", links=["ghost", "coach"], tools=["look_up", "look_in"], model="huge", max_steps=0)
    wrong.description = ""
    wrong.limits.wall_duration.seconds = -1
    async with served(team_settings(tmp_path)) as server:
        with pytest.raises(aio.AioRpcError) as caught:
            await create(server, wrong)
        assert await listed(server) == IN_FILES_AND_CODE
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert wrong_fields(caught.value) == [
        ("definition.description", "INVALID_REQUEST"),
        ("definition.llm.model", "INVALID_REQUEST"),
        ("definition.llm.tools[1].name", "UNKNOWN_TOOL"),
        ("definition.sub_agents[0].agent", "UNKNOWN_AGENT"),
        ("definition.sub_agents[1].agent", "INVALID_REQUEST"),
        ("definition.limits.wall_duration", "INVALID_REQUEST"),
        ("definition.llm.max_steps", "INVALID_REQUEST"),
    ]


async def test_an_agent_that_is_left_out_is_told_what_it_needs(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        with pytest.raises(aio.AioRpcError) as caught:
            await create(server, agent_pb2.AgentDefinition())
        with pytest.raises(aio.AioRpcError) as without:
            await server.catalog.CreateAgent(catalog_service_pb2.CreateAgentRequest())
    assert caught.value.code() == without.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert wrong_fields(caught.value) == wrong_fields(without.value)
    assert wrong_fields(without.value)[0][0] == "definition.name"


async def test_an_update_takes_over_the_fields_of_its_mask_and_no_other(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach", links=["writer"], tools=["look_up"], instruction="Coach."))
        asked = define("coach", description="Trains.", instruction="Train.", max_steps=3)
        second = await update(server, asked, "description", "llm.max_steps", "llm.tools", revision=first.revision)
        assert await get(server, "coach") == second
        whole = await update(server, asked, revision=second.revision)
    expected = define("coach", links=["writer"], description="Trains.", instruction="Coach.", max_steps=3)
    assert second.revision == revision(expected) != first.revision
    assert second.revision_create_time.ToNanoseconds() > first.revision_create_time.ToNanoseconds()
    assert first.create_time == second.create_time == whole.create_time
    assert whole.revision == revision(asked)


async def test_an_update_that_changes_nothing_leaves_revision_and_time(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach"))
        assert await update(server, first.definition, revision=first.revision) == first
        assert await update(server, define("coach"), "description", revision=first.revision) == first


async def test_an_update_of_another_revision_than_was_read_changes_nothing(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach"))
        second = await update(server, define("coach", description="Trains."), revision=first.revision)
        late = await refused(update(server, define("coach", description="Late."), revision=first.revision))
        gone = await refused(delete(server, "coach", revision=first.revision))
        assert await update(server, define("coach", description="Trains."), revision=first.revision) == second
        assert await get(server, "coach") == second
    moved = (grpc.StatusCode.ABORTED, info_of("REVISION_MOVED", name="coach", revision=second.revision))
    assert (late, gone) == (moved, moved)


async def test_a_mask_names_fields_that_can_be_changed(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach"))
        paths = ("name", "llm.instruction", "llm.tools.name", "wings", "revision")
        with pytest.raises(aio.AioRpcError) as caught:
            await update(server, first.definition, *paths, revision=first.revision)
        nameless = await refused(update(server, agent_pb2.AgentDefinition(), revision=first.revision))
    assert wrong_fields(caught.value) == [(f"update_mask.paths[{index}]", "INVALID_REQUEST") for index in (0, 2, 3, 4)]
    assert nameless == (grpc.StatusCode.INVALID_ARGUMENT, info_of("INVALID_REQUEST"))


async def test_an_update_is_judged_as_a_whole(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach", links=["writer"]))
        asked = define("coach", links=["writer", "ghost"])
        with pytest.raises(aio.AioRpcError) as caught:
            await update(server, asked, "sub_agents", revision=first.revision)
        assert await get(server, "coach") == first
    assert wrong_fields(caught.value) == [("definition.sub_agents[1].agent", "UNKNOWN_AGENT")]


@pytest.mark.parametrize(("name", "source"), [("writer", "FILE"), ("echo", "CODE")])
async def test_agents_of_files_and_code_are_not_changed_by_calls(tmp_path: Path, name: str, source: str) -> None:
    async with served(team_settings(tmp_path)) as server:
        before = await get(server, name)
        updated = await refused(update(server, define(name), revision=before.revision))
        deleted = await refused(delete(server, name))
        assert await get(server, name) == before
    fixed = (grpc.StatusCode.FAILED_PRECONDITION, info_of("AGENT_FIXED", name=name, source=source))
    assert (updated, deleted) == (fixed, fixed)


async def test_an_agent_that_others_link_to_is_not_deleted(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        poet = await create(server, define("poet"))
        for name in ("coach", "agent"):
            await create(server, define(name, links=["poet"]))
        with pytest.raises(aio.AioRpcError) as linked:
            await delete(server, "poet")
        assert await get(server, "poet") == poet
        for name in ("coach", "agent", "poet"):
            await delete(server, name)
        assert await listed(server) == IN_FILES_AND_CODE
        gone = await refused(get(server, "poet"))
        never = await refused(delete(server, "poet"))
    linking = PreconditionFailure()
    for name in ("agent", "coach"):
        linking.violations.add(type="AGENT_LINKED", subject=name, description="links to the agent")
    assert linked.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert status_details(linked.value) == (info_of("AGENT_LINKED", name="poet"), linking)
    assert gone == never == (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="poet"))


async def test_stored_agents_may_link_each_other_in_a_circle(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("chicken"))
        await create(server, define("egg", links=["chicken"]))
        await update(server, define("chicken", links=["egg"]), revision=first.revision)
        turn = await begin(server, "egg", "Which was first?").to_the_end()
    assert turn.kinds[-1] == "run_completed"
    assert list(revisions(turn)) == ["chicken", "egg"]


async def test_another_tenants_agents_do_not_exist(tmp_path: Path, caller: CurrentCaller) -> None:
    async with served(team_settings(tmp_path)) as server:
        annes = await create(server, define("coach", links=["writer"]))
        caller.principal = BERT
        hidden = (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="coach"))
        assert await refused(get(server, "coach")) == hidden
        assert await refused(update(server, define("coach"), revision=annes.revision)) == hidden
        assert await refused(delete(server, "coach")) == hidden
        assert await refused(begin(server, "coach", "Go.").call.read()) == hidden
        assert await listed(server) == IN_FILES_AND_CODE
        with pytest.raises(aio.AioRpcError) as caught:
            await create(server, define("trainer", links=["coach"]))
        assert wrong_fields(caught.value) == [("definition.sub_agents[0].agent", "UNKNOWN_AGENT")]
        berts = await create(server, define("coach", description="Bert's."))
        turn = await begin(server, "coach", "Go.").to_the_end()
        assert revisions(turn) == {"coach": berts.revision}
        caller.principal = ANNE
        assert await get(server, "coach") == annes
    assert caller.principal == ANNE


async def test_a_revision_is_shown_as_long_as_it_is_in_force_or_a_run_names_it(
    tmp_path: Path, caller: CurrentCaller
) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("coach"))
        turn = await begin(server, "coach", "Go.").to_the_end()
        second = await update(server, define("coach", description="Trains."), revision=first.revision)
        third = await update(server, define("coach", description="Rests."), revision=second.revision)
        shown = [await get(server, "coach", revision=each.revision) for each in (first, third)]
        unused = await refused(get(server, "coach", revision=second.revision))
        other_name = await refused(get(server, "writer", revision=first.revision))
        caller.principal = BERT
        hidden = await refused(get(server, "coach", revision=first.revision))
        caller.principal = ANNE
        await server.sessions.DeleteSession(DeleteSessionRequest(session_id=turn.events[0].session_id))
        gone = await refused(get(server, "coach", revision=first.revision))
    used = agent_pb2.Agent(definition=first.definition, revision=first.revision, kind=first.kind)
    used.source = agent_pb2.AGENT_SOURCE_REVISION
    assert shown == [used, third]
    assert unused == hidden == gone == (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="coach"))
    assert other_name == (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="writer"))


async def test_agents_that_are_stored_at_once_are_all_there(tmp_path: Path) -> None:
    names = [f"agent{number}" for number in range(12)]
    async with served(team_settings(tmp_path)) as server:
        await asyncio.gather(*(create(server, define(name)) for name in names))
        twice = await asyncio.gather(*(create(server, define("twice")) for _ in range(3)), return_exceptions=True)
        assert await listed(server) == sorted([*names, "twice", *IN_FILES_AND_CODE])
    assert sum(isinstance(each, aio.AioRpcError) for each in twice) == 2


async def test_what_a_tenant_may_store_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough_server.agents.editing.MOST_AGENTS", 2)
    monkeypatch.setattr("bough_server.agents.editing.MOST_BYTES", 200_000)
    async with served(team_settings(tmp_path)) as server:
        small = await create(server, define("small"))
        large = define("small", instruction="x" * 200_000)
        told = await refused(update(server, large, revision=small.revision))
        await create(server, define("other"))
        third = await refused(create(server, define("third")))
        assert await get(server, "small") == small
    full = (grpc.StatusCode.RESOURCE_EXHAUSTED, info_of("CATALOG_FULL"))
    assert (told, third) == (full, full)
