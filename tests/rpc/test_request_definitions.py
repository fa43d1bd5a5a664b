"""Definitions in a request: looked up before the catalog, by its run alone, until its end and that of its forks."""

from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough.v1 import agent_pb2, execution_pb2, fork_pb2, run_pb2, session_service_pb2
from bough.v1 import agent_service_pb2 as pb
from bough_server.agents.definition import revision
from tests.rpc.catalog_server import (
    answer,
    create,
    define,
    delete,
    get,
    info_of,
    refused,
    revisions,
    team_settings,
    update,
    wrong_fields,
)
from tests.rpc.run_server import Served, Turn, begin, served
from tests.support.projects import llm


async def _runs(server: Served) -> list[run_pb2.Run]:
    return list((await server.agents.ListRuns(pb.ListRunsRequest())).runs)


async def test_they_come_before_files_and_stored_agents_for_their_run_alone(tmp_path: Path) -> None:
    coach, writer = define("coach", links=["poet", "writer"]), define("writer", instruction="Write less.")
    async with served(team_settings(tmp_path)) as server:
        poet = await create(server, define("poet"))
        stored = await create(server, define("coach"))
        of_file = await get(server, "writer")
        tried = await begin(server, "coach", "Go.", definitions=[coach, writer]).to_the_end()
        plain = await begin(server, "coach", "Go.").to_the_end()
        assert (await get(server, "coach"), await get(server, "writer")) == (stored, of_file)
    assert answer(tried) == "The coach's word."
    assert revisions(tried) == {"coach": revision(coach), "poet": poet.revision, "writer": revision(writer)}
    assert revisions(plain) == {"coach": stored.revision}


async def test_an_agent_may_be_there_for_a_request_alone(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        turn = await begin(server, "coach", "Go.", definitions=[define("coach", links=["writer"])]).to_the_end()
        gone = await refused(get(server, "coach"))
    assert answer(turn) == "The coach's word."
    assert gone == (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="coach"))


async def test_fields_that_the_server_does_not_know_are_no_part_of_a_definition(tmp_path: Path) -> None:
    coach = define("coach")
    asked = agent_pb2.AgentDefinition.FromString(coach.SerializeToString() + b"\xf2\x01\x04made")
    async with served(team_settings(tmp_path)) as server:
        turn = await begin(server, "coach", "Go.", definitions=[asked]).to_the_end()
    assert asked != coach
    assert revisions(turn) == {"coach": revision(coach)}


async def test_everything_that_is_wrong_is_told_by_its_path_and_nothing_begins(tmp_path: Path) -> None:
    definitions = [
        define("coach", links=["ghost"], tools=["look_up", "look_in"]),
        define("echo"),
        define("coach", model="huge"),
    ]
    definitions[2].limits.wall_duration.nanos = -1
    async with served(team_settings(tmp_path)) as server:
        with pytest.raises(aio.AioRpcError) as caught:
            await begin(server, "coach", "Go.", definitions=definitions).call.read()
        assert await _runs(server) == []
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert wrong_fields(caught.value) == [
        ("definitions[0].llm.tools[1].name", "UNKNOWN_TOOL"),
        ("definitions[0].sub_agents[0].agent", "UNKNOWN_AGENT"),
        ("definitions[1].name", "INVALID_REQUEST"),
        ("definitions[2].name", "INVALID_REQUEST"),
        ("definitions[2].llm.model", "INVALID_REQUEST"),
        ("definitions[2].limits.wall_duration", "INVALID_REQUEST"),
    ]


async def test_they_are_judged_together_with_what_they_reach(tmp_path: Path) -> None:
    files = [llm("editor", calls=["writer"], model="named"), llm("writer"), llm("other", model="named")]
    async with served(team_settings(tmp_path, files=files, model="named")) as server:
        good = await begin(server, "editor", "Go.").to_the_end()
        with pytest.raises(aio.AioRpcError) as caught:
            await begin(server, "editor", "Go.", definitions=[define("editor", links=["writer", "other"])]).call.read()
    assert answer(good) == "The editor's word."
    assert wrong_fields(caught.value) == [
        ("definitions[0].llm.model", "INVALID_REQUEST"),
        ("definitions", "INVALID_REQUEST"),
    ]
    assert "It would make the agent 'writer' invalid: llm.model: is required" in str(caught.value.details())


