"""Streams of runs that outlive their servers: whatever breaks, each sequence is streamed once, of a single run."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bough import AsyncClient, Client, RunNotAnswered, Unavailable, answer_of, collect, collect_sync, rejoining, reply
from bough.errors import Status, from_status
from bough.position import RunPosition
from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2, execution_pb2, follow_pb2, run_pb2
from tests.clients.durable_server import FORK_ID, Drop, Logs, Moment, durable_server
from tests.clients.question_events import asking, forked, question
from tests.clients.run_events import RUN_ID, AgentEvent, desk
from tests.clients.stream_server import AT_ONCE, NO_TRANSPARENT_RETRIES
from tests.clients.truncating_proxy import cutting

QUICK = (*NO_TRANSPARENT_RETRIES, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100))
MASK = ["agent.llm.*"]
WHOLE = [event for segment in asking() for event in segment]
ENDS = [segment[-1].sequence for segment in asking()]

DROPS = st.lists(
    st.none() | st.builds(Drop, moment=st.sampled_from(Moment), events=st.integers(0, 9), is_silent=st.booleans()),
    max_size=8,
)
RESTARTS = st.lists(
    st.builds(Drop, moment=st.sampled_from(Moment), events=st.integers(0, 9), restarts=st.just(True)), max_size=2
)


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[AsyncClient]:
    """A client that rejoins at once."""
    async with AsyncClient(address, timeout=15, call_timeout=10, rejoining=AT_ONCE, options=QUICK) as client:
        yield client


# The mask hides the input_received before the interruption that the drop follows.
@example(drops=[None, Drop(events=3)], afters=(ENDS[0], None, None), masked=True)
@given(drops=DROPS, afters=st.tuples(*[st.none() | st.integers(0, end) for end in ENDS[:-1]]), masked=st.booleans())
@settings(max_examples=30, deadline=None)
async def test_a_run_and_its_answers_give_every_sequence_once_and_end_where_they_would_have(
    drops: list[Drop | None], afters: tuple[int | None, ...], masked: bool
) -> None:
    logs, mask = Logs(segments=asking()), MASK if masked else []
    async with durable_server(logs, drops) as address, client_of(address) as client:
        streams = [await collect(client.run("lead", "hi", event_names=mask))]
        for name, after in zip("abc", afters, strict=True):
            answers = [reply(question(name), name)]
            streams.append(await collect(client.resume(RUN_ID, answers, after_sequence=after, event_names=mask)))
    begins = [0, *(end if after is None else after for end, after in zip(ENDS[:-1], afters, strict=True))]
    assert [stream.events for stream in streams] == [
        tuple(event for event in WHOLE[begin:end] if not masked or str(event.WhichOneof("payload")).startswith("run_"))
        for begin, end in zip(begins, ENDS, strict=True)
    ]
    assert (list(logs.by_run), len(logs.known)) == ([RUN_ID], 4)
    assert collect_sync([event for stream in streams for event in stream.events]).last_sequence == len(WHOLE)


@pytest.mark.parametrize("masked", [False, True])
async def test_an_interruption_before_a_drop_ends_the_stream_unless_it_is_older_than_the_answers(masked: bool) -> None:
    # The call that starts, one that answers a, and then one that answers b and streams the log from its beginning.
    drops = [Drop(events=ENDS[0]), None, Drop(events=ENDS[0]), Drop(events=ENDS[1] - ENDS[0]), Drop(events=99)]
    logs, mask = Logs(segments=asking()), MASK if masked else []
    async with durable_server(logs, drops) as address, client_of(address) as client:
        first = await collect(client.run("lead", "hi", event_names=mask))
        await collect(client.resume(RUN_ID, [reply("ask-a", "a")]))
        again = await collect(client.resume(RUN_ID, [reply("ask-b", "b")], after_sequence=0, event_names=mask))
    assert (first.last_sequence, again.last_sequence) == (ENDS[0], ENDS[2])
    assert len(logs.asked) == len(drops)


async def test_a_stream_that_ends_without_the_event_that_it_was_to_end_with_is_rejoined() -> None:
    silent = Drop(is_silent=True)
    logs = Logs(segments=[list(desk())])
    async with (
        durable_server(logs, [Drop(events=2, is_silent=True), silent, None, silent, silent]) as address,
        client_of(address) as client,
    ):
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
        assert len(logs.asked) == 3
        # After the last event there is nothing to wait for; and what is there now is all that was asked for.
        assert [event async for event in client.watch(RUN_ID, after_sequence=len(desk()))] == []
        current = client.watch(RUN_ID, after_sequence=len(desk()), until=follow_pb2.WATCH_UNTIL_CURRENT)
        assert [event async for event in current] == []
    assert len(logs.asked) == 5


async def test_a_server_that_ends_every_stream_of_a_run_early_is_given_up() -> None:
    logs = Logs(segments=[list(desk())])
    policy = rejoining.Rejoining(first_delay=0.0, longest_delay=0.0, timeout=0.2)
    async with (
        durable_server(logs, [Drop(is_silent=True)] * 100_000) as address,
        AsyncClient(address, rejoining=policy, options=QUICK) as client,
    ):
        with pytest.raises(Unavailable, match="ended the stream before the end of the run"):
            await collect(client.run("lead", "hi"))


def of_a_later_version(sequence: int) -> AgentEvent:
    """Return an event whose payload has a number that this version does not have."""
    known = AgentEvent(run_id=RUN_ID, sequence=sequence)
    return AgentEvent.FromString(known.SerializeToString() + b"\xba\x3f\x00")


async def test_a_stream_that_ends_without_an_error_at_an_unknown_event_has_ended_and_its_run_has_not() -> None:
    paused = [*desk()[:2], of_a_later_version(3)]
    resumed = [AgentEvent(run_id=RUN_ID, sequence=4, run_resumed=event_pb2.RunResumed()), of_a_later_version(5)]
    logs, ends = Logs(segments=[paused, resumed]), Drop(events=99, is_silent=True)
    watches = [{}, {"after_sequence": 4}, {"until": follow_pb2.WATCH_UNTIL_INTERRUPTED, "after_sequence": 4}]
    async with durable_server(logs, [ends] * 6) as address, client_of(address) as client:
        run = await collect(client.run("lead", "hi"))
        assert run.events == tuple(paused)
        with pytest.raises(RunNotAnswered, match="has not ended"):
            answer_of(run)
        assert (await collect(client.resume(RUN_ID, [reply("a", "a")]))).events == tuple(resumed)
        watched = [(await collect(client.watch(RUN_ID, **watch))).last_sequence for watch in watches]
        with Client(address, rejoining=AT_ONCE, options=QUICK) as sync_client:
            events = await asyncio.to_thread(lambda: list(sync_client.watch(RUN_ID)))
    assert (watched, events, len(logs.asked)) == ([5, 5, 5], [*paused, *resumed], 6)


async def test_an_error_after_an_unknown_event_is_rejoined() -> None:
    logs = Logs(segments=[[*desk()[:2], of_a_later_version(3), *desk()[3:]]])
    async with durable_server(logs, [Drop(events=3)]) as address, client_of(address) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(logs.by_run[RUN_ID])
    assert len(logs.asked) == 2


@pytest.mark.parametrize("until", [follow_pb2.WATCH_UNTIL_TERMINAL, follow_pb2.WATCH_UNTIL_INTERRUPTED])
def test_a_run_in_an_unknown_state_has_not_ended(until: follow_pb2.WatchUntil.ValueType) -> None:
    position = RunPosition(pb.WatchRunRequest(run_id=RUN_ID, after_sequence=3, until=until))
    unknown = execution_pb2.ExecutionState.ValueType(99)
    assert not position.is_at_end_of(run_pb2.Run(run_id=RUN_ID, state=unknown, last_sequence=3))


async def test_answers_are_sent_again_under_one_request_id_until_something_came_and_then_the_run_is_watched() -> None:
    unheard = [Drop(moment=moment) for moment in (Moment.UNHEARD, Moment.UNANSWERED, Moment.ACCEPTED)]
    logs = Logs(segments=asking())
    async with durable_server(logs, [None, *unheard, Drop(events=1)]) as address, client_of(address) as client:
        await collect(client.run("lead", "hi"))
        stream = client.resume(RUN_ID, [reply("ask-a", "a")])
        assert await stream.started() == RUN_ID
        assert (await collect(stream)).events == tuple(asking()[1])
    asked = [request for request, _ in logs.asked[1:]]
    resume = pb.ResumeRunRequest(
        run_id=RUN_ID, answers=[reply("ask-a", "a")], request_id=stream.request_id, follow=follow_pb2.FollowOptions()
    )
    watch = pb.WatchRunRequest(
        run_id=RUN_ID,
        after_sequence=ENDS[0] + 1,
        until=follow_pb2.WATCH_UNTIL_INTERRUPTED,
        follow=follow_pb2.FollowOptions(),
    )
    assert asked == [resume, resume, resume, resume, watch]
    assert stream.request_id != ""


async def test_coming_back_never_adds_to_the_time_that_the_caller_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(rejoining, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    drops = [Drop(moment=Moment.UNHEARD), Drop(moment=Moment.ACCEPTED), Drop(events=1), Drop(events=1)]
    logs = Logs(segments=asking())
    async with durable_server(logs, [None, *drops]) as address, client_of(address) as client:
        await collect(client.run("lead", "hi"))
        await collect(client.resume(RUN_ID, [reply("ask-a", "a")], timeout=60))
    remaining = [left or 0.0 for _, left in logs.asked[1:]]
    # The clock advances a second at each reading, and is read twice for each call: before and after it.
    bounds = [60 - 1 - 2 * number for number in range(5)]
    assert [left <= bound + 0.5 for left, bound in zip(remaining, bounds, strict=True)] == [True] * 5


@given(drops=DROPS, after=st.integers(0, ENDS[1]), masked=st.booleans())
@settings(max_examples=30, deadline=None)
async def test_a_watch_until_an_interruption_ends_with_the_one_at_which_the_run_waits(
    drops: list[Drop | None], after: int, masked: bool
) -> None:
    logs = Logs(segments=asking())
    until, mask = follow_pb2.WATCH_UNTIL_INTERRUPTED, MASK if masked else []

    def watch(address: str) -> list[AgentEvent]:
        with Client(address, timeout=15, rejoining=AT_ONCE, options=QUICK) as client:
            return list(client.watch(RUN_ID, after_sequence=after, until=until, event_names=mask))

    async with durable_server(logs, [None, None, *drops]) as address, client_of(address) as client:
        await collect(client.run("lead", "hi"))
        await collect(client.resume(RUN_ID, [reply(question("a"), "a")]))
        stream = client.watch(RUN_ID, after_sequence=after, until=until, event_names=mask)
        watched = [event async for event in stream]
        assert watched == await asyncio.to_thread(watch, address)
    waiting = WHOLE[after : ENDS[1]]
    assert watched == [event for event in waiting if not masked or str(event.WhichOneof("payload")).startswith("run_")]


async def test_a_watch_of_a_run_that_has_ended_is_ended_by_no_interruption() -> None:
    logs, drops = Logs(segments=asking()), [None] * 4 + [Drop(events=2), Drop(events=99)]
    async with durable_server(logs, drops) as address, client_of(address) as client:
        await collect(client.run("lead", "hi"))
        for name in "abc":
            await collect(client.resume(RUN_ID, [reply(question(name), name)]))
        until = follow_pb2.WATCH_UNTIL_INTERRUPTED
        assert (await collect(client.watch(RUN_ID, until=until))).events == tuple(WHOLE)
        assert (await collect(client.watch(RUN_ID))).events == tuple(WHOLE)


async def test_a_watch_that_passes_an_answered_interruption_reports_no_drop() -> None:
    logs, drops = Logs(segments=asking()), []
    policy = rejoining.Rejoining(first_delay=0.0, on_drop=drops.append)
    async with durable_server(logs) as address, AsyncClient(address, rejoining=policy) as client:
        await collect(client.run("lead", "hi"))
        await collect(client.resume(RUN_ID, [reply(question("a"), "a")]))
        watched = await collect(client.watch(RUN_ID, until=follow_pb2.WATCH_UNTIL_INTERRUPTED))
    assert (watched.last_sequence, [request.input_id for request in watched.open_requests], drops) == (
        ENDS[1],
        [request.input_id for request in WHOLE[ENDS[1] - 1].run_interrupted.requests],
        [],
    )


@given(drops=DROPS, restarts=RESTARTS)
@settings(max_examples=15, deadline=None)
async def test_the_synchronous_client_keeps_the_same_promise(drops: list[Drop | None], restarts: list[Drop]) -> None:
    logs = Logs(segments=asking(), fork=forked(FORK_ID, WHOLE, ENDS[1]), shared=ENDS[1])

    def turns(address: str) -> Iterator[tuple[AgentEvent, ...]]:
        with Client(address, timeout=15, rejoining=AT_ONCE, options=QUICK) as client:
            yield tuple(client.run("lead", "hi"))
            for name in "abc":
                yield tuple(client.resume(RUN_ID, [reply(question(name), name)]))
            yield tuple(client.watch(RUN_ID, after_sequence=ENDS[0], until=follow_pb2.WATCH_UNTIL_INTERRUPTED))
            yield tuple(client.fork(RUN_ID, ENDS[1]))

    async with durable_server(logs, [*restarts, *drops]) as address:
        given = await asyncio.to_thread(lambda: list(turns(address)))
    rest = [event for segment in asking()[1:] for event in segment]
    assert given == [tuple(segment) for segment in (*asking(), rest, logs.fork[ENDS[1] :])]
    assert (sorted(logs.by_run), len(logs.known)) == (sorted([RUN_ID, FORK_ID]), 5)


async def test_a_synchronous_stream_is_closed_by_another_thread() -> None:
    # The run waits for its answers, and the stream for the run's end.
    logs = Logs(segments=asking())
    async with durable_server(logs) as address:
        with Client(address, timeout=15, rejoining=AT_ONCE, options=QUICK) as client:
            first = await asyncio.to_thread(lambda: list(client.run("lead", "hi")))
            stream = client.watch(RUN_ID)
            events = [await asyncio.to_thread(next, stream) for _ in first]
            reader = asyncio.create_task(asyncio.to_thread(list, stream))
            await asyncio.to_thread(stream.close)
            assert (events, await reader) == (first, [])


@given(drops=RESTARTS)
@settings(max_examples=10, deadline=None)
async def test_servers_that_go_down_and_come_back_change_nothing(drops: list[Drop]) -> None:
    logs = Logs(segments=[list(desk())])
    async with durable_server(logs, drops) as address, client_of(address) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert (list(logs.by_run), len(logs.known)) == ([RUN_ID], 1)


@given(drops=DROPS, shared=st.integers(1, len(WHOLE) - 1))
@settings(max_examples=30, deadline=None)
async def test_a_fork_is_made_once_and_streamed_from_where_it_begins(drops: list[Drop | None], shared: int) -> None:
    log = forked(FORK_ID, WHOLE, shared)
    logs = Logs(fork=log, shared=shared)
    async with durable_server(logs, drops) as address, client_of(address) as client:
        stream = client.fork(RUN_ID, shared)
        assert (await collect(stream)).events == tuple(log[shared:])
        assert stream.run_id == FORK_ID
    assert (list(logs.by_run), list(logs.known)) == ([FORK_ID], [stream.request_id])


@given(cuts=st.lists(st.integers(0, 4_000), max_size=5))
@settings(max_examples=15, deadline=None)
async def test_a_connection_that_is_cut_after_any_byte_loses_and_repeats_nothing(cuts: list[int]) -> None:
    logs = Logs(segments=[list(desk())])
    async with durable_server(logs) as address, cutting(address, cuts) as proxied, client_of(proxied) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert (list(logs.by_run), len(logs.known)) == ([RUN_ID], 1)


@pytest.mark.parametrize("reason", ["RUN_PARKED", "STORAGE_FAILED"])
def test_a_server_that_answers_and_cannot_go_on_with_the_run_is_given_up_after_the_patience(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(rejoining, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    backoff = rejoining.RejoinBackoff(rejoining.Rejoining(longest_delay=0.0, timeout=9.0), timeout=None)
    failed = from_status(Status(code=grpc.StatusCode.UNAVAILABLE, message="The code is missing.", reason=reason))

    def come_back_often() -> None:
        for _ in range(20):
            backoff.delay_after(failed)
            backoff.note_answer()

    with pytest.raises(Unavailable, match="The code is missing"):
        come_back_often()
