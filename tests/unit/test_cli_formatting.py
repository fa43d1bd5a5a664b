"""The words of the command line: runs by a part of their id, states, names of events, tables."""

import grpc
import pytest
import typer
from google.protobuf import timestamp_pb2
from grpc import aio

from bough.errors import build_deadline_error, from_rpc_error
from bough.v1 import (
    agent_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    message_pb2,
    model_pb2,
    policy_pb2,
    run_pb2,
    session_pb2,
    usage_pb2,
)
from bough_server.agents.definition import definition_yaml, parse_definition
from bough_server.cli.connection import resolve_run
from bough_server.cli.conversions import event_names_of, is_named, policy_of, state_of, view_of
from bough_server.cli.exit_codes import sentences
from bough_server.cli.options import Delta, OnBusy, OnDisconnect, View, parse_seconds
from bough_server.cli.render.format import state_text
from bough_server.cli.render.tables import (
    agent_lines,
    agents_table,
    message_lines,
    models_table,
    runs_table,
    session_lines,
    sessions_table,
)
from bough_server.documents.yaml import parse_documents
from bough_server.errors import ConfigurationError
from tests.clients.stream_server import LoopbackService, connected
from tests.clients.waiting_run_server import approval, question

NOON = timestamp_pb2.Timestamp(seconds=1_700_000_000)


async def test_last_is_the_newest_run() -> None:
    async with connected(LoopbackService([])) as client:
        assert await resolve_run(client, "last") == "run-0"


async def test_the_last_run_is_no_part_of_an_evaluation_but_an_end_of_an_id_may_be_that_of_one() -> None:
    service = LoopbackService([], runs=["0193d6b4-aaaaaa"])
    async with connected(service) as client:
        assert {await resolve_run(client, text) for text in ("last", "b4-aaaaaa")} == {"0193d6b4-aaaaaa"}
    assert [request.filter.include_evaluation_runs for request in service.listed] == [False, True]


async def test_a_full_id_needs_no_call() -> None:
    async with connected(LoopbackService([])) as client:
        await client.close()
        full = "0193D6B4-0000-7000-8000-00000000ABCD"
        assert await resolve_run(client, full) == full.lower()


async def test_a_run_is_meant_by_the_beginning_or_the_end_of_its_id() -> None:
    service = LoopbackService([], runs=["0193d6b4-aaaaaa", "0193d6b4-bbaaaa", "0193d7c5-cccccc"])
    async with connected(service) as client:
        assert await resolve_run(client, "bbAAAA") == "0193d6b4-bbaaaa"
        assert await resolve_run(client, "0193D7") == "0193d7c5-cccccc"
        for text, words in (
            ("cccc", "too short"),
            ("dddddd", "no run whose id begins or ends with"),
            ("193d6b4", "no run whose id"),
            ("0193d6b4", "2 run ids begin or end with .*, such as 0193d6b4-aaaaaa and 0193d6b4-bbaaaa"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                await resolve_run(client, text)


async def test_the_last_of_no_runs_is_refused() -> None:
    async with connected(LoopbackService([], runs=[])) as client:
        with pytest.raises(ConfigurationError, match="no run yet"):
            await resolve_run(client, "last")


def test_durations_are_seconds() -> None:
    assert (parse_seconds("10m"), parse_seconds("1500ms")) == (600.0, 1.5)
    for text in ("soon", "-1s", "0s"):
        with pytest.raises(typer.BadParameter):
            parse_seconds(text)


def test_flags_become_the_schema_words() -> None:
    assert view_of(View.SUMMARY) == follow_pb2.EVENT_VIEW_SUMMARY
    assert policy_of(None, None) == policy_pb2.RunPolicy()
    assert policy_of(Delta.PASSTHROUGH, OnDisconnect.CONTINUE) == policy_pb2.RunPolicy(
        deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()),
        on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE,
    )
    assert policy_of(Delta.AGGREGATED, OnDisconnect.CANCEL) == policy_pb2.RunPolicy(
        deltas=policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas()),
        on_disconnect=policy_pb2.DISCONNECT_POLICY_CANCEL,
    )


@pytest.mark.parametrize("on_busy", OnBusy)
def test_every_way_with_a_busy_session_has_its_word(on_busy: OnBusy) -> None:
    (field,) = policy_of(None, None, on_busy).ListFields()
    assert policy_pb2.BusySessionPolicy.Name(field[1]) == f"BUSY_SESSION_POLICY_{on_busy.name}"


@pytest.mark.parametrize(
    "name",
    ["input_required", "INPUT_REQUIRED", "input-required", "input required", "EXECUTION_STATE_INPUT_REQUIRED"],
)
def test_a_state_is_meant_as_it_is_printed_and_as_the_schema_names_it(name: str) -> None:
    assert state_of(name) == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED


