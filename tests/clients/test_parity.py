"""Parity of the two clients: the same methods with the same parameters and the same results."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from bough import (
    AsyncClient,
    Client,
    NotFound,
    Unavailable,
    answer_of,
    collect,
    collect_sync,
    run_source,
    user_message,
)
from bough.catalog import Catalog
from bough.evaluations import Evaluations
from bough.sessions import Sessions
from bough.stream import EvaluationStream, RunStream
from bough.sync.catalog import SyncCatalog
from bough.sync.evaluations import SyncEvaluations
from bough.sync.sessions import SyncSessions
from bough.sync.stream import SyncEvaluationStream, SyncRunStream
from bough.sync.usage import SyncLedger
from bough.usage import Ledger
from bough.v1 import (
    MISSING_SESSION_POLICY_CREATE,
    USAGE_DIMENSION_MODEL,
    VERDICT_PASSED,
    AgentEvent,
    EvalCase,
    EvalSet,
    EvalTurn,
    FollowOptions,
    InvocationOptions,
    RunPolicy,
    RunRequest,
)
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import LoopbackService, listening
from tests.rpc.catalog_server import define, team_settings
from tests.rpc.run_server import served

PAIRS = [
    (AsyncClient, Client),
    (Catalog, SyncCatalog),
    (Evaluations, SyncEvaluations),
    (Sessions, SyncSessions),
    (Ledger, SyncLedger),
    (RunStream, SyncRunStream),
    (EvaluationStream, SyncEvaluationStream),
]

SYNCHRONOUS = {
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__anext__": "__next__",
    "collections.abc.Iterable[bough.v1.event_pb2.AgentEvent] | "
    "collections.abc.AsyncIterable[bough.v1.event_pb2.AgentEvent]": (
        "collections.abc.Iterable[bough.v1.event_pb2.AgentEvent]"
    ),
    "collections.abc.AsyncIterator": "collections.abc.Iterator",
    "grpc.aio._base_channel.Channel": "grpc.Channel",
    "bough.stream.RunStream": "bough.sync.stream.SyncRunStream",
    "bough.stream.EvaluationStream": "bough.sync.stream.SyncEvaluationStream",
}
"""Asynchronous names and annotations, and their synchronous counterparts."""


def synchronous(text: str) -> str:
    for asynchronous, other in SYNCHRONOUS.items():
        text = text.replace(asynchronous, other)
    return text


def own(kind: type) -> dict[str, Any]:
    """Return the members that a class has from this package, inherited ones included."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("bough.")]
    return {name: member for each in ours for name, member in vars(each).items()}


def surface(kind: type) -> dict[str, str]:
    """Return the public members of a class and of its context, each with its parameters, defaults and annotations."""
    context = ("__aenter__", "__aexit__", "__anext__", "__enter__", "__exit__", "__next__")
    members = {name: member for name, member in own(kind).items() if not name.startswith("_") or name in context}
    if kind in (AsyncClient, Client):
        members["__init__"] = vars(kind)["__init__"]
    return {
        synchronous(name): synchronous(
            f"property {inspect.signature(member.fget)}" if isinstance(member, property) else str(signature(member))
        )
        for name, member in members.items()
    }


def signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    parameters = [
        f"{one.kind.name} {one.name}: {inspect.formatannotation(one.annotation)} = {one.default!r}"
        for one in found.parameters.values()
    ]
    return f"{', '.join(parameters)} -> {inspect.formatannotation(found.return_annotation)}"


@pytest.mark.parametrize(("asynchronous", "other"), PAIRS)
def test_both_clients_have_the_same_methods_with_the_same_parameters(asynchronous: type, other: type) -> None:
    assert surface(asynchronous) == surface(other)
    assert len(surface(other)) >= 5


def test_every_method_that_makes_a_call_takes_a_timeout() -> None:
    without = {
        f"{kind.__name__}.{name}"
        for pair in PAIRS[:4]
        for kind in pair
        for name, member in own(kind).items()
        if not name.startswith("_") and "timeout" not in member.__annotations__
    }
    assert without == {"AsyncClient.close", "Client.close"}


def test_without_an_event_loop_nothing_is_awaited() -> None:
    functions = [member for _, kind in PAIRS for member in own(kind).values() if inspect.isfunction(member)]
    assert not [one for one in functions if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one)]


async def test_both_clients_have_the_same_attributes() -> None:
    async with AsyncClient("127.0.0.1:1") as one:
        with Client("127.0.0.1:1") as other:
            public = [{name for name in vars(each) if not name.startswith("_")} for each in (one, other)]
            assert public == [{"address", "catalog", "evaluations", "sessions", "usage"}] * 2
            assert one.address == other.address == "127.0.0.1:1"


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    """A whole server with agents in a file and in code."""
    async with served(team_settings(tmp_path)) as server:
        yield server.app.address