async def test_a_request_brings_a_bounded_number(tmp_path: Path) -> None:
    many = [define(f"agent{number}") for number in range(129)]
    async with served(team_settings(tmp_path)) as server:
        with pytest.raises(aio.AioRpcError) as caught:
            await begin(server, "agent7", "Go.", definitions=many).call.read()
        turn = await begin(server, "agent7", "Go.", definitions=many[:128]).to_the_end()
    assert wrong_fields(caught.value) == [("definitions", "INVALID_REQUEST")]
    assert answer(turn) == "A word."


async def test_they_are_part_of_what_a_request_id_stands_for(tmp_path: Path) -> None:
    coach = define("coach")
    async with served(team_settings(tmp_path)) as server:
        first = await begin(server, "coach", "Go.", request_id="try", definitions=[coach]).to_the_end()
        again = await begin(server, "coach", "Go.", request_id="try", definitions=[coach]).to_the_end()
        other = begin(server, "coach", "Go.", request_id="try", definitions=[define("coach", max_steps=3)]).call.read()
        reused = await refused(other)
    assert again.events == first.events
    expected = info_of("REQUEST_ID_REUSED", run_id=await first.run_id())
    assert reused == (grpc.StatusCode.ALREADY_EXISTS, expected)


async def test_a_request_that_began_its_run_before_is_not_judged_again(tmp_path: Path) -> None:
    coach = define("coach", links=["poet"])
    async with served(team_settings(tmp_path)) as server:
        await create(server, define("poet"))
        first = await begin(server, "coach", "Go.", request_id="try", definitions=[coach]).to_the_end()
        await delete(server, "poet")
        again = await begin(server, "coach", "Go.", request_id="try", definitions=[coach]).to_the_end()
    assert again.events == first.events


async def test_a_run_goes_on_with_them_after_a_restart(tmp_path: Path) -> None:
    mine = define("inquirer", links=["asker"], instruction="Mine.")
    async with served(team_settings(tmp_path)) as server:
        stored = await create(server, define("inquirer"))
        turn = await begin(server, "inquirer", "Ask.", definitions=[mine]).to_the_end()
        await update(server, define("inquirer", instruction="Other."), revision=stored.revision)
    (asked,) = turn.events[-1].run_interrupted.requests
    async with served(team_settings(tmp_path)) as server:
        request = pb.ResumeRunRequest(run_id=await turn.run_id())
        request.answers.add(input_id=asked.input_id, value_json='"This."')
        resumed = await Turn(call=server.agents.ResumeRun(request)).to_the_end()
        (run,) = await _runs(server)
    assert revisions(turn) == {"inquirer": revision(mine)}
    assert answer(resumed) == "It is asked."
    assert run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_a_fork_goes_on_with_them_and_may_change_them(tmp_path: Path) -> None:
    coach = define("coach", links=["writer"], instruction="Mine.")
    async with served(team_settings(tmp_path)) as server:
        turn = await begin(server, "coach", "Go.", definitions=[coach]).to_the_end()
        request = pb.ForkRunRequest(
            run_id=await turn.run_id(),
            after_sequence=1,
            changes=fork_pb2.ForkChanges(agents={"coach": fork_pb2.AgentOverride(instruction="Another.")}),
        )
        fork = await Turn(call=server.agents.ForkRun(request)).to_the_end()
    forked = fork.events[0].run_forked
    changed = define("coach", links=["writer"], instruction="Another.")
    assert [(ref.name, ref.revision) for ref in forked.definition_refs] == [("coach", revision(changed))]
    assert answer(fork) == "The coach's word."


async def test_their_revisions_go_with_the_last_run_that_names_them(tmp_path: Path) -> None:
    coach = define("coach")
    async with served(team_settings(tmp_path)) as server:
        stored = await create(server, define("poet"))
        turns = [await begin(server, "coach", "Go.", definitions=[coach]).to_the_end() for _ in range(2)]
        poem = await begin(server, "poet", "Go.").to_the_end()
        found = []
        for turn in (turns[0], poem, turns[1]):
            request = session_service_pb2.DeleteSessionRequest(session_id=turn.events[0].session_id)
            await server.sessions.DeleteSession(request)
            found.append(await server.app.store.catalog.get(revision(coach)))
        assert await get(server, "poet") == stored
    assert [each is None for each in found] == [False, False, True]
