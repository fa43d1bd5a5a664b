"""Calls that are not streams of events: pages, filters, and events sent for aggregation."""

from datetime import UTC, datetime

from google.protobuf import field_mask_pb2, timestamp_pb2
from grpc import aio

from bough import AsyncClient, collect, text_of
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    catalog_service_pb2,
    catalog_service_pb2_grpc,
    eval_service_pb2,
    eval_service_pb2_grpc,
    evaluation_ref_pb2,
    event_pb2,
    execution_pb2,
    invocation_pb2,
    model_pb2,
    run_pb2,
    tool_pb2,
)
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import LoopbackService, connected


async def test_a_list_fetches_page_after_page() -> None:
    async with connected(LoopbackService([])) as client:
        assert [run.run_id async for run in client.list_runs(page_size=2)] == [f"run-{n}" for n in range(5)]


async def test_a_run_is_given_and_cancelled_by_its_id() -> None:
    service = LoopbackService([])
    async with connected(service) as client:
        assert (await client.get_run(RUN_ID)).run_id == RUN_ID
        assert (await client.cancel(RUN_ID)).run_id == RUN_ID
    assert service.cancelled_runs == [RUN_ID]


async def test_ask_returns_the_text_of_the_final_answer() -> None:
    async with connected(LoopbackService(desk())) as client:
        assert await client.ask("lead", "Write about owls.") == "Owls hunt at night."


async def test_a_list_of_runs_has_its_filters_on_every_page() -> None:
    service = LoopbackService([])
    async with connected(service) as client:
        runs = client.list_runs(
            session_id="s",
            agent="lead",
            states=[execution_pb2.EXECUTION_STATE_FAILED],
            labels={"pr": "7"},
            create_time_from=datetime(2026, 1, 1, tzinfo=UTC),
            create_time_before=datetime(2026, 1, 2, tzinfo=UTC),
            evaluation_id="e",
            case_id="oslo",
            evaluation_role=evaluation_ref_pb2.EVALUATION_ROLE_JUDGE,
            include_evaluation_runs=True,
            page_size=3,
        )
        assert len([run async for run in runs]) == 5
    wanted = run_pb2.RunFilter(
        session_id="s",
        agent="lead",
        states=[execution_pb2.EXECUTION_STATE_FAILED],
        labels={"pr": "7"},
        create_time_from=timestamp_pb2.Timestamp(seconds=1767225600),
        create_time_before=timestamp_pb2.Timestamp(seconds=1767312000),
        evaluation_id="e",
        case_id="oslo",
        evaluation_role=evaluation_ref_pb2.EVALUATION_ROLE_JUDGE,
        include_evaluation_runs=True,
    )
    assert service.listed == [
        agent_service_pb2.ListRunsRequest(page_size=3, filter=wanted),
        agent_service_pb2.ListRunsRequest(page_size=3, filter=wanted, page_token="3"),
    ]


async def test_the_final_answer_is_there_once_the_run_has_succeeded() -> None:
    service = LoopbackService(desk()[:5])
    async with connected(service) as client:
        assert await client.get_final_answer(RUN_ID) is None
        service.events = list(desk())
        answer = await client.get_final_answer(RUN_ID)
    assert answer is not None
    assert text_of(answer) == "Owls hunt at night."


async def test_a_note_goes_with_a_cancellation() -> None:
    service = LoopbackService([])
    async with connected(service) as client:
        await client.cancel(RUN_ID, note="The wrong customer.")
        await client.cancel(RUN_ID)
    assert service.notes == ["The wrong customer.", ""]


async def test_a_turn_may_have_its_session_created() -> None:
    service = LoopbackService(desk())
    async with connected(service) as client:
        create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE
        await collect(client.run("lead", "hi", session_id="chat-7", on_missing_session=create))
    (request,) = service.asked
    assert isinstance(request, agent_service_pb2.RunRequest)
    assert (request.session_id, request.on_missing_session) == ("chat-7", create)


