"""The fake server for users' own tests keeps the rules that a client sees."""

from collections.abc import Callable

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
from bough.v1 import (
    EXECUTION_STATE_CANCELLED,
    EXECUTION_STATE_FAILED,
    EXECUTION_STATE_SUCCEEDED,
    VERDICT_FAILED,
    WATCH_UNTIL_CURRENT,
    WATCH_UNTIL_INTERRUPTED,
    AgentEvent,
    AgentInvocation,
    AggregateEventsResponse,
    CaseResult,
    CaseTrialResult,
    EvalCase,
    EvalResult,
    EvalSet,
    EvaluationEvent,
    EvaluationFailed,
    GetRunResponse,
    InputRequest,
    Invocation,
    ListToolsResponse,
    ReadBlobResponse,
    ToolInfo,
)
from bough.v1 import Run as RunRecord

TRIPS = EvalSet(name="trips", cases=[EvalCase(id="oslo")])
AT_ONCE = Rejoining(first_delay=0.0, longest_delay=0.0)


def _sequences(run: CollectedRun) -> list[int]:
    return [event.sequence for event in run.events]


def test_scripted_runs_are_answered_in_order() -> None:
    with FakeServer() as server, Client(server.address) as client:
        server.add("lead", answer("One."))
        second = server.add("lead", answer("Two."))
        assert [client.ask("lead", "hi"), client.ask("lead", "hi")] == ["One.", "Two."]
        assert client.get_run(second).state == EXECUTION_STATE_SUCCEEDED
    assert [type(request).__name__ for request in server.requests] == [
        "RunRequest",
        "RunRequest",
        "GetRunRequest",
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


def test_a_watch_until_an_interruption_ends_where_the_run_waits() -> None:
    asks = [interruption(InputRequest(input_id=name)) for name in ("size", "color")]
    with FakeServer() as server, Client(server.address) as client:
        run_id = server.add("lead", [*asks, *answer("Done.")])
        with client.run("lead", "hi") as stream, client.resume(stream.started(), [reply("size", 42)]) as resumed:
            assert (_sequences(collect_sync(stream)), _sequences(collect_sync(resumed))) == ([1], [2, 3])
        with client.watch(run_id, until=WATCH_UNTIL_INTERRUPTED) as stream:
            assert [request.input_id for request in collect_sync(stream).open_requests] == ["color"]
        with client.watch(run_id, after_sequence=3, until=WATCH_UNTIL_INTERRUPTED) as stream:
            assert list(stream) == []
        assert [request.input_id for request in client.get_run(run_id).open_requests] == ["color"]


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


def test_what_is_not_scripted_is_unimplemented_and_says_how_to_script_it() -> None:
    def read_tree(client: Client) -> None:
        with client.run("lead", "hi") as stream:
            client.tree(stream.started())

    calls: list[tuple[Callable[[Client], object], str]] = [
        (lambda client: client.ask("guide", "hi"), r"FakeServer\.add\('guide', answer\(\.\.\.\)\)"),
        (read_tree, r"invocation=Invocation\(\.\.\.\) to FakeServer\.add\('lead'"),
        (lambda client: client.evaluations.run(TRIPS).result(), r"add_evaluation\(EvalResult\(eval_set_name='trips'"),
        (lambda client: list(client.catalog.list_tools()), r"FakeServer\.respond\(ListToolsResponse\("),
        (lambda client: client.sessions.read_blob("s1", "0"), r"FakeServer\.respond\(ReadBlobResponse\("),
        (lambda client: client.aggregate([]), r"FakeServer\.respond\(AggregateEventsResponse\("),
    ]
    with FakeServer() as server, Client(server.address) as client:
        server.add("lead", answer("Hm."))
        for call, said in calls:
            with pytest.raises(CallFailed, match=said) as caught:
                call(client)
            assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_any_call_is_answered_with_a_given_response() -> None:
    with FakeServer() as server, Client(server.address) as client:
        server.respond(ListToolsResponse(tools=[ToolInfo(name="search")]))
        server.respond(ReadBlobResponse(data=b"leaf"))
        server.respond(AggregateEventsResponse(invocation=Invocation(agent="lead")))
        assert [tool.name for tool in client.catalog.list_tools()] == ["search"]
        assert client.sessions.read_blob("s1", "0") == b"leaf"
        assert client.aggregate([AgentEvent(sequence=1)]).agent == "lead"
        server.respond(GetRunResponse(run=RunRecord(run_id="any")))
        assert client.get_run("any").run_id == "any"
        with pytest.raises(ValueError, match=r"No RPC returns bough\.v1\.ToolInfo\."):
            server.respond(ToolInfo())
        assert client.is_serving()
    assert [type(request).__name__ for request in server.requests] == [
        "ListToolsRequest",
        "ReadBlobRequest",
        "AggregateEventsRequest",
        "GetRunRequest",
    ]


def test_a_run_has_the_tree_that_is_scripted() -> None:
    agents = [AgentInvocation(invocation_id="1", name="lead"), AgentInvocation(invocation_id="2", name="writer")]
    with FakeServer() as server, Client(server.address) as client:
        run_id = server.add("lead", answer("Hm."), invocation=Invocation(agent="lead", agents=agents))
        with pytest.raises(NotFound):
            client.tree(run_id)
        client.ask("lead", "hi")
        tree = client.tree(run_id)
    assert ([agent.name for agent in tree], tree.invocation.run_id) == (["lead", "writer"], run_id)


def test_an_evaluation_has_the_result_that_is_scripted() -> None:
    cases = [CaseResult(case_id=f"case-{number}", trials=[CaseTrialResult(trial=1)]) for number in range(60)]
    result = EvalResult(eval_set_name="trips", verdict=VERDICT_FAILED, cases=cases)
    with FakeServer() as server, Client(server.address, rejoining=AT_ONCE) as client:
        evaluation_id = server.add_evaluation(result, drops=[0, 2])
        with client.evaluations.run(TRIPS) as stream:
            events = list(stream)
            found = stream.result()
        assert client.evaluations.cancel(evaluation_id) == client.evaluations.get(evaluation_id)
        assert list(client.evaluations.watch(evaluation_id, after_sequence=60)) == events[60:]
        assert client.evaluations.get(evaluation_id).state == EXECUTION_STATE_SUCCEEDED
        with pytest.raises(NotFound):
            client.evaluations.get("evaluation-2")
        failed = server.add_evaluation(result, events=[EvaluationEvent(evaluation_failed=EvaluationFailed())])
        client.evaluations.run(TRIPS).result()
        assert client.evaluations.get(failed).state == EXECUTION_STATE_FAILED
        with pytest.raises(ValueError, match="The last event has to be one of evaluation_completed, "):
            server.add_evaluation(result, events=[])
    result.evaluation_id = evaluation_id
    assert found == result
    assert [event.sequence for event in events] == list(range(1, 63))


def test_a_repeated_request_id_starts_an_evaluation_once() -> None:
    with FakeServer() as server, Client(server.address) as client:
        evaluation_id = server.add_evaluation(EvalResult(eval_set_name="trips"))
        for _ in range(2):
            assert client.evaluations.run(TRIPS, request_id="once").result().evaluation_id == evaluation_id
