"""From pages of a log to the responses of a stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2, follow_pb2
from bough_server.api.streaming import StreamPosition, responses
from bough_server.clock import SystemClock
from bough_server.log.events import kind_of, stamp
from bough_server.log.views import Selection
from bough_server.store.ports.log import StoredEvent
from bough_server.store.window import SharedPage

_RUN, _SESSION = "run", "session"
_CLOCK = SystemClock()

_texts = st.text(max_size=300)
_payloads = st.one_of(
    _texts.map(lambda text: {"llm_output_text_delta": event_pb2.LlmOutputTextDelta(text=text)}),
    _texts.map(lambda text: {"tool_output": event_pb2.ToolOutput(call_id="c", text=text)}),
    st.just({"sub_agent_started": event_pb2.SubAgentStarted(call_id="c")}),
    st.just({"run_completed": event_pb2.RunCompleted()}),
)
_events = st.lists(
    st.builds(
        lambda payload, parent: event_pb2.AgentEvent(invocation_id="i", parent_invocation_id=parent, **payload),
        _payloads,
        st.sampled_from(["", "p"]),
    ),
    max_size=40,
)


def _log(events: Sequence[event_pb2.AgentEvent]) -> list[StoredEvent]:
    for sequence, event in enumerate(events, 1):
        event.sequence = sequence
    return [StoredEvent(event.sequence, kind_of(event), event.SerializeToString()) for event in events]


def _delta(text: str) -> event_pb2.AgentEvent:
    return event_pb2.AgentEvent(invocation_id="i", llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=text))


def _stamped(event: event_pb2.AgentEvent) -> event_pb2.AgentEvent:
    stamped = event_pb2.AgentEvent(run_id=_RUN, session_id=_SESSION)
    stamped.MergeFrom(event)
    return stamped


def _following(selection: Selection | None = None, *, after: int = 0) -> StreamPosition:
    return StreamPosition(stamp=stamp(_RUN, _SESSION), selection=selection or Selection(), after=after)


def _taken(place: StreamPosition, page: Sequence[StoredEvent]) -> list[pb.RunResponse]:
    return [pb.RunResponse.FromString(response) for response in place.advance(page)]


def _response(events: Sequence[event_pb2.AgentEvent], through: int) -> pb.RunResponse:
    return pb.RunResponse(batch=follow_pb2.EventBatch(events=events, through_sequence=through))


def _sizes(events: Sequence[event_pb2.AgentEvent]) -> list[tuple[int, int]]:
    return [
        (len(response.batch.events), response.batch.through_sequence) for response in _taken(_following(), _log(events))
    ]


@given(
    _events,
    st.sampled_from([follow_pb2.EVENT_VIEW_FULL, follow_pb2.EVENT_VIEW_SUMMARY]),
    st.sampled_from([(), ("agent.llm.*",)]),
)
def test_the_responses_of_a_page_are_the_events_of_the_view_in_order(
    events: list[event_pb2.AgentEvent], view: follow_pb2.EventView.ValueType, names: Sequence[str]
) -> None:
    selection = Selection(view, names)
    place = _following(selection)
    page = _log(events)
    expected = [shown for event in events if (shown := selection.apply(_stamped(event))) is not None]
    taken = _taken(place, page)
    assert taken == ([_response(expected, len(events))] if expected else [])
    assert place.is_behind == (bool(events) and not expected)


@pytest.mark.parametrize("view", [follow_pb2.EVENT_VIEW_FULL, follow_pb2.EVENT_VIEW_SUMMARY])
def test_streams_that_get_one_page_send_the_same_bytes(view: follow_pb2.EventView.ValueType) -> None:
    one, other = _delta("a"), _delta("b")
    page = SharedPage(_log([one, other]))
    masked = Selection(view, ["agent.tool.*"])
    places = [_following(Selection(view)), _following(Selection(view)), _following(masked)]
    (first,), (second,), none = ([*place.advance(page)] for place in places)
    assert first is second
    assert pb.RunResponse.FromString(first) == _response([_stamped(event) for event in (one, other)], 2)
    assert none == []
    assert [(place.sent_through, place.is_behind) for place in places] == [(2, False), (2, False), (0, True)]


@given(_events, st.lists(st.booleans(), min_size=1, max_size=4))
def test_streams_that_share_pages_send_what_each_would_send_alone(
    events: list[event_pb2.AgentEvent], summaries: list[bool]
) -> None:
    views = [follow_pb2.EVENT_VIEW_SUMMARY if one else follow_pb2.EVENT_VIEW_FULL for one in summaries]
    log = _log(events)
    shared = [SharedPage(log[:20]), SharedPage(log[20:])]
    places = [_following(Selection(view)) for view in views]
    sent = [[list(place.advance(page)) for place in places] for page in shared]
    alone = [_following(Selection(view)) for view in views]
    assert sent == [[list(place.advance(page)) for place in alone] for page in (log[:20], log[20:])]
    assert [place.sent_through for place in places] == [place.sent_through for place in alone]


@pytest.mark.parametrize("kind", [pb.RunResponse, pb.WatchRunResponse, pb.ResumeRunResponse, pb.ForkRunResponse])
def test_every_stream_has_the_same_layout(kind: type[Message]) -> None:
    event = _delta("a")
    (response,) = _following().advance(_log([event]))
    batch = follow_pb2.EventBatch(events=[_stamped(event)], through_sequence=1)
    (field,) = kind.DESCRIPTOR.fields
    assert (field.name, field.number) == ("batch", 1)
    assert kind.FromString(response) == kind(batch=batch)


def test_a_response_has_at_most_256_events_or_a_mebibyte_and_one_event_at_least() -> None:
    small = [_delta("") for _ in range(300)]
    assert _sizes(small) == [(256, 256), (44, 300)]
    large = [_delta("x" * 400_000), _delta("x" * 400_000), _delta("x" * 1_200_000), _delta("")]
    assert _sizes(large) == [(2, 2), (1, 3), (1, 4)]


async def _pages(*pages: Sequence[StoredEvent]) -> AsyncGenerator[Sequence[StoredEvent], None]:
    for page in pages:
        yield page


async def _collect(
    pages: AsyncGenerator[Sequence[StoredEvent], None], place: StreamPosition, *, heartbeat: float | None = None
) -> list[tuple[int, int]]:
    parsed = [
        pb.RunResponse.FromString(response)
        async for response in responses(pages, place, clock=_CLOCK, heartbeat=heartbeat)
    ]
    return [(len(response.batch.events), response.batch.through_sequence) for response in parsed]


@pytest.mark.parametrize("heartbeat", [None, 60.0])
async def test_a_stream_whose_last_pages_show_nothing_still_says_how_far_it_went(heartbeat: float | None) -> None:
    log = _log([_delta("a"), event_pb2.AgentEvent(tool_output=event_pb2.ToolOutput(text="b")), _delta("c")])
    masked = Selection(follow_pb2.EVENT_VIEW_FULL, ["agent.tool.*"])
    pages = _pages(log[:1], log[1:2], log[2:])
    assert await _collect(pages, _following(masked), heartbeat=heartbeat) == [(1, 2), (0, 3)]


async def test_a_heartbeat_comes_while_nothing_is_shown_and_says_how_far_the_log_was_considered() -> None:
    log = _log([_delta("a"), _delta("b")])
    released = asyncio.Event()

    async def slow() -> AsyncGenerator[Sequence[StoredEvent], None]:
        yield log[:1]
        await released.wait()
        yield log[1:]

    place = _following(Selection(follow_pb2.EVENT_VIEW_FULL, ["agent.tool.*"]))
    seen = []
    async with aclosing(responses(slow(), place, clock=_CLOCK, heartbeat=0.05)) as stream:
        async for response in stream:
            seen.append(pb.RunResponse.FromString(response))
            if len(seen) == 2:
                released.set()
    assert seen[:2] == [_response([], 1)] * 2
    assert seen[-1] == _response([], 2)


@pytest.mark.parametrize("heartbeat", [None, 60.0])
async def test_a_stream_that_is_closed_closes_its_pages(heartbeat: float | None) -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[Sequence[StoredEvent], None]:
        try:
            yield _log([_delta("a")])
            await asyncio.get_running_loop().create_future()
        finally:
            closed.set()

    stream = responses(endless(), _following(), clock=_CLOCK, heartbeat=heartbeat)
    await anext(stream)
    await stream.aclose()
    assert closed.is_set()


@pytest.mark.parametrize("heartbeat", [None, 60.0])
async def test_a_stream_that_is_cancelled_while_it_waits_closes_its_pages(heartbeat: float | None) -> None:
    waiting, closed = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncGenerator[Sequence[StoredEvent], None]:
        try:
            waiting.set()
            await asyncio.get_running_loop().create_future()
            yield ()
        finally:
            closed.set()

    collecting = asyncio.create_task(_collect(endless(), _following(), heartbeat=heartbeat))
    await waiting.wait()
    collecting.cancel()
    await asyncio.wait({collecting})
    assert (collecting.cancelled(), closed.is_set()) == (True, True)


@given(st.integers(1, 2**63 - 1))
def test_a_response_says_through_which_sequence_it_goes_however_large_that_is(sequence: int) -> None:
    event = _delta("a")
    event.sequence = sequence
    [response] = _taken(_following(), [StoredEvent(sequence, kind_of(event), event.SerializeToString())])
    assert response == pb.RunResponse(batch=follow_pb2.EventBatch(events=[_stamped(event)], through_sequence=sequence))
