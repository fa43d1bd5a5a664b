"""The client against whole servers that stop and restart: every sequence once, in order, and the same run."""

from pathlib import Path

import grpc
from google.protobuf import descriptor, descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from bough import AsyncClient, Rejoining, collect, user_message
from bough.v1 import agent_service_pb2, event_pb2, execution_pb2
from bough_server.log import events
from tests.rpc.agents import GATES
from tests.rpc.run_server import served, settings
from tests.support.cutting_proxy import proxying
from tests.support.log_laws import check_laws
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate

SOON = Rejoining(first_delay=0.01, longest_delay=0.05, timeout=30.0)


def _client(address: str) -> AsyncClient:
    return AsyncClient(address, timeout=60, rejoining=SOON)


async def test_a_stream_goes_on_over_a_killed_server_and_its_successor(tmp_path: Path) -> None:
    async with standing_gate() as gate:
        script = {"waiter": [{"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}, "It is over."]}
        config = write_project(tmp_path, llm("waiter", tools=["wait_at"]), script=script)
        async with (
            serving(config) as server,
            proxying(server.address) as proxy,
            _client(proxy.address) as client,
            client.run("waiter", "Wait.") as stream,
        ):
            before = [await anext(stream)]
            while not before[-1].HasField("tool_started"):
                before.append(await anext(stream))
            await gate.arrived.wait()
            await server.kill()
            gate.open()
            async with serving(config) as successor:
                proxy.target = successor.address
                run = await collect(stream, earlier=before)
                log = await collect(client.watch(stream.run_id))
    assert run == log
    check_laws(log.events)
    assert [event.attempt for event in log.events if event.HasField("tool_started")] == [1, 2]
    assert (log.state, log.answer) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, "It is over.")


async def test_a_stream_goes_on_over_connections_that_are_cut_and_the_run_does_not_notice(tmp_path: Path) -> None:
    async with (
        served(settings(tmp_path)) as server,
        proxying(server.app.address) as proxy,
        _client(proxy.address) as client,
        client.run("waiter", "cut") as stream,
    ):
        seen = [await anext(stream)]
        for _ in range(3):
            proxy.cut()
            # The next call has to come by a new connection.
            assert (await client.get_run(stream.run_id)).state == execution_pb2.EXECUTION_STATE_RUNNING
        GATES["cut"].set()
        collected = await collect(stream)
        log = await collect(client.watch(stream.run_id))
        again = await collect(client.run("lead", user_message("hi")))
        tree = await client.get_invocation(again.run_id)
    assert proxy.connections >= 4
    assert seen + list(collected.events) == list(log.events)
    assert [event.sequence for event in log.events] == [1, 2, 3]
    check_laws(log.events)
    assert (log.state, log.answer) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, "opened")
    assert again.answer == "hi 1, hi 2, hi 3"
    assert tree.tree_usage == again.usage


async def test_what_is_collected_of_a_run_is_its_log(tmp_path: Path) -> None:
    async with served(settings(tmp_path)) as server, _client(server.app.address) as client:
        run = await collect(client.run("lead", "hi"))
        log = await collect(client.watch(run.run_id))
        half = await collect(client.watch(run.run_id, after_sequence=run.last_sequence // 2))
        session = [message async for message in client.sessions.list_messages(run.session_id)]
    assert run == log
    assert half.events == run.events[run.last_sequence // 2 :]
    assert (half.state, half.message) == (run.state, run.message)
    assert run.message is not None
    assert session[0].parts == run.message.parts
    check_laws(run.events)


def _older_response() -> type[Message]:
    """Return RunResponse as an older client has it, whose schema has no sub-agents."""
    pool = descriptor_pool.DescriptorPool()
    loaded: set[str] = set()

    def load(file: descriptor.FileDescriptor) -> None:
        source = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(source)
        if source.name in loaded:
            return
        loaded.add(source.name)
        for dependency in file.dependencies:
            load(dependency)
        for message in source.message_type:
            if message.name == "AgentEvent":
                kept = [field for field in message.field if not field.name.startswith("sub_agent")]
                del message.field[:]
                message.field.extend(kept)
        pool.Add(source)

    load(agent_service_pb2.DESCRIPTOR)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bough.v1.RunResponse"))


def _events(response: Message) -> list[event_pb2.AgentEvent]:
    """Return the events of a response of any schema; they have the fields of ours."""
    found: list[event_pb2.AgentEvent] = response.batch.events  # type: ignore[attr-defined]
    return list(found)


async def test_a_client_with_an_older_schema_reads_the_same_run_without_what_it_does_not_know(tmp_path: Path) -> None:
    older = _older_response()
    request = agent_service_pb2.RunRequest(agent="lead", input=user_message("hi"))
    async with served(settings(tmp_path)) as server:
        run = server.channel.unary_stream(
            "/bough.v1.AgentService/Run",
            request_serializer=agent_service_pb2.RunRequest.SerializeToString,
            response_deserializer=older.FromString,
        )
        call = run(request)
        read = [event async for response in call for event in _events(response)]
        assert await call.code() == grpc.StatusCode.OK
        async with _client(server.app.address) as client:
            log = (await collect(client.watch(read[0].run_id))).events
    assert [event.sequence for event in read] == [event.sequence for event in log]
    assert [event.SerializeToString(deterministic=True) for event in read] == [
        event.SerializeToString(deterministic=True) for event in log
    ]
    for event, whole in zip(read, log, strict=True):
        name = whole.WhichOneof("payload")
        assert event.WhichOneof("payload") == (None if str(name).startswith("sub_agent") else name)
    assert {event.WhichOneof("payload") for event in read} == {"run_started", "run_completed", None}
    assert read[-1].run_completed.final_answer.parts[0].text == "hi 1, hi 2, hi 3"
    assert events.name_of(log[-1]) == "agent.run.completed"
