"""A run's stream: every sequence once and in order, even if the connection drops."""

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough import NO_REJOINING, AsyncClient, DeadlineExceeded, NotFound, Rejoining, Unavailable, collect
from bough.v1 import agent_service_pb2, follow_pb2
from tests.clients.run_events import RUN_ID, SESSION_ID, desk
from tests.clients.stream_server import AT_ONCE, Call, LoopbackService, client_of, connected, listening


async def test_a_run_streams_its_events_and_says_its_ids() -> None:
    service = LoopbackService(desk())
    async with connected(service) as client, client.run("lead", "Write about owls.") as stream:
        events = [event async for event in stream]
        assert events == desk()
        assert (stream.run_id, stream.session_id, stream.through_sequence) == (RUN_ID, SESSION_ID, len(events))
    assert len(service.asked) == 1
    assert service.asked[0].request_id != ""


async def test_the_run_id_is_known_before_the_first_event_and_no_event_is_lost() -> None:
    async with connected(LoopbackService(desk())) as client, client.run("lead", "hi") as stream:
        assert await stream.started() == RUN_ID
        assert [event async for event in stream] == desk()


async def test_a_drop_is_rejoined_after_the_last_sequence() -> None:
    service = LoopbackService(desk(), [Call(events=7, batch=2), Call(events=3)])
    async with connected(service) as client, client.run("lead", "hi", view=follow_pb2.EVENT_VIEW_FULL) as stream:
        assert [event async for event in stream] == desk()
    follow = follow_pb2.FollowOptions(view=follow_pb2.EVENT_VIEW_FULL)
    until = follow_pb2.WATCH_UNTIL_INTERRUPTED
    assert service.asked[1:] == [
        agent_service_pb2.WatchRunRequest(run_id=RUN_ID, after_sequence=after, until=until, follow=follow)
        for after in (7, 10)
    ]


@given(
    st.lists(st.builds(Call, events=st.integers(0, 9), batch=st.integers(1, 4), overlap=st.integers(0, 3)), max_size=5)
)
@settings(max_examples=25, deadline=None)
async def test_any_drops_give_every_sequence_once_and_in_order(calls: list[Call]) -> None:
    async with connected(LoopbackService(desk(), calls)) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())


async def test_a_run_whose_id_was_never_learned_is_sent_again_under_the_same_request_id() -> None:
    service = LoopbackService(desk(), [Call(silent=True), Call(silent=True)])
    async with connected(service) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert service.asked == [service.asked[0]] * 3
    assert isinstance(service.asked[0], agent_service_pb2.RunRequest)
    assert service.asked[0].request_id != ""


async def test_a_callers_request_id_is_kept() -> None:
    service = LoopbackService(desk())
    async with connected(service) as client:
        await collect(client.run("lead", "hi", request_id="mine"))
    assert [request.request_id for request in service.asked] == ["mine"]


async def test_a_drop_between_metadata_and_first_event_watches_from_the_beginning() -> None:
    service = LoopbackService(desk(), [Call(events=0)])
    async with connected(service) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert service.asked[1] == agent_service_pb2.WatchRunRequest(
        run_id=RUN_ID, until=follow_pb2.WATCH_UNTIL_INTERRUPTED, follow=follow_pb2.FollowOptions()
    )


async def test_a_stream_goes_on_after_its_server_was_restarted() -> None:
    first, second = LoopbackService(desk(), [Call(events=5, hold=True)]), LoopbackService(desk())
    patient = Rejoining(first_delay=0.01, longest_delay=0.05, timeout=20)
    async with listening(first) as port:
        client = client_of(port, patient)
        stream = client.run("lead", "hi")
        events = [await anext(stream) for _ in range(5)]
    rest = asyncio.create_task(collect(stream))
    async with listening(second, port=port):
        events += (await rest).events
        await client.close()
    assert events == desk()
    assert second.asked[0].after_sequence == 5


async def test_a_drop_after_the_last_event_is_no_drop() -> None:
    service = LoopbackService(desk(), [Call(events=len(desk()))])
    async with connected(service) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert len(service.asked) == 1


async def test_a_server_that_stays_away_longer_than_the_patience_is_unavailable() -> None:
    service = LoopbackService(desk(), [Call(events=2), *[Call(silent=True)] * 50])
    impatient = Rejoining(first_delay=1e-6, longest_delay=1e-6, timeout=1e-3)
    async with connected(service, impatient) as client, client.run("lead", "hi") as stream:
        assert [await anext(stream), await anext(stream)] == desk()[:2]
        with pytest.raises(Unavailable):
            await anext(stream)
        assert (stream.run_id, stream.through_sequence) == (RUN_ID, 2)


