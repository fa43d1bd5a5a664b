"""The synchronous client against a simulated channel, with a fake clock."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import grpc_testing
import pytest
from google.rpc import error_details_pb2

from bough import NO_REJOINING, Client, NotFound, Unavailable
from bough.v1 import agent_service_pb2, eval_service_pb2, follow_pb2, invocation_pb2, policy_pb2, run_pb2
from tests.clients.run_events import RUN_ID, batch_of, desk, words
from tests.clients.stream_server import AT_ONCE, rich_status

AGENTS = agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"]
EVAL = eval_service_pb2.DESCRIPTOR.services_by_name["EvalService"]


class Played:
    """A simulated channel for the stubs, which pass `wait_for_ready`: calls of grpc_testing do not accept it."""

    def __init__(self, channel: grpc_testing.Channel) -> None:
        self._channel = channel

    def __getattr__(self, arity: str) -> Callable[..., object]:
        def made(*arguments: object, **options: object) -> Callable[..., object]:
            method = getattr(self._channel, arity)(*arguments, **options)
            return lambda request, *, timeout, wait_for_ready, metadata: method(request, timeout=timeout)

        return made


@pytest.fixture
def channel() -> grpc_testing.Channel:
    return grpc_testing.channel([AGENTS, EVAL], grpc_testing.strict_fake_time(0))


@pytest.fixture
def client(channel: grpc_testing.Channel) -> Client:
    return Client(channel=Played(channel), rejoining=AT_ONCE)


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def method(name: str) -> object:
    return AGENTS.methods_by_name[name]


def test_a_run_streams_its_events(channel: grpc_testing.Channel, client: Client) -> None:
    stream = client.run("lead", "Write about owls.", request_id="mine")
    _, request, rpc = channel.take_unary_stream(method("Run"))
    rpc.send_initial_metadata(())
    events = desk()
    rpc.send_response(agent_service_pb2.RunResponse(batch=batch_of(events[:4])))
    rpc.send_response(agent_service_pb2.RunResponse(batch=follow_pb2.EventBatch(through_sequence=4)))
    rpc.send_response(agent_service_pb2.RunResponse(batch=batch_of(events[4:])))
    rpc.terminate((), grpc.StatusCode.OK, "")
    assert (request.agent, request.request_id, request.input.parts[0].text) == ("lead", "mine", "Write about owls.")
    given = [next(stream), next(stream)]
    assert stream.through_sequence == 2
    assert [*given, *stream] == events
    assert (stream.run_id, stream.through_sequence) == (RUN_ID, len(events))


def test_the_request_id_is_known_at_once_and_the_run_id_before_the_first_event(
    channel: grpc_testing.Channel, client: Client
) -> None:
    stream = client.run("lead", "hi")
    _, request, rpc = channel.take_unary_stream(method("Run"))
    assert (stream.request_id, stream.run_id) == (request.request_id, "")
    assert stream.request_id != ""
    rpc.send_initial_metadata((("bough-run-id", RUN_ID),))
    assert (stream.started(), stream.run_id) == (RUN_ID, RUN_ID)
    rpc.send_response(agent_service_pb2.RunResponse(batch=batch_of(desk())))
    rpc.terminate((), grpc.StatusCode.OK, "")
    assert list(stream) == desk()


def test_a_drop_is_rejoined_after_the_last_sequence(
    channel: grpc_testing.Channel, client: Client, other_thread: ThreadPoolExecutor
) -> None:
    stream = client.run("lead", "hi")
    _, _, rpc = channel.take_unary_stream(method("Run"))
    rpc.send_initial_metadata(())
    rpc.send_response(agent_service_pb2.RunResponse(batch=batch_of(desk()[:3])))
    assert [next(stream) for _ in range(3)] == desk()[:3]
    rest = other_thread.submit(list, stream)
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "gone")
    _, request, rpc = channel.take_unary_stream(method("WatchRun"))
    assert request == agent_service_pb2.WatchRunRequest(
        run_id=RUN_ID,
        after_sequence=3,
        until=follow_pb2.WATCH_UNTIL_INTERRUPTED,
        follow=follow_pb2.FollowOptions(),
    )
    rpc.send_initial_metadata(())
    rpc.send_response(agent_service_pb2.WatchRunResponse(batch=batch_of(desk()[3:])))
    rpc.terminate((), grpc.StatusCode.OK, "")
    assert rest.result() == desk()[3:]


def test_a_drop_says_where_to_go_on_to_who_comes_back_by_himself(channel: grpc_testing.Channel) -> None:
    client = Client(channel=Played(channel), rejoining=NO_REJOINING)
    stream = client.run("lead", "hi")
    _, _, rpc = channel.take_unary_stream(method("Run"))
    rpc.send_initial_metadata(())
    rpc.send_response(agent_service_pb2.RunResponse(batch=batch_of(desk()[:3])))
    assert [next(stream) for _ in range(3)] == desk()[:3]
    rpc.terminate((), grpc.StatusCode.UNAVAILABLE, "gone")
    with pytest.raises(Unavailable, match="gone"):
        next(stream)
    again = client.watch(stream.run_id, after_sequence=stream.through_sequence)
    _, request, rpc = channel.take_unary_stream(method("WatchRun"))
    assert (request.run_id, request.after_sequence) == (RUN_ID, 3)
    rpc.send_initial_metadata(())
    rpc.send_response(agent_service_pb2.WatchRunResponse(batch=batch_of(desk()[3:])))
    rpc.terminate((), grpc.StatusCode.OK, "")
    assert list(again) == desk()[3:]


def test_closing_ends_the_call(channel: grpc_testing.Channel, client: Client) -> None:
    with client.run("lead", "hi"):
        _, _, rpc = channel.take_unary_stream(method("Run"))
    rpc.cancelled()


def test_unary_calls_give_the_resource(
    channel: grpc_testing.Channel, client: Client, other_thread: ThreadPoolExecutor
) -> None:
    tree: Future[invocation_pb2.Invocation] = other_thread.submit(client.get_invocation, RUN_ID, as_of_sequence=4)
    _, request, rpc = channel.take_unary_unary(EVAL.methods_by_name["GetInvocation"])
    assert request == eval_service_pb2.GetInvocationRequest(run_id=RUN_ID, as_of_sequence=4)
    record = invocation_pb2.Invocation(run_id=RUN_ID, agent="lead")
    rpc.terminate(eval_service_pb2.GetInvocationResponse(invocation=record), (), grpc.StatusCode.OK, "")
    assert tree.result() == record
    for call, name in ((client.get_run, "GetRun"), (client.cancel, "CancelRun")):
        given = other_thread.submit(call, RUN_ID)
        _, request, rpc = channel.take_unary_unary(method(name))
        response = agent_service_pb2.GetRunResponse if name == "GetRun" else agent_service_pb2.CancelRunResponse
        rpc.terminate(response(run=run_pb2.Run(run_id=request.run_id)), (), grpc.StatusCode.OK, "")
        assert given.result().run_id == RUN_ID


def test_the_note_of_a_cancellation_and_the_final_answer(
    channel: grpc_testing.Channel, client: Client, other_thread: ThreadPoolExecutor
) -> None:
    cancelled = other_thread.submit(client.cancel, RUN_ID, note="Enough.")
    _, request, rpc = channel.take_unary_unary(method("CancelRun"))
    assert request == agent_service_pb2.CancelRunRequest(run_id=RUN_ID, note="Enough.")
    rpc.terminate(agent_service_pb2.CancelRunResponse(), (), grpc.StatusCode.OK, "")
    assert cancelled.result() == run_pb2.Run()
    for response in (agent_service_pb2.GetRunResponse(), agent_service_pb2.GetRunResponse(final_answer=words("Owls."))):
        given = other_thread.submit(client.get_final_answer, RUN_ID)
        _, _, rpc = channel.take_unary_unary(method("GetRun"))
        rpc.terminate(response, (), grpc.StatusCode.OK, "")
        assert given.result() == (response.final_answer if response.HasField("final_answer") else None)


def test_a_turn_may_have_its_session_created_and_a_fork_its_policy(
    channel: grpc_testing.Channel, client: Client
) -> None:
    create = agent_service_pb2.MISSING_SESSION_POLICY_CREATE
    with client.run("lead", "hi", session_id="chat-7", on_missing_session=create):
        _, request, _ = channel.take_unary_stream(method("Run"))
    assert (request.session_id, request.on_missing_session) == ("chat-7", create)
    policy = policy_pb2.RunPolicy(background=True)
    with client.fork(RUN_ID, 7, policy=policy):
        _, request, _ = channel.take_unary_stream(method("ForkRun"))
    assert (request.after_sequence, request.policy) == (7, policy)


def test_a_failed_call_has_the_details_of_the_server(
    channel: grpc_testing.Channel, client: Client, other_thread: ThreadPoolExecutor
) -> None:
    given = other_thread.submit(client.get_run, "nope")
    _, _, rpc = channel.take_unary_unary(method("GetRun"))
    info = error_details_pb2.ErrorInfo(reason="NOT_FOUND", domain="bough.dev")
    status = rich_status(grpc.StatusCode.NOT_FOUND, "There is no run 'nope'.", info)
    rpc.terminate(None, (("grpc-status-details-bin", status),), grpc.StatusCode.NOT_FOUND, "There is no run 'nope'.")
    with pytest.raises(NotFound, match="There is no run 'nope'") as raised:
        given.result()
    assert raised.value.reason == "NOT_FOUND"