async def listed(items: AsyncIterator[Message]) -> list[Message]:
    return [item async for item in items]


async def test_what_the_synchronous_client_reads_is_what_the_asynchronous_one_reads(address: str) -> None:
    def turn() -> tuple[str, list[Any]]:
        with Client(address) as client:
            assert client.ask("coach", "Go.") == "The coach's word."
            (run,) = client.list_runs(agent="coach")
            log = list(client.watch(run.run_id))
            lists = [client.list_runs(page_size=1), client.sessions.list()]
            lists += [client.usage.list_groups([USAGE_DIMENSION_MODEL]), client.usage.list_entries(page_size=1)]
            more = [client.catalog.list_agents(page_size=1), client.catalog.list_tools(), client.catalog.list_models()]
            messages = client.sessions.list_messages(run.session_id, page_size=1)
            read = [client.get_run(run.run_id), client.get_invocation(run.run_id), client.sessions.get(run.session_id)]
            records = [client.get_final_answer(run.run_id), client.aggregate(log), client.tree(run.run_id).invocation]
            return run.run_id, [*map(list, [*lists, *more, messages]), *read, log, *records]

    async with AsyncClient(address) as client:
        await client.catalog.create_agent(define("coach"))
        run_id, seen = await asyncio.to_thread(turn)
        run = await client.get_run(run_id)
        log = await collect(client.watch(run_id))
        assert seen == [
            await listed(client.list_runs()),
            await listed(client.sessions.list()),
            await listed(client.usage.list_groups([USAGE_DIMENSION_MODEL], page_size=1)),
            await listed(client.usage.list_entries()),
            await listed(client.catalog.list_agents()),
            await listed(client.catalog.list_tools()),
            await listed(client.catalog.list_models()),
            await listed(client.sessions.list_messages(run.session_id)),
            run,
            await client.get_invocation(run_id),
            await client.sessions.get(run.session_id),
            list(log.events),
            await client.get_final_answer(run_id),
            await client.aggregate(log.events),
            (await client.tree(run_id)).invocation,
        ]
    assert all(seen)


async def test_both_clients_ask_for_the_health_of_a_server(address: str) -> None:
    def ask() -> list[bool]:
        with Client(address) as client:
            with pytest.raises(NotFound):
                client.is_serving("bough.v1.NoService")
            return [client.is_serving(), client.is_serving("bough.v1.EvalService")]

    async with AsyncClient(address) as client:
        assert [await client.is_serving(), await client.is_serving("bough.v1.EvalService")] == [True, True]
    assert await asyncio.to_thread(ask) == [True, True]


async def test_the_synchronous_client_changes_agents_and_sessions(address: str) -> None:
    def change() -> None:
        with Client(address) as client:
            created = client.catalog.create_agent(define("coach"))
            definition = define("coach", description="Trains.")
            changed = client.catalog.update_agent(definition, revision=created.revision, fields=["description"])
            assert client.catalog.get_agent("coach") == changed != created
            assert [each.field for each in client.catalog.validate_agents([define("coach", tools=["nothing"])])] == [
                "llm.tools[0].name"
            ]
            client.catalog.delete_agent("coach", revision=changed.revision)
            with pytest.raises(NotFound):
                client.catalog.get_agent("coach")
            session = client.sessions.create(labels={"of": "parity"})
            assert list(client.sessions.list(labels={"of": "parity"})) == [session]
            assert client.sessions.update(session.session_id, labels={"of": "both"}).labels == {"of": "both"}
            assert client.sessions.update_state(session.session_id, {"mood": "good"}) == '{"mood":"good"}'
            assert client.sessions.get_state(session.session_id) == '{"mood":"good"}'
            client.sessions.delete(session.session_id)
            with pytest.raises(NotFound):
                client.sessions.get(session.session_id)

    await asyncio.to_thread(change)