async def test_rejoining_can_be_switched_off() -> None:
    service = LoopbackService(desk(), [Call(events=2)])
    async with connected(service, NO_REJOINING) as client, client.run("lead", "hi") as stream:
        assert [await anext(stream), await anext(stream)] == desk()[:2]
        with pytest.raises(Unavailable, match="dropped"):
            await anext(stream)
    assert len(service.asked) == 1


async def test_a_client_that_was_told_nothing_rejoins() -> None:
    service = LoopbackService(desk(), [Call(events=2)])
    async with listening(service) as port, AsyncClient(f"127.0.0.1:{port}") as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert len(service.asked) == 2


async def test_the_callers_time_ends_the_rejoining() -> None:
    service = LoopbackService(desk(), [Call(events=2)])
    slow = Rejoining(first_delay=1e6, longest_delay=1e6, timeout=1e9)
    async with connected(service, slow) as client, client.run("lead", "hi", timeout=5) as stream:
        assert [await anext(stream), await anext(stream)] == desk()[:2]
        with pytest.raises(DeadlineExceeded, match="did not become available in time"):
            await anext(stream)


async def test_an_answer_is_not_asked_for_again() -> None:
    service = LoopbackService(desk(), [Call(silent=True, code=grpc.StatusCode.NOT_FOUND)])
    async with connected(service) as client:
        with pytest.raises(NotFound, match="silent"):
            await collect(client.watch("no-such-run"))
    assert len(service.asked) == 1


async def test_watching_goes_on_with_what_was_asked_for() -> None:
    service = LoopbackService(desk(), [Call(events=2)])
    async with connected(service) as client:
        stream = client.watch(
            RUN_ID, after_sequence=4, until=follow_pb2.WATCH_UNTIL_CURRENT, event_names=["agent.llm.*"]
        )
        assert [event async for event in stream] == desk()[4:]
    follow = follow_pb2.FollowOptions(event_names=["agent.llm.*"])
    expected = [
        agent_service_pb2.WatchRunRequest(
            run_id=RUN_ID, after_sequence=after, until=follow_pb2.WATCH_UNTIL_CURRENT, follow=follow
        )
        for after in (4, 6)
    ]
    assert service.asked == expected


async def test_through_sequence_covers_only_what_the_caller_was_given() -> None:
    service = LoopbackService(desk(), [Call(batch=8)])
    async with connected(service) as client, client.run("lead", "hi") as stream:
        given_through = [(await anext(stream)).sequence for _ in range(3)]
        assert (given_through, stream.through_sequence) == ([1, 2, 3], 3)


async def test_closing_ends_the_call_and_not_the_run() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with connected(service) as client:
        async with client.run("lead", "hi") as stream:
            await anext(stream)
            await service.held.wait()
        await service.left.wait()
    assert service.cancelled_runs == []
    assert [event async for event in stream] == []


async def test_closing_while_another_task_reads_just_ends_its_events() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with connected(service) as client:
        stream = client.run("lead", "hi")
        reader = asyncio.create_task(collect(stream))
        await service.held.wait()
        await stream.aclose()
        assert (await reader).events == tuple(desk()[: len((await reader).events)])
        await service.left.wait()


async def test_cancel_asks_the_server_while_another_task_reads() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with connected(service) as client:
        stream = client.run("lead", "hi")
        reader = asyncio.create_task(collect(stream))
        await service.held.wait()
        assert (await stream.cancel()).run_id == RUN_ID
        await stream.aclose()
        await reader
    assert service.cancelled_runs == [RUN_ID]


async def test_a_read_that_was_given_up_loses_nothing() -> None:
    service = LoopbackService(desk(), [Call(events=3, hold=True)])
    async with connected(service) as client, client.run("lead", "hi") as stream:
        events = [await anext(stream) for _ in range(3)]
        await service.held.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), timeout=0.05)
        events += [event async for event in stream]
    assert events == desk()
    assert service.asked[1].after_sequence == 3


async def test_delays_grow_to_their_bound() -> None:
    bounds = [Rejoining(first_delay=0.1, longest_delay=1.0).bound(attempt) for attempt in range(6)]
    assert bounds == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert AT_ONCE.bound(3) == 0.0