class Aggregation(eval_service_pb2_grpc.EvalServiceServicer):
    """Counts what arrives."""

    def __init__(self) -> None:
        self.messages: list[eval_service_pb2.AggregateEventsRequest] = []

    async def GetInvocation(self, request, context):
        return eval_service_pb2.GetInvocationResponse(invocation=invocation_pb2.Invocation(run_id=request.run_id))

    async def AggregateEvents(self, request_iterator, context):
        self.messages = [message async for message in request_iterator]
        total = sum(len(message.events) for message in self.messages)
        return eval_service_pb2.AggregateEventsResponse(invocation=invocation_pb2.Invocation(agents_total=total))


def stored(name: str, revision: str) -> agent_pb2.Agent:
    return agent_pb2.Agent(definition=agent_pb2.AgentDefinition(name=name), revision=revision)


class Shelf(catalog_service_pb2_grpc.CatalogServiceServicer):
    """Two agents."""

    def __init__(self) -> None:
        self.updates: list[catalog_service_pb2.UpdateAgentRequest] = []

    async def GetAgent(self, request, context):
        return catalog_service_pb2.GetAgentResponse(agent=stored(request.name, request.revision or "now"))

    async def ListAgents(self, request, context):
        return catalog_service_pb2.ListAgentsResponse(agents=[stored("lead", "r1"), stored("writer", "r2")])

    async def UpdateAgent(self, request, context):
        self.updates.append(request)
        return catalog_service_pb2.UpdateAgentResponse(agent=agent_pb2.Agent(definition=request.definition))

    async def ListTools(self, request, context):
        return catalog_service_pb2.ListToolsResponse(tools=[tool_pb2.ToolInfo(name="search")])

    async def ListModels(self, request, context):
        return catalog_service_pb2.ListModelsResponse(models=[model_pb2.ModelInfo(name="default")])

    async def ValidateAgents(self, request, context):
        violations = [catalog_service_pb2.DefinitionViolation(agent=d.name, field="llm") for d in request.definitions]
        return catalog_service_pb2.ValidateAgentsResponse(violations=violations)


async def test_events_are_aggregated_in_messages_of_a_bounded_size() -> None:
    service, server = Aggregation(), aio.server()
    eval_service_pb2_grpc.add_EvalServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = invocation_pb2.InvocationOptions(max_agents=3)
    events = [event_pb2.AgentEvent(sequence=number) for number in range(1, 601)]
    large = [
        event_pb2.AgentEvent(sequence=number, llm_output_text_delta=event_pb2.LlmOutputTextDelta(text="x" * 700_000))
        for number in range(601, 604)
    ]
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        assert (await client.aggregate([*events, *large], options=options)).agents_total == 603
        assert (await client.get_invocation("r1")).run_id == "r1"
    await server.stop(0)
    assert [len(message.events) for message in service.messages] == [256, 256, 89, 1, 1]
    assert [message.options for message in service.messages if message.HasField("options")] == [options]


async def test_the_catalog_shows_checks_and_changes() -> None:
    server = aio.server()
    shelf = Shelf()
    catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(shelf, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        catalog = client.catalog
        assert [agent async for agent in catalog.list_agents()] == [stored("lead", "r1"), stored("writer", "r2")]
        assert await catalog.get_agent("lead") == stored("lead", "now")
        assert await catalog.get_agent("lead", revision="r0") == stored("lead", "r0")
        assert [tool.name async for tool in catalog.list_tools()] == ["search"]
        assert [model.name async for model in catalog.list_models()] == ["default"]
        violations = await catalog.validate_agents([agent_pb2.AgentDefinition(name="typo")])
        assert violations == (catalog_service_pb2.DefinitionViolation(agent="typo", field="llm"),)
        read = await catalog.get_agent("lead")
        read.definition.description = "Leads."
        changed = await catalog.update_agent(read.definition, revision=read.revision, fields=["description"])
        assert changed.definition == read.definition
    await server.stop(0)
    assert shelf.updates == [
        catalog_service_pb2.UpdateAgentRequest(
            definition=read.definition,
            update_mask=field_mask_pb2.FieldMask(paths=["description"]),
            revision="now",
        )
    ]
