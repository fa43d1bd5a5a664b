"""Runs of stored agents that are changed, deleted or hidden, or whose references are missing."""

from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough.v1 import agent_pb2, error_pb2
from bough.v1 import agent_service_pb2 as pb
from tests.rpc.agents import GATES
from tests.rpc.catalog_server import (
    FILES,
    IN_FILES_AND_CODE,
    MODULES,
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
)
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Turn, begin, served
from tests.support.databases import in_each_database
from tests.support.projects import llm

pytestmark = in_each_database


async def test_an_edit_takes_effect_with_the_next_run(tmp_path: Path) -> None:
    gate = GATES["held"]
    gate.clear()
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("holder", links=["waiter"]))
        turn = await begin(server, "holder", "Hold.").until("sub_agent_started")
        second = await update(server, define("holder", tools=["look_up"]), revision=first.revision)
        gate.set()
        await turn.to_the_end()
        after = await begin(server, "holder", "Hold.").to_the_end()
    assert revisions(turn) == {"holder": first.revision}
    assert "sub_agent_completed" in turn.kinds
    assert revisions(after) == {"holder": second.revision}
    assert list(after.events[0].run_started.versions.tools) == ["look_up"]
    (failed,) = [event.tool_failed.result for event in after.events if event.HasField("tool_failed")]
    assert (failed.call.name, failed.error.reason) == ("call_waiter", error_pb2.ERROR_REASON_NOT_LINKED)
    assert "sub_agent_started" not in after.kinds


async def test_a_deleted_agent_ends_its_runs_in_peace_and_begins_no_more(tmp_path: Path) -> None:
    gate = GATES["held"]
    gate.clear()
    async with served(team_settings(tmp_path)) as server:
        await create(server, define("holder", links=["waiter"]))
        turn = await begin(server, "holder", "Hold.").until("sub_agent_started")
        await delete(server, "holder")
        gate.set()
        await turn.to_the_end()
        told = await refused(begin(server, "holder", "Hold.").call.read())
    assert answer(turn) == "It was held."
    assert told == (grpc.StatusCode.NOT_FOUND, info_of("UNKNOWN_AGENT", name="holder"))


async def test_stored_agents_are_there_after_a_restart_and_runs_go_on_with_their_revisions(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        first = await create(server, define("inquirer", links=["asker"]))
        turn = await begin(server, "inquirer", "Ask.").to_the_end()
        second = await update(server, define("inquirer", description="Asks no more."), revision=first.revision)
    (asked,) = turn.events[-1].run_interrupted.requests
    async with served(team_settings(tmp_path)) as server:
        assert await get(server, "inquirer") == second
        request = pb.ResumeRunRequest(run_id=await turn.run_id())
        request.answers.add(input_id=asked.input_id, value_json='"This."')
        resumed = await Turn(call=server.agents.ResumeRun(request)).to_the_end()
    assert answer(resumed) == "It is asked."
    assert revisions(turn) == {"inquirer": first.revision}


async def test_a_stored_agent_that_names_what_is_gone_is_refused_by_its_runs_alone(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        reader = await create(server, define("reader", tools=["look_up"]))
        await create(server, define("coach", links=["writer", "reader"]))
        read = await begin(server, "reader", "Read.").to_the_end()
    assert answer(read) == "It is read."
    async with served(team_settings(tmp_path, files=[llm("editor")], python=MODULES[:1])) as server:
        assert await get(server, "reader") == reader
        call = begin(server, "coach", "Go.").call
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == (
            "The agent 'coach' links to the agent 'writer', which no longer exists. "
            "The agent 'reader' names the tool 'look_up', which no longer exists. "
            "Change the agents that name it, or restore it."
        )
        assert status_details(caught.value) == (info_of("AGENT_UNUSABLE"),)
        echoed = await begin(server, "echo", "Still here.").to_the_end()
    assert answer(echoed) == "Still here."


async def test_a_file_that_takes_the_name_of_a_stored_agent_hides_it(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path)) as server:
        stored = await create(server, define("coach"))
    async with served(team_settings(tmp_path, files=[*FILES, llm("coach", calls=["writer"])])) as server:
        shown = await get(server, "coach")
        assert (len(shown.definition.sub_agents), shown.source) == (1, agent_pb2.AGENT_SOURCE_FILE)
        assert await listed(server) == sorted(["coach", *IN_FILES_AND_CODE])
        code, _ = await refused(delete(server, "coach"))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        turn = await begin(server, "coach", "Go.").to_the_end()
        assert revisions(turn)["coach"] == shown.revision
    async with served(team_settings(tmp_path)) as server:
        assert await get(server, "coach") == stored
