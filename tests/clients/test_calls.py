"""Calls that are not streams of events: pages as they are asked for, filters, events sent for aggregation."""

from datetime import UTC, datetime

from google.protobuf import timestamp_pb2
from grpc import aio

from bough import AsyncClient, RunQuery
from bough.requests import list_runs_request
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    catalog_service_pb2,
    catalog_service_pb2_grpc,
    eval_service_pb2,
    eval_service_pb2_grpc,
    event_pb2,
    invocation_pb2,
)
from tests.clients.loopback import LoopbackService, connected
from tests.clients.turns import RUN_ID, desk


async def test_a_list_fetches_page_after_page() -> None:
    async with connected(LoopbackService([])) as client:
        assert [run.run_id async for run in client.list_runs(page_size=2)] == [f"run-{n}" for n in range(5)]


async def test_a_run_is_given_and_cancelled_by_its_id() -> None:
    service = LoopbackService([])
    async with connected(service) as client:
        assert (await client.get_run(RUN_ID)).run_id == RUN_ID
        assert (await client.cancel(RUN_ID)).run_id == RUN_ID
    assert service.cancelled_runs == [RUN_ID]


async def test_answer_gives_the_final_text() -> None:
    async with connected(LoopbackService(desk())) as client:
        assert await client.answer("lead", "Write about owls.") == "Owls hunt at night."


def test_a_query_becomes_the_filters_of_a_list() -> None:
    query = RunQuery(
        session_id="s",
        agent="lead",
        states=(event_pb2.STATE_FAILED,),
        labels={"pr": "7"},
        since=datetime(2026, 1, 1, tzinfo=UTC),
    )
    assert list_runs_request(query, page_size=10) == agent_service_pb2.ListRunsRequest(
        page_size=10,
        session_id="s",
        agent="lead",
        states=[event_pb2.STATE_FAILED],
        labels={"pr": "7"},
        start_create_time=timestamp_pb2.Timestamp(seconds=1767225600),
    )


class Aggregation(eval_service_pb2_grpc.EvalServiceServicer):
    """Counts what arrives."""

    def __init__(self) -> None:
        self.messages: list[eval_service_pb2.AggregateEventsRequest] = []

    async def GetInvocation(self, request, context):
        return eval_service_pb2.GetInvocationResponse(invocation=invocation_pb2.Invocation(run_id=request.run_id))

    async def ListInvocations(self, request, context):
        return eval_service_pb2.ListInvocationsResponse(invocations=[invocation_pb2.Invocation(agent=request.agent)])

    async def AggregateEvents(self, request_iterator, context):
        self.messages = [message async for message in request_iterator]
        total = sum(len(message.events) for message in self.messages)
        return eval_service_pb2.AggregateEventsResponse(invocation=invocation_pb2.Invocation(agents_total=total))


class Shelf(catalog_service_pb2_grpc.CatalogServiceServicer):
    """Two agents."""

    async def GetAgent(self, request, context):
        return catalog_service_pb2.GetAgentResponse(agent=agent_pb2.AgentDefinition(name=request.name))

    async def ListAgents(self, request, context):
        names = ["lead", "writer"]
        return catalog_service_pb2.ListAgentsResponse(agents=[agent_pb2.AgentDefinition(name=name) for name in names])

    async def ListTools(self, request, context):
        return catalog_service_pb2.ListToolsResponse(tools=[catalog_service_pb2.ToolInfo(name="search")])

    async def ListModels(self, request, context):
        return catalog_service_pb2.ListModelsResponse(models=[catalog_service_pb2.ModelInfo(name="default")])

    async def ValidateAgent(self, request, context):
        violations = [catalog_service_pb2.Violation(agent=d.name, field="llm") for d in request.definitions]
        return catalog_service_pb2.ValidateAgentResponse(violations=violations)


async def test_events_are_aggregated_in_messages_of_a_bounded_size() -> None:
    service, server = Aggregation(), aio.server()
    eval_service_pb2_grpc.add_EvalServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = invocation_pb2.InvocationOptions(max_agents=3)
    events = [event_pb2.AgentEvent(sequence=number) for number in range(1, 601)]
    large = [
        event_pb2.AgentEvent(sequence=number, llm_output_delta=event_pb2.LlmOutputDelta(text="x" * 700_000))
        for number in range(601, 604)
    ]
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        assert (await client.aggregate([*events, *large], options=options)).agents_total == 603
        assert (await client.tree("r1")).run_id == "r1"
        assert [record.agent async for record in client.list_invocations(RunQuery(agent="lead"))] == ["lead"]
    await server.stop(0)
    assert [len(message.events) for message in service.messages] == [256, 256, 89, 1, 1]
    assert [message.options for message in service.messages if message.HasField("options")] == [options]


async def test_the_catalog_shows_and_checks() -> None:
    server = aio.server()
    catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(Shelf(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        catalog = client.catalog
        assert [agent.name async for agent in catalog.agents()] == ["lead", "writer"]
        assert (await catalog.agent("lead")).name == "lead"
        assert [tool.name async for tool in catalog.tools()] == ["search"]
        assert [model.name async for model in catalog.models()] == ["default"]
        violations = await catalog.validate([agent_pb2.AgentDefinition(name="typo")])
        assert violations == (catalog_service_pb2.Violation(agent="typo", field="llm"),)
    await server.stop(0)