async def test_both_clients_evaluate_and_read_what_was_found(address: str) -> None:
    trips = EvalSet(name="trips", agent="coach", cases=[EvalCase(id="go", turns=[EvalTurn(user="Go.")])])

    def evaluate() -> list[Any]:
        with Client(address) as client:
            with client.evaluations.run(trips, trials=2, labels={"pr": "7"}) as stream:
                evaluation_id = stream.started()
                events = list(stream)
                result = stream.result()
            source = run_source(result.cases[0].trials[0].turns[0].run_id)
            ended = client.evaluations.cancel(evaluation_id, note="It has ended.")
            return [
                events,
                list(client.evaluations.watch(evaluation_id, after_sequence=1)),
                list(client.evaluations.list(labels={"pr": "7"})),
                client.evaluations.get(evaluation_id),
                ended,
                result,
                list(client.evaluations.cases(evaluation_id)),
                list(client.list_runs(evaluation_id=evaluation_id)),
                client.evaluations.compare(evaluation_id, result),
                client.evaluations.score([source]),
                client.evaluations.diff(source, source),
            ]

    async with AsyncClient(address) as client:
        await client.catalog.create_agent(define("coach"))
        found = await asyncio.to_thread(evaluate)
        calls, evaluation_id = client.evaluations, found[0][0].evaluation_id
        result = await calls.result(evaluation_id)
        source = run_source(result.cases[0].trials[0].turns[0].run_id)
        assert found == [
            await listed(calls.watch(evaluation_id)),
            await listed(calls.watch(evaluation_id, after_sequence=1)),
            await listed(calls.list(eval_set_name="trips")),
            await calls.get(evaluation_id),
            await calls.cancel(evaluation_id),
            result,
            await listed(calls.cases(evaluation_id)),
            await listed(client.list_runs(evaluation_id=evaluation_id)),
            await calls.compare(result, evaluation_id),
            await calls.score([source]),
            await calls.diff(source, source),
        ]
    assert (result.totals.trials_passed, result.verdict) == (2, VERDICT_PASSED)
    assert sorted(run.evaluation.trial for run in found[7]) == [0, 1]


async def test_events_are_sent_for_aggregation_in_as_many_messages(address: str) -> None:
    events = [AgentEvent(sequence=number, invocation_id="root", agent="lead") for number in range(1, 601)]

    def aggregated() -> Message:
        with Client(address) as client:
            return client.aggregate(iter(events), options=InvocationOptions(max_agents=3))

    async with AsyncClient(address) as client:
        record = await client.aggregate(events, options=InvocationOptions(max_agents=3))
    assert await asyncio.to_thread(aggregated) == record
    assert record.as_of_sequence == 600


async def test_ask_starts_the_run_that_run_starts() -> None:
    service = LoopbackService(desk())
    policy, own = RunPolicy(background=True), define("lead")

    def ask(port: int) -> str:
        with Client(f"127.0.0.1:{port}") as client:
            return client.ask(
                "lead",
                "hi",
                session_id="s1",
                on_missing_session=MISSING_SESSION_POLICY_CREATE,
                request_id="mine",
                definitions=[own],
                policy=policy,
                labels={"pr": "7"},
                timeout=30,
            )

    async with listening(service) as port:
        assert await asyncio.to_thread(ask, port) == "Owls hunt at night."
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            answer = await client.ask(
                "lead",
                "hi",
                session_id="s1",
                on_missing_session=MISSING_SESSION_POLICY_CREATE,
                request_id="mine",
                definitions=[own],
                policy=policy,
                labels={"pr": "7"},
                timeout=30,
            )
    assert answer == "Owls hunt at night."
    wanted = RunRequest(
        agent="lead",
        session_id="s1",
        on_missing_session=MISSING_SESSION_POLICY_CREATE,
        request_id="mine",
        definitions=[own],
        policy=policy,
        labels={"pr": "7"},
        input=user_message("hi"),
        follow=FollowOptions(),
    )
    assert service.asked == [wanted] * 2


async def test_a_synchronous_stream_cancels_its_run() -> None:
    service = LoopbackService(desk())

    def cancel(port: int) -> str:
        with Client(f"127.0.0.1:{port}") as client, client.run("lead", "hi") as stream:
            assert stream.cancel().run_id == RUN_ID
            return answer_of(collect_sync(stream))

    async with listening(service) as port:
        assert await asyncio.to_thread(cancel, port) == "Owls hunt at night."
    assert service.cancelled_runs == [RUN_ID]


async def test_a_synchronous_client_may_wait_for_its_server() -> None:
    def get(port: int, wait_for_ready: bool) -> str:
        options = (("grpc.enable_retries", 0),)
        with Client(f"127.0.0.1:{port}", wait_for_ready=wait_for_ready, options=options) as client:
            return client.get_run(RUN_ID).run_id

    async with listening(LoopbackService([])) as port:
        pass
    with pytest.raises(Unavailable):
        await asyncio.to_thread(get, port, False)
    waiting = asyncio.create_task(asyncio.to_thread(get, port, True))
    async with listening(LoopbackService([]), port=port):
        assert await waiting == RUN_ID
