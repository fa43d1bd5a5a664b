"""A server that is killed in mid-turn: what its clients saw is in the log, and the next server goes on from there."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough import AsyncClient, InsufficientBalance
from bough.v1 import event_pb2, execution_pb2, policy_pb2
from tests.rpc.run_server import Turn
from tests.support.log_laws import check_laws
from tests.support.model_scenarios import Ending, Reply, Request, Scenario, calling, chunk, offered, plain, results
from tests.support.model_server import serving_model
from tests.support.processes import Serving, serving
from tests.support.projects import llm, openai_model, write_project
from tests.support.tool_gate import standing_gate
from tests.support.wire_client import Remote, connected

PASSTHROUGH = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))


def _told(request: Request) -> str:
    """What the user, or the caller, said last."""
    content = [message["content"] for message in request["messages"] if message["role"] == "user"][-1]
    return str(content)


def _stalling(port: int) -> Scenario:
    """A lead that calls both its agents; one stalls once in the middle of a word, the other waits at the gate."""
    stalls = iter([True])

    def answer(request: Request) -> Reply:
        tools = offered(request)
        if "hold" not in _told(request) or results(request):
            return plain(request)
        if "wait_at" in tools:
            return calling([("wait_at", f'{{"port": {port}}}')])
        if agents := [name for name in tools if name.startswith("call_")]:
            return calling([(name, '{"message": "hold"}') for name in agents])
        if next(stalls, False):
            return Reply(pieces=(chunk({"content": "Half a wo"}),), ending=Ending.HANG)
        return plain(request)

    return answer


async def _is_over(turn: Turn) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await turn.to_the_end()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_turn_that_was_killed_in_the_middle_goes_on_at_the_next_server_and_repeats_what_was_in_flight(
    tmp_path: Path,
) -> None:
    async with standing_gate() as gate, serving_model(_stalling(gate.port)) as model:
        team = (llm("lead", calls=["talker", "waiter"]), llm("talker"), llm("waiter", tools=["wait_at"]))
        config = write_project(tmp_path, *team, model=openai_model(model.base_url))
        async with serving(config) as server, connected(server.address) as remote:
            turn = await remote.begin("lead", "hold").until("llm_output_text_delta")
            await gate.arrived.wait()
            run_id = await turn.run_id()
            await server.kill()
            await _is_over(turn)
        gate.open()
        async with serving(config) as server, connected(server.address) as remote:
            log = await remote.log(run_id)
            tree, run = await remote.tree(run_id), await remote.run(run_id)
            assert await remote.running() == []
            again = await remote.begin("lead", "go on", session_id=run.session_id).to_the_end()
    assert log[: len(turn.events)] == turn.events
    check_laws(log)
    assert log[-1].HasField("run_completed")
    begun_again = sorted((event for event in log if event.attempt == 2 and _begins(event)), key=lambda one: one.agent)
    assert [(event.agent, event.WhichOneof("payload")) for event in begun_again] == [
        ("talker", "llm_retrying"),
        ("waiter", "tool_started"),
    ]
    assert begun_again[0].llm_retrying.reason == event_pb2.RETRY_REASON_RECOVERED
    keys = [event.tool_started.idempotency_key for event in log if event.tool_started.call.name == "wait_at"]
    assert keys == keys[:1] * 2
    assert [(node.name, node.state) for node in tree.agents] == [
        ("lead", execution_pb2.EXECUTION_STATE_SUCCEEDED),
        ("talker", execution_pb2.EXECUTION_STATE_SUCCEEDED),
        ("waiter", execution_pb2.EXECUTION_STATE_SUCCEEDED),
    ]
    assert tree.complete
    check_laws(again.events)
    assert again.kinds[-1] == "run_completed"


def _begins(event: event_pb2.AgentEvent) -> bool:
    """Whether an attempt of an effect begins here."""
    return event.HasField("llm_retrying") or event.HasField("tool_started")


async def test_whenever_a_server_is_killed_what_clients_have_seen_is_in_the_log_and_every_run_ends_well(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[event_pb2.AgentEvent]] = {}
    async with serving_model(plain, delta_interval=0.001) as model:
        config = write_project(tmp_path, llm("talker"), model=openai_model(model.base_url))
        for count in (3, 90):
            async with serving(config) as server, connected(server.address) as remote:
                for turn in await _killed_after(count, server, remote):
                    seen[turn.events[0].run_id] = turn.events
        async with serving(config) as server, connected(server.address) as remote:
            logs = {run_id: await remote.log(run_id) for run_id in {*seen, *await remote.running()}}
            assert await remote.running() == []
    assert _integrity(tmp_path / "bough.db") == "ok"
    for run_id, log in logs.items():
        assert log[: len(seen.get(run_id, ()))] == seen.get(run_id, [])
        check_laws(log)
        assert log[-1].HasField("run_completed")
    assert any(event.HasField("run_resumed") for log in logs.values() for event in log)


def _integrity(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


async def _killed_after(count: int, server: Serving, remote: Remote) -> list[Turn]:
    """Turns of four clients, of which the server was killed as soon as they had seen so many events together."""
    turns = [remote.begin("talker", str(number), policy=PASSTHROUGH) for number in range(4)]
    enough = asyncio.Event()
    codes: list[grpc.StatusCode] = []

    async def read(turn: Turn) -> None:
        try:
            async for response in turn.call:
                turn.events.extend(response.batch.events)
                if sum(len(each.events) for each in turns) >= count:
                    enough.set()
        except aio.AioRpcError as error:
            codes.append(error.code())

    async with asyncio.TaskGroup() as readers:
        for turn in turns:
            readers.create_task(read(turn))
        await enough.wait()
        await server.kill()
    assert set(codes) <= {grpc.StatusCode.UNAVAILABLE}
    return [turn for turn in turns if turn.events]


async def test_a_payment_whose_server_is_killed_before_it_answers_is_credited_once(tmp_path: Path) -> None:
    """The run that was refused before goes on after it, at the next server."""

    def adjustments() -> int:
        with closing(sqlite3.connect(tmp_path / "bough.db")) as database:
            return int(database.execute("SELECT count(*) FROM adjustments").fetchone()[0])

    model = {
        "provider": "scripted",
        "script": "script.yaml",
        "price": {"input_per_million": 1, "output_per_million": 1},
    }
    script = {"alone": [{"text": "Done.", "usage": {"input_tokens": 1_000, "output_tokens": 0}}]}
    config = write_project(tmp_path, llm("alone"), script=script, model=model, accounts={"per": "user"})
    payment = {"currency_code": "USD", "request_id": "payment-1", "user_id": "local"}
    async with serving(config) as server, AsyncClient(server.address) as client:
        with pytest.raises(InsufficientBalance):
            await client.ask("alone", "hi")
        paying = asyncio.create_task(client.usage.adjust_balance(10**9, **payment))
        while not adjustments():  # noqa: ASYNC110 # its commit is all that can be seen of it
            await asyncio.sleep(0)
        await server.kill()
        await asyncio.gather(paying, return_exceptions=True)
    async with serving(config) as server, AsyncClient(server.address) as client:
        assert (await client.usage.adjust_balance(10**9, **payment)).balance_nanos == 10**9
        assert await client.ask("alone", "hi") == "Done."
        assert (await client.usage.get_account()).balance_nanos == 10**9 - 1_000_000
