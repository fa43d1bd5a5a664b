"""The fake server for users' own tests keeps the rules that a client sees."""

import grpc
import pytest

from bough import (
    AsyncClient,
    CallFailed,
    Client,
    CollectedRun,
    NotFound,
    Rejoining,
    SessionBusy,
    collect,
    collect_sync,
    reply,
)
from bough.testing import FakeServer, answer, interruption
from bough.v1 import EXECUTION_STATE_CANCELLED, EXECUTION_STATE_SUCCEEDED, WATCH_UNTIL_CURRENT, AgentEvent, InputRequest

AT_ONCE = Rejoining(first_delay=0.0, longest_delay=0.0)


def _sequences(run: CollectedRun) -> list[int]:
    return [event.sequence for event in run.events]


def test_scripted_runs_are_answered_in_order() -> None:
    with FakeServer() as server, Client(server.address) as client:
        server.add("lead", answer("One."))
        second = server.add("lead", answer("Two."))
        assert [client.ask("lead", "hi"), client.ask("lead", "hi")] == ["One.", "Two."]
        assert client.get_run(second).state == EXECUTION_STATE_SUCCEEDED
        with pytest.raises(NotFound, match="No run of the agent 'lead' is scripted"):
            client.ask("lead", "hi")
    assert [type(request).__name__ for request in server.requests] == [
        "RunRequest",
        "RunRequest",
        "GetRunRequest",
        "RunRequest",
    ]


async def test_streams_that_drop_are_rejoined_by_both_clients() -> None:
    with FakeServer() as server:
        server.add("lead", answer("It works."), drops=[0, 1, 2])
        server.add("lead", answer("It works."), drops=[2])
        async with AsyncClient(server.address, rejoining=AT_ONCE) as client:
            run = await collect(client.run("lead", "hi"))
        with Client(server.address, rejoining=AT_ONCE) as sync_client, sync_client.run("lead", "hi") as stream:
            again = collect_sync(stream)
    assert (run.answer, _sequences(run)) == (again.answer, _sequences(again)) == ("It works.", [1, 2, 3])


def test_answers_make_the_run_go_on_once() -> None:
    waits = interruption(InputRequest(input_id="size"))
    started, *rest = answer("42 it is.")
    with FakeServer() as server, Client(server.address) as client:
        server.add("lead", [started, waits, *rest])
        with client.run("lead", "hi") as stream:
            waiting = collect_sync(stream)
        with client.resume(waiting.run_id, [reply("size", 42)], request_id="once") as stream:
            resumed = collect_sync(stream)
        with client.resume(waiting.run_id, [reply("size", 42)], request_id="once") as stream:
            again = collect_sync(stream)
    assert [request.input_id for request in waiting.open_requests] == ["size"]
    assert resumed.answer == "42 it is."
    assert _sequences(waiting) + _sequences(resumed) == [1, 2, 3, 4, 5]
    assert again.events == resumed.events


def test_a_run_that_waits_is_cancelled() -> None:
    with FakeServer() as server, Client(server.address) as client:
        run_id = server.add("lead", [interruption(InputRequest(input_id="size")), *answer("Never said.")])
        with client.run("lead", "hi") as stream:
            collect_sync(stream)
        assert client.cancel(run_id).state == EXECUTION_STATE_CANCELLED
        with client.watch(run_id) as stream:
            assert collect_sync(stream).state == EXECUTION_STATE_CANCELLED


def test_a_watch_to_the_end_waits_with_a_run_that_waits() -> None:
    started, *rest = answer("42 it is.")
    with FakeServer() as server, Client(server.address) as client:
        run_id = server.add("lead", [started, interruption(InputRequest(input_id="size")), *rest])
        with client.run("lead", "hi") as stream:
            collect_sync(stream)
        with client.watch(run_id) as stream:
            assert [next(stream).sequence, next(stream).sequence] == [1, 2]
            with client.resume(run_id, [reply("size", 42)]) as resumed:
                collect_sync(resumed)
            assert [event.sequence for event in stream] == [3, 4, 5]
        with client.watch(run_id, until=WATCH_UNTIL_CURRENT) as stream:
            assert _sequences(collect_sync(stream)) == [1, 2, 3, 4, 5]
        with client.watch(run_id, after_sequence=5) as stream:
            assert list(stream) == []


def test_a_watch_that_is_closed_leaves_the_fake() -> None:
    with FakeServer() as server, Client(server.address) as client:
        run_id = server.add("lead", [interruption(InputRequest(input_id="size"))])
        with client.run("lead", "hi") as stream:
            collect_sync(stream)
        for _ in range(40):  # more than the threads of the server
            with client.watch(run_id) as stream:
                assert next(stream).sequence == 1


@pytest.mark.parametrize("events", [[], answer("Never said.")[:-1]])
def test_a_script_without_an_end_is_refused(events: list[AgentEvent]) -> None:
    with FakeServer() as server, pytest.raises(ValueError, match="The last event has to be"):
        server.add("lead", events)


def test_a_refusal_is_the_error_that_a_server_would_send() -> None:
    with FakeServer() as server, Client(server.address) as client:
        server.refuse("lead", grpc.StatusCode.ABORTED, reason="SESSION_BUSY", message="Another run holds it.")
        with pytest.raises(SessionBusy, match="Another run holds it"):
            client.ask("lead", "hi")


def test_what_the_fake_does_not_have_is_unimplemented() -> None:
    with FakeServer() as server, Client(server.address) as client, pytest.raises(CallFailed) as caught:
        client.is_serving()
    assert caught.value.status.code is grpc.StatusCode.UNIMPLEMENTED
