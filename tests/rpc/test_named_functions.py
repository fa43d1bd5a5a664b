"""Stored definitions that name the operator's code and functions."""

from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough.v1 import agent_pb2
from bough.v1 import catalog_service_pb2 as pb
from tests.rpc.catalog_server import MODULES, answer, create, define, get, team_settings, wrong_fields
from tests.rpc.run_server import begin, served

FUNCTIONS = "tests.rpc.catalog_functions"


def definition(name: str, *links: agent_pb2.AgentLink, **kind: object) -> agent_pb2.AgentDefinition:
    """A definition of any kind."""
    return agent_pb2.AgentDefinition(
        name=name,
        description=f"Does what {name} does.",
        sub_agents=links,
        **kind,  # type: ignore[arg-type]
    )


def told(name: str, **builder: str) -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=name, input=agent_pb2.InputBuilder(**builder))


ECHO = definition("echoing", function=agent_pb2.FunctionAgent(function="repeater"))
ROUNDS = definition(
    "rounds",
    told("echoing", function="in_capitals"),
    loop=agent_pb2.LoopAgent(max_iterations=5, until=agent_pb2.LoopUntil(predicate="enough")),
)
WRONG = definition(
    "wrong",
    told("echoing", template="{{nothing}}"),
    told("writer", function="enough"),
    loop=agent_pb2.LoopAgent(max_iterations=5, until=agent_pb2.LoopUntil(predicate="enuogh")),
)


async def test_stored_definitions_of_code_and_loops_with_conditions_run(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path, python=[*MODULES, FUNCTIONS])) as server:
        stored = await create(server, ECHO)
        await create(server, ROUNDS)
        turn = await begin(server, "rounds", "hello").to_the_end()
        assert (await get(server, "echoing")).definition.function.function == "repeater"
    assert answer(turn) == "echoing: HELLO"
    assert turn.kinds.count("loop_iteration_started") == 2
    begun = turn.events[0].run_started
    assert dict(begun.versions.agents) == {"repeater": "3"}
    assert {ref.name: ref.revision for ref in begun.definition_refs}["echoing"] == stored.revision


async def test_everything_that_names_nothing_is_said_at_once(tmp_path: Path) -> None:
    lost = definition("lost", function=agent_pb2.FunctionAgent(function="repaeter"))
    rewriting = define("rewriting", history_rewriter="hiden", instruction="{{user}}")
    async with served(team_settings(tmp_path, python=[*MODULES, FUNCTIONS])) as server:
        request = pb.ValidateAgentsRequest(definitions=[ECHO, WRONG, lost, rewriting])
        response = await server.catalog.ValidateAgents(request)
        with pytest.raises(aio.AioRpcError) as caught:
            await create(server, lost)
    assert [(one.agent, one.field) for one in response.violations] == [
        ("wrong", "loop.until.predicate"),
        ("wrong", "sub_agents[1].input.function"),
        ("wrong", "sub_agents[0].input.template"),
        ("lost", "function.function"),
        ("rewriting", "llm.history_rewriter"),
        ("rewriting", "llm.instruction"),
    ]
    described = {one.field: one.description for one in response.violations}
    assert described["loop.until.predicate"] == "There is no condition 'enuogh'. Did you mean 'enough'?"
    assert described["function.function"].endswith("Did you mean 'repeater'?")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert wrong_fields(caught.value) == [("definition.function.function", "UNKNOWN_AGENT")]


async def test_a_stored_agent_whose_code_is_gone_begins_no_run_and_can_still_be_read(tmp_path: Path) -> None:
    async with served(team_settings(tmp_path, python=[*MODULES, FUNCTIONS])) as server:
        await create(server, ECHO)
    async with served(team_settings(tmp_path)) as server:
        with pytest.raises(aio.AioRpcError) as caught:
            await begin(server, "echoing", "hello").to_the_end()
        assert (await get(server, "echoing")).definition.function.function == "repeater"
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "names the code 'repeater', which no longer exists" in str(caught.value.details())
