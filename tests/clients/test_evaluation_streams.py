"""Streams of evaluations: whatever breaks, each sequence is streamed once and in order, of a single evaluation."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough import AsyncClient, Client, DeadlineExceeded, Rejoining, Unavailable
from bough.v1 import eval_result_pb2, evaluation_pb2, follow_pb2
from bough.v1 import eval_service_pb2 as pb
from bough.v1 import eval_set_pb2 as sets
from tests.clients.durable_server import Drop, Moment
from tests.clients.evaluation_server import EVALUATION_ID, EvaluatingService, connected, evaluating, log_of
from tests.clients.stream_server import AT_ONCE, NO_TRANSPARENT_RETRIES

LOG = log_of(4)
SET = sets.EvalSet(name="trips", agent="guide", cases=[sets.EvalCase(id="oslo", turns=[sets.EvalTurn(user="Hi")])])
DROPS = st.lists(
    st.none() | st.builds(Drop, moment=st.sampled_from(Moment), events=st.integers(0, 9), is_silent=st.booleans()),
    max_size=6,
)
UNHEARD = [Drop(moment=moment) for moment in (Moment.UNHEARD, Moment.UNANSWERED)]


async def listed(events: AsyncIterator[evaluation_pb2.EvaluationEvent]) -> list[evaluation_pb2.EvaluationEvent]:
    return [event async for event in events]


@given(drops=DROPS, overlap=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
async def test_every_sequence_comes_once_and_in_order_over_dropped_connections(
    drops: list[Drop | None], overlap: int
) -> None:
    service = EvaluatingService(LOG, drops, overlap=overlap)
    async with connected(service) as client:
        assert await listed(client.evaluations.run(SET)) == LOG
        assert len(service.started) == 1
        assert await listed(client.evaluations.watch(EVALUATION_ID, after_sequence=2)) == LOG[2:]


@given(drops=DROPS, overlap=st.integers(0, 3))
@settings(max_examples=20, deadline=None)
async def test_the_synchronous_client_streams_the_same(drops: list[Drop | None], overlap: int) -> None:
    service = EvaluatingService(LOG, drops, overlap=overlap)

    def follow(address: str) -> list[list[evaluation_pb2.EvaluationEvent]]:
        with Client(address, rejoining=AT_ONCE, options=NO_TRANSPARENT_RETRIES) as client:
            run = list(client.evaluations.run(SET))
            return [run, list(client.evaluations.watch(EVALUATION_ID, after_sequence=2))]

    async with evaluating(service) as address:
        assert await asyncio.to_thread(follow, address) == [LOG, LOG[2:]]
    assert len(service.started) == 1


async def test_a_call_is_repeated_under_one_request_id_until_it_is_accepted_and_then_the_evaluation_is_watched() -> (
    None
):
    service = EvaluatingService(LOG, [*UNHEARD, Drop(moment=Moment.ACCEPTED), Drop(events=2)])
    async with connected(service) as client:
        assert await listed(client.evaluations.run(SET, agent="guide", trials=2, gates=["pass_rate >= 0.5"])) == LOG

    first = service.asked[0]
    assert isinstance(first, pb.EvaluateRequest)
    assert first.request_id
    follow = follow_pb2.EvaluationFollowOptions()
    assert first == pb.EvaluateRequest(
        request_id=first.request_id, eval_set=SET, agent="guide", trials=2, gates=["pass_rate >= 0.5"], follow=follow
    )
    assert service.asked == [
        *[first] * 3,
        pb.WatchEvaluationRequest(evaluation_id=EVALUATION_ID, follow=follow),
        pb.WatchEvaluationRequest(evaluation_id=EVALUATION_ID, after_sequence=2, follow=follow),
    ]


async def test_the_callers_own_request_id_and_what_its_stream_shows_are_kept() -> None:
    service = EvaluatingService(LOG, [Drop(events=2)])
    names = ["case_trial_scored"]
    async with connected(service) as client:
        shown = await listed(
            client.evaluations.run(SET, request_id="ci-7", heartbeat=2.5, event_names=names, without_trees=True)
        )

    evaluate, watch = service.asked
    assert isinstance(evaluate, pb.EvaluateRequest)
    assert evaluate.request_id == "ci-7"
    follow = follow_pb2.EvaluationFollowOptions(event_names=names, without_trees=True)
    follow.heartbeat_interval.FromMilliseconds(2500)
    assert [one.follow for one in (evaluate, watch)] == [follow, follow]
    assert shown == LOG[1:]


async def test_a_stream_that_is_shown_few_events_rejoins_after_all_that_were_considered() -> None:
    service = EvaluatingService(LOG, [Drop(events=4), Drop(events=1)])
    names = ["evaluation_completed"]
    async with connected(service) as client:
        assert await listed(client.evaluations.watch(EVALUATION_ID, event_names=names)) == LOG[-1:]
    watched = [asked for asked in service.asked if isinstance(asked, pb.WatchEvaluationRequest)]
    assert [asked.after_sequence for asked in watched] == [0, 4, 5]


async def test_a_stream_that_ends_without_the_evaluations_end_is_rejoined() -> None:
    service = EvaluatingService(LOG, [Drop(events=2, is_silent=True), Drop(is_silent=True)])
    async with connected(service) as client:
        assert await listed(client.evaluations.run(SET)) == LOG
    assert len(service.asked) == 3


async def test_to_watch_an_ended_evaluation_after_its_last_event_streams_nothing() -> None:
    service = EvaluatingService(LOG)

    def follow(address: str) -> list[evaluation_pb2.EvaluationEvent]:
        with Client(address) as client:
            return list(client.evaluations.watch(EVALUATION_ID, after_sequence=len(LOG)))

    async with evaluating(service) as address, AsyncClient(address) as client:
        assert await listed(client.evaluations.watch(EVALUATION_ID, after_sequence=len(LOG))) == []
        assert await asyncio.to_thread(follow, address) == []
    assert len(service.asked) == 2


async def test_a_server_that_ends_every_stream_early_is_given_up() -> None:
    service = EvaluatingService(LOG, [Drop(is_silent=True)] * 100_000)
    rejoining = Rejoining(first_delay=0.0, longest_delay=0.0, timeout=0.2)
    async with connected(service, rejoining) as client:
        with pytest.raises(Unavailable, match="ended the stream before the end of the evaluation"):
            await listed(client.evaluations.run(SET))


async def test_a_server_that_stays_away_ends_the_stream_with_its_error() -> None:
    service = EvaluatingService(LOG, [Drop(events=1), *[Drop(moment=Moment.UNHEARD)] * 100_000])
    rejoining = Rejoining(first_delay=0.0, longest_delay=0.0, timeout=0.2)
    async with connected(service, rejoining) as client:
        with pytest.raises(Unavailable):
            await listed(client.evaluations.run(SET))


async def test_the_time_for_following_bounds_the_stream_and_names_the_evaluation() -> None:
    service = EvaluatingService(LOG, [Drop(events=0)] * 1000)
    rejoining = Rejoining(first_delay=0.05, longest_delay=0.05)
    async with connected(service, rejoining) as client:
        with pytest.raises(DeadlineExceeded):
            await listed(client.evaluations.watch(EVALUATION_ID, timeout=0.2))


async def test_a_stream_that_is_closed_early_ends_its_call_and_has_no_result() -> None:
    service = EvaluatingService(log_of(20_000))
    async with connected(service) as client:
        async with client.evaluations.watch(EVALUATION_ID) as stream:
            assert await anext(stream) == service.log[0]
            assert stream.through_sequence == 1
        await asyncio.wait_for(service.left.wait(), 10)
        with pytest.raises(ValueError, match="closed before the end of the evaluation"):
            await stream.result()


async def test_a_synchronous_stream_that_is_closed_early_ends_its_call_and_has_no_result() -> None:
    service = EvaluatingService(log_of(20_000))

    def first(address: str) -> None:
        with Client(address) as client:
            with client.evaluations.watch(EVALUATION_ID) as stream:
                assert next(stream).sequence == 1
            left.result(10)
            with pytest.raises(ValueError, match="closed before the end of the evaluation"):
                stream.result()

    async with evaluating(service) as address:
        left = asyncio.run_coroutine_threadsafe(service.left.wait(), asyncio.get_running_loop())
        await asyncio.to_thread(first, address)


async def test_the_id_is_known_before_the_first_event_and_no_event_is_lost() -> None:
    service = EvaluatingService(LOG, [Drop(moment=Moment.UNANSWERED), None, Drop(moment=Moment.UNANSWERED)])

    def follow(address: str) -> tuple[str, str, list[evaluation_pb2.EvaluationEvent]]:
        client = Client(address, rejoining=AT_ONCE, options=NO_TRANSPARENT_RETRIES)
        with client, client.evaluations.run(SET) as stream:
            return stream.started(), stream.evaluation_id, list(stream)

    async with connected(service) as client, client.evaluations.run(SET, request_id="ci-7") as stream:
        assert (stream.request_id, stream.evaluation_id) == ("ci-7", "")
        assert (await stream.started(), stream.evaluation_id) == (EVALUATION_ID, EVALUATION_ID)
        assert await listed(stream) == LOG
        assert await asyncio.to_thread(follow, client.address) == (EVALUATION_ID, EVALUATION_ID, LOG)


async def test_the_result_is_that_of_the_end_with_every_case() -> None:
    service = EvaluatingService(LOG, [Drop(events=2), None, None, Drop(events=3)])

    def judge(address: str) -> eval_result_pb2.EvalResult:
        with Client(address, rejoining=AT_ONCE, options=NO_TRANSPARENT_RETRIES) as client:
            return client.evaluations.run(SET).result()

    async with connected(service) as client:
        async with client.evaluations.run(SET) as stream:
            assert await anext(stream) == LOG[0]
            result = await stream.result()
        assert await stream.result() == result
        assert await client.evaluations.watch(EVALUATION_ID, after_sequence=len(LOG)).result() == result
        assert await asyncio.to_thread(judge, client.address) == result
    assert [case.case_id for case in result.cases] == [f"case-{number}" for number in range(4)]
    assert [request.after_sequence for request in service.asked if isinstance(request, pb.WatchEvaluationRequest)] == [
        2,
        len(LOG),
        3,
    ]


async def test_a_stream_cancels_its_evaluation_while_another_task_reads() -> None:
    service = EvaluatingService(LOG[:2], holds=True)

    def cancel(address: str) -> None:
        with Client(address) as client, client.evaluations.run(SET) as stream:
            stream.cancel()

    async with connected(service) as client:
        stream = client.evaluations.run(SET)
        reader = asyncio.create_task(listed(stream))
        await stream.cancel()
        await stream.aclose()
        assert await reader == LOG[: len(await reader)]
        await asyncio.to_thread(cancel, client.address)
    assert service.cancelled == [EVALUATION_ID] * 2


async def test_a_result_is_joined_from_what_was_found_and_the_pages_of_its_cases() -> None:
    service = EvaluatingService(LOG)

    def read(address: str) -> eval_result_pb2.EvalResult:
        with Client(address) as client:
            return client.evaluations.result(EVALUATION_ID, page_size=3)

    async with evaluating(service) as address, AsyncClient(address) as client:
        result = await client.evaluations.result(EVALUATION_ID, page_size=3)
        assert await asyncio.to_thread(read, address) == result
        assert (await client.evaluations.get(EVALUATION_ID)).evaluation_id == EVALUATION_ID
    assert result.evaluation_id == EVALUATION_ID
    assert [case.case_id for case in result.cases] == [f"case-{number}" for number in range(4)]


async def test_a_list_of_cases_has_its_filters_on_every_page() -> None:
    service = EvaluatingService(LOG)
    verdicts, labels, case_ids = [eval_result_pb2.VERDICT_FAILED], {"pr": "7"}, ["case-1"]

    def read(address: str) -> list[eval_result_pb2.CaseResult]:
        with Client(address) as client:
            cases = client.evaluations.cases
            return list(cases(EVALUATION_ID, verdicts=verdicts, labels=labels, case_ids=case_ids, page_size=3))

    async with evaluating(service) as address, AsyncClient(address) as client:
        cases = client.evaluations.cases
        found = cases(EVALUATION_ID, verdicts=verdicts, labels=labels, case_ids=case_ids, page_size=3)
        assert [case async for case in found] == await asyncio.to_thread(read, address)
    wanted = evaluation_pb2.CaseResultFilter(verdicts=verdicts, labels=labels, case_ids=case_ids)
    pages = [
        pb.ListCaseResultsRequest(page_size=3, page_token=token, evaluation_id=EVALUATION_ID, filter=wanted)
        for token in ("", "3")
    ]
    assert service.listed == pages * 2


async def test_to_score_takes_as_long_as_the_caller_says_by_default_as_long_as_it_takes() -> None:
    service = EvaluatingService(LOG)

    def score(address: str) -> None:
        with Client(address, call_timeout=5) as client:
            client.evaluations.score([])
            client.evaluations.score([], timeout=90)

    async with evaluating(service) as address, AsyncClient(address, call_timeout=5) as client:
        await client.evaluations.score([])
        await client.evaluations.score([], timeout=90)
        await asyncio.to_thread(score, address)
    assert [left is None or 5 < left < 100 for left in service.deadlines] == [True] * 4
    assert [left is None for left in service.deadlines] == [True, False] * 2