@pytest.mark.parametrize("state", execution_pb2.ExecutionState.values()[1:])
def test_every_state_that_is_printed_can_be_given(state: execution_pb2.ExecutionState.ValueType) -> None:
    assert state_of(state_text(state)) == state


def test_a_state_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no state 'done': use one of pending, running"):
        state_of("done")


def test_names_of_events_may_leave_out_their_root() -> None:
    names = event_names_of("tool.started, agent.llm.*")
    assert names == ("agent.tool.started", "agent.llm.*")
    asked = ["agent.tool.started", "agent.tool.completed", "agent.llm.started", "agent.llms"]
    assert [is_named(name, names) for name in asked] == [True, False, True, False]
    assert is_named("agent.run.started", ()) is True
    for given in ("run_started", "RUN_STARTED", "run.started", "agent.run.started"):
        assert event_names_of(given) == ("agent.run.started",)
    with pytest.raises(
        ConfigurationError, match=r"no event 'agent.tool.complete'. Did you mean 'agent.tool.completed'"
    ):
        event_names_of("tool.complete")


def test_runs_are_rows() -> None:
    run_id = "0193d6b4-0000-7000-8000-00000000abcd"
    run = run_pb2.Run(run_id=run_id, agent="lead", state=execution_pb2.EXECUTION_STATE_FAILED, create_time=NOON)
    assert [line.plain for line in runs_table([run], width=100)] == [
        "run                                   state      created           agent",
        f"{run_id}  failed     2023-11-14 22:13  lead",
    ]
    assert max(len(line.plain) for line in runs_table([run], width=60)) <= 60


def test_below_a_run_stands_what_it_has_used_so_far_and_how_its_input_begins() -> None:
    used = usage_pb2.Usage(input_tokens=1_000, output_tokens=204, cost_nanos=1_250_000, currency_code="USD")
    runs = [
        run_pb2.Run(run_id="r1", agent="lead", state=execution_pb2.EXECUTION_STATE_RUNNING, create_time=NOON),
        run_pb2.Run(run_id="r2", input_excerpt="Write about\nowls. " * 9, tree_usage=used, create_time=NOON),
        run_pb2.Run(run_id="r3", input_excerpt="Hello.", tree_usage=usage_pb2.Usage(tool_calls=1), create_time=NOON),
    ]
    below = [line.plain for line in runs_table(runs, width=60)][1:]
    assert [line.split("  ")[0] for line in below if not line.startswith(" ")] == ["r1", "r2", "r3"]
    assert [line for line in below if line.startswith(" ")] == [
        "  1,204 tokens · 0.0013 USD · Write about owls. Write about…",
        "  Hello.",
    ]


def test_below_a_run_stands_what_it_asks_comes_from_and_misses() -> None:
    waiting = run_pb2.Run(
        run_id="r2",
        agent="lead",
        state=execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        create_time=NOON,
        open_requests=[approval(), question()],
        forked_from=fork_pb2.ForkOrigin(run_id="r1", sequence=7),
    )
    parked = run_pb2.Run(
        run_id="r3",
        agent="lead",
        state=execution_pb2.EXECUTION_STATE_RUNNING,
        create_time=NOON,
        parked_reason="No agent\n'lead'.",
    )
    assert [line.plain for line in runs_table([waiting, parked], width=100)][1:] == [
        "r2                                    input_required  2023-11-14 22:13  lead",
        "  ⑂ fork of run r1 after 7",
        '  ? lead/refunds asks for approval of refund {"amount": 180}',
        "  ? lead/interviewer asks: Why does it come back?",
        "r3                                    running         2023-11-14 22:13  lead",
        "  ‖ parked: No agent 'lead'.",
    ]


def test_sessions_are_rows_and_fields() -> None:
    session = session_pb2.Session(session_id="s1", user_id="local", create_time=NOON, labels={"pr": "7"})
    assert [line.plain for line in sessions_table([session], width=80)] == [
        "session                               last run          held by",
        "s1                                    -                 -",
    ]
    assert [line.plain for line in session_lines(session, width=80)] == [
        "session   s1",
        "user      local",
        "created   2023-11-14 22:13",
        "last run  -",
        "held by   -",
        "label     pr=7",
    ]
    session.last_run_time.CopyFrom(timestamp_pb2.Timestamp(seconds=1_700_003_600))
    session.current_run_id = "r1"
    assert sessions_table([session], width=80)[1].plain == "s1                                    2023-11-14 23:13  r1"
    assert [line.plain for line in session_lines(session, width=80)][3:] == [
        "last run  2023-11-14 23:13",
        "held by   r1",
        "label     pr=7",
    ]


