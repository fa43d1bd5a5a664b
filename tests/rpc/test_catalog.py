"""The catalog over gRPC."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, ResourceInfo
from grpc import aio

from bough.v1 import agent_pb2, execution_pb2, tool_pb2
from bough.v1 import catalog_service_pb2 as pb
from bough.v1.catalog_service_pb2_grpc import CatalogServiceStub, add_CatalogServiceServicer_to_server
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.editing import AgentEditor
from bough_server.agents.registry import Registry
from bough_server.api.catalog_service import CatalogService
from bough_server.clock import SystemClock
from bough_server.interceptors.auth import current_caller
from bough_server.models.registry import ConfiguredModels
from bough_server.models.scripted.model import ScriptedModel
from bough_server.models.scripted.script import parse_script
from bough_server.store.opening import Store, open_store
from tests.rpc.interceptor_server import behaving, status_details
from tests.rpc.run_server import Served


async def test_agents_are_listed_by_name_in_pages(server: Served) -> None:
    first = await server.catalog.ListAgents(pb.ListAgentsRequest(page_size=3))
    rest = await server.catalog.ListAgents(pb.ListAgentsRequest(page_token=first.next_page_token))
    names = [[agent.definition.name for agent in page.agents] for page in (first, rest)]
    assert names == [["echo", "failing", "lead"], ["nester", "waiter"]]
    assert rest.next_page_token == ""
    echo = (await server.catalog.GetAgent(pb.GetAgentRequest(name="echo"))).agent
    assert echo == first.agents[0]
    assert echo == agent_pb2.Agent(
        definition=agent_pb2.AgentDefinition(name="echo", description="Says what it is told."),
        revision="1",
        source=agent_pb2.AGENT_SOURCE_CODE,
        kind=execution_pb2.AGENT_KIND_FUNCTION,
    )


async def test_an_unknown_agent_is_not_found(server: Served) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await server.catalog.GetAgent(pb.GetAgentRequest(name="absent"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert status_details(caught.value) == (
        ErrorInfo(reason="UNKNOWN_AGENT", domain="bough.dev", metadata={"name": "absent"}),
        ResourceInfo(resource_type="agent", resource_name="absent"),
    )


async def test_validating_answers_well_with_everything_that_is_wrong(server: Served) -> None:
    wrong = agent_pb2.AgentDefinition(
        name="selfish", description="", sub_agents=[agent_pb2.AgentLink(agent="ghost")], llm=agent_pb2.LlmAgent()
    )
    response = await server.catalog.ValidateAgents(pb.ValidateAgentsRequest(definitions=[wrong]))
    fields = {violation.field for violation in response.violations}
    assert {violation.agent for violation in response.violations} == {"selfish"}
    assert {"description", "sub_agents[0].agent"} <= fields


async def test_validating_many_schemas_keeps_no_other_call_waiting(server: Served) -> None:
    schema = json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}})
    team = [
        agent_pb2.AgentDefinition(
            name=f"a{n}", description="Is one.", llm=agent_pb2.LlmAgent(), input_schema_json=schema
        )
        for n in range(12)
    ]
    judging = asyncio.ensure_future(server.catalog.ValidateAgents(pb.ValidateAgentsRequest(definitions=team)))
    for _ in range(4):
        await server.catalog.GetAgent(pb.GetAgentRequest(name="echo"))
    assert not judging.done()
    # This server has no model, which is a violation of every definition; the schemas have none.
    assert {violation.field for violation in (await judging).violations} == {"llm.model"}


def _service(registry: Registry, store: Store) -> CatalogService:
    agents = AgentCatalog(registry, store.agents)
    editor = AgentEditor(agents, store.agents, SystemClock())
    return CatalogService(agents=agents, editor=editor, revisions=store.catalog, caller=current_caller)


async def test_a_page_of_agents_stays_within_what_a_client_receives(tmp_path: Path) -> None:
    models = ConfiguredModels(
        {"m": ScriptedModel(name="m", script=parse_script("agents: {lead: [a]}"))}, {}, default="m"
    )
    llm = agent_pb2.LlmAgent(instruction="x" * 250_000)
    team = [agent_pb2.AgentDefinition(name=f"a{n}", description="Is one.", llm=llm) for n in range(10, 40)]
    registry = Registry(team, models=models)
    names: list[str] = []
    pages, token = 0, ""
    async with (
        open_store(f"sqlite:///{tmp_path}/bough.db", durability="process") as store,
        behaving(add_CatalogServiceServicer_to_server, ListAgents=_service(registry, store).ListAgents) as channel,
    ):
        while pages == 0 or token:
            page = await CatalogServiceStub(channel).ListAgents(pb.ListAgentsRequest(page_size=1_000, page_token=token))
            assert page.ByteSize() < 1024 * 1024 + 4096
            names += [agent.definition.name for agent in page.agents]
            pages, token = pages + 1, page.next_page_token
    assert (pages, names) == (8, [agent.name for agent in team])


async def test_a_server_without_models_and_tools_lists_the_tools_it_brings_itself(server: Served) -> None:
    tools = (await server.catalog.ListTools(pb.ListToolsRequest())).tools
    assert [tool.name for tool in tools] == ["break_loop", "exit", "get_state", "set_state"]
    assert {tool.source for tool in tools} == {tool_pb2.TOOL_SOURCE_BUILT_IN}
    assert await server.catalog.ListModels(pb.ListModelsRequest()) == pb.ListModelsResponse()