def test_agents_say_their_model_and_what_they_do() -> None:
    agents = [
        agent_pb2.Agent(
            definition=agent_pb2.AgentDefinition(
                name="lead", description="Leads.", llm=agent_pb2.LlmAgent(model="default")
            ),
            kind=execution_pb2.AGENT_KIND_LLM,
        ),
        agent_pb2.Agent(
            definition=agent_pb2.AgentDefinition(name="writer", description="Writes\ntexts.", llm=agent_pb2.LlmAgent()),
            kind=execution_pb2.AGENT_KIND_LLM,
        ),
        agent_pb2.Agent(
            definition=agent_pb2.AgentDefinition(name="coded", description="Counts."),
            source=agent_pb2.AGENT_SOURCE_CODE,
            kind=execution_pb2.AGENT_KIND_FUNCTION,
        ),
        agent_pb2.Agent(
            definition=agent_pb2.AgentDefinition(name="line", description="Waits.", sequence=agent_pb2.SequenceAgent()),
            kind=execution_pb2.AGENT_KIND_SEQUENCE,
        ),
    ]
    assert [line.plain for line in agents_table(agents, width=80)] == [
        "agent   model       what it does",
        "lead    default     Leads.",
        "writer  (caller's)  Writes texts.",
        "coded   (code)      Counts.",
        "line    (sequence)  Waits.",
    ]


def test_of_an_agent_is_said_where_it_stands_and_since_when() -> None:
    later = timestamp_pb2.Timestamp(seconds=1_700_003_600)
    definition = agent_pb2.AgentDefinition(name="lead", description="Leads.", llm=agent_pb2.LlmAgent(model="default"))
    stored = agent_pb2.Agent(
        definition=definition,
        revision="0123456789abcdef" * 4,
        source=agent_pb2.AGENT_SOURCE_STORED,
        kind=execution_pb2.AGENT_KIND_LLM,
        create_time=NOON,
        revision_create_time=later,
    )
    assert agent_lines(stored) == [
        "source: stored",
        "revision: 0123456789ab",
        "create_time: 2023-11-14T22:13:20Z",
        "revision_create_time: 2023-11-14T23:13:20Z",
    ]
    assert [line.plain for line in agents_table([stored], width=80)] == [
        "agent  model    revision      stored            what it does",
        "lead   default  0123456789ab  2023-11-14 23:13  Leads.",
    ]
    in_a_file = agent_pb2.Agent(definition=definition, revision="f" * 64, source=agent_pb2.AGENT_SOURCE_FILE)
    assert agent_lines(in_a_file) == ["source: file", "revision: ffffffffffff"]


def test_models_say_who_answers_where_they_cannot() -> None:
    models = [
        model_pb2.ModelInfo(name="default", provider="openai", model="gpt-5-mini", fallbacks=["b", "local"]),
        model_pb2.ModelInfo(name="b", provider="scripted"),
    ]
    assert [line.plain for line in models_table(models, width=80)] == [
        "model    provider  at the provider  fallbacks",
        "default  openai    gpt-5-mini       b, local",
        "b        scripted  -                -",
    ]


def test_a_definition_is_shown_as_a_file_would_hold_it() -> None:
    llm = agent_pb2.LlmAgent(model="default", instruction="You lead.\nAsk first.\n")
    links = [agent_pb2.AgentLink(agent="writer", on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)]
    definition = agent_pb2.AgentDefinition(name="lead", description="Leads: all.", llm=llm, sub_agents=links)
    text = definition_yaml(definition)
    assert text.splitlines()[:6] == [
        "name: lead",
        "description: 'Leads: all.'",
        "llm:",
        "  model: default",
        "  instruction: |",
        "    You lead.",
    ]
    (document,) = parse_documents(text, path="shown.yaml")
    source, problems = parse_definition(document)
    assert (source.definition, problems) == (definition, [])


def test_messages_show_their_author_text_and_calls() -> None:
    call = message_pb2.ToolCall(name="search", arguments_json='{"query": "owls"}')
    message = message_pb2.Message(
        position=3,
        author="lead",
        kind=message_pb2.MESSAGE_KIND_SUB_AGENT_ASSISTANT,
        parts=[message_pb2.Part(text="Let me look.\nNow."), message_pb2.Part(tool_call=call)],
    )
    assert [line.plain for line in message_lines(message, width=80)] == [
        "   3  lead  sub_agent_assistant",
        "      Let me look.",
        "      Now.",
        '      → search {"query": "owls"}',
    ]


def test_a_deadline_that_only_grpc_speaks_of_is_a_sentence() -> None:
    passed = from_rpc_error(aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, details="Deadline Exceeded"))
    assert list(sentences(passed)) == ["The call's deadline passed before the server answered."]
    assert list(sentences(build_deadline_error("It took too long."))) == ["It took too long."]
