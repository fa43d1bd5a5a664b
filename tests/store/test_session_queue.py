"""Runs that wait for their session: first in, first out, each with its cut when its turn comes."""

import asyncio

import pytest

from bough.v1 import event_pb2, execution_pb2
from bough_server.errors import NotFound, SessionBusy, SessionQueueFull
from bough_server.store.opening import Store, open_store
from tests.store.logs import ANNE, BERT, START_NS, Made, as_stored, completed, everything, resumed, session_id, text
from tests.support.open_runs import open_runs


def _queued(number: int) -> Made:
    return Made(number=number, session_number=1, is_queued=True, question=text(f"{number}?", "USER"))


def _dequeued(cut: int) -> event_pb2.AgentEvent:
    return event_pb2.AgentEvent(run_dequeued=event_pb2.RunDequeued(session_cut=cut))


async def _holding(store: Store) -> Made:
    run = Made(question=text("1?", "USER"))
    await store.log.create(run.new())
    return run


async def _holder(store: Store) -> str:
    holder = await store.runs.holder(ANNE, session_id(1))
    return holder.run.run_id if holder else ""


async def _end(store: Store, run: Made, words: str = "Yes.") -> None:
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed(text(words, "ASSISTANT"))))


async def test_a_run_that_waits_is_accepted_pending_and_says_nothing_in_the_session(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    shown = (await store.runs.get(ANNE, second.run_id)).run
    assert (shown.state, shown.last_sequence, shown.HasField("start_time")) == (
        execution_pb2.EXECUTION_STATE_PENDING,
        2,
        False,
    )
    assert await _holder(store) == first.run_id
    assert (await store.sessions.read_position(ANNE, session_id(1))).position == 1
    assert list(await store.log.read(second.run_id)) == as_stored(second.first())
    assert [one.run.run_id for one in await open_runs(store)] == [first.run_id, second.run_id]


async def test_the_end_of_the_holder_gives_the_session_to_the_run_that_has_waited_longest(store: Store) -> None:
    first, runs = await _holding(store), [_queued(number) for number in (4, 2, 3)]
    for run in runs:
        await store.log.create(run.new())
    await _end(store, first)
    turns: list[str] = []
    while holder := await _holder(store):
        turns.append(holder)
        (run,) = (run for run in runs if run.run_id == holder)
        cut = (await store.sessions.read_position(ANNE, session_id(1))).position
        await store.log.append(holder, epoch=1, log_events=run.next(_dequeued(cut), completed()))
    assert turns == [Made(number=number).run_id for number in (2, 3, 4)]
    said = [one.message.parts[0].text for one in await store.sessions.messages(ANNE, session_id(1), through=9)]
    assert said == ["1?", "Yes.", "2?", "3?", "4?"]
    assert (await store.sessions.get(ANNE, session_id(1))).current_run_id == ""


async def test_a_run_whose_turn_comes_has_its_message_after_all_that_was_said(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    await _end(store, first)
    begun = second.next(_dequeued(2))
    await store.log.append(second.run_id, epoch=1, log_events=begun)
    shown = (await store.runs.get(ANNE, second.run_id)).run
    assert (shown.state, shown.start_time) == (execution_pb2.EXECUTION_STATE_RUNNING, begun[0].event.record_time)
    await _end(store, second, "No.")
    stored = await store.sessions.messages(ANNE, session_id(1), through=9)
    assert [(one.message.position, one.message.parts[0].text, one.run_id) for one in stored] == [
        (1, "1?", first.run_id),
        (2, "Yes.", first.run_id),
        (3, "2?", second.run_id),
        (4, "No.", second.run_id),
    ]


async def test_a_session_that_is_free_is_not_waited_for(store: Store) -> None:
    first = await _holding(store)
    await _end(store, first)
    with pytest.raises(SessionBusy, match="No run holds the session"):
        await store.log.create(_queued(2).new())
    await store.log.create(Made(number=3, session_number=1, session_cut=2).new())


async def test_a_run_that_does_not_wait_is_refused_while_another_has_been_given_the_session(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    await _end(store, first)
    with pytest.raises(SessionBusy) as busy:
        await store.log.create(Made(number=3, session_number=1, session_cut=2).new())
    assert busy.value.details == {"session_id": session_id(1), "run_id": second.run_id}


async def test_so_many_runs_may_wait_and_no_more(store: Store) -> None:
    first = await _holding(store)
    runs = [_queued(number) for number in range(2, 66)]
    await asyncio.gather(*(store.log.create(run.new()) for run in runs))
    with pytest.raises(SessionQueueFull, match="64 runs already wait"):
        await store.log.create(_queued(66).new())
    await _end(store, first)
    await store.log.create(_queued(66).new())


async def test_a_run_that_ends_while_it_waits_was_never_in_the_session(store: Store) -> None:
    first, second, third = await _holding(store), _queued(2), _queued(3)
    for run in (second, third):
        await store.log.create(run.new())
    cancelled = event_pb2.AgentEvent(run_cancelled=event_pb2.RunCancelled())
    await store.log.append(second.run_id, epoch=1, log_events=second.next(cancelled))
    assert await _holder(store) == first.run_id
    await _end(store, first)
    assert await _holder(store) == third.run_id
    assert len(await store.sessions.messages(ANNE, session_id(1), through=9)) == 2


async def test_a_session_that_runs_wait_for_is_not_deleted(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    await _end(store, first)
    with pytest.raises(SessionBusy):
        await store.sessions.delete(ANNE, session_id(1))
    await store.log.append(second.run_id, epoch=1, log_events=second.next(completed()))
    await store.sessions.delete(ANNE, session_id(1))


async def test_the_session_goes_on_with_the_end_that_a_take_over_brings(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    await store.log.take_over(first.run_id, epoch=2, owner="next", log_events=first.next(resumed(2), completed()))
    assert await _holder(store) == second.run_id


async def test_waiting_outlives_the_server_and_its_owner(url: str) -> None:
    second = _queued(2)
    async with open_store(url) as store:
        first = await _holding(store)
        await store.log.create(second.new())
    async with open_store(url) as store:
        await store.log.take_over(second.run_id, epoch=2, owner="next", log_events=second.next(resumed(2)))
        assert (await store.runs.get(ANNE, second.run_id)).run.state == execution_pb2.EXECUTION_STATE_PENDING
        await store.log.append(first.run_id, epoch=1, log_events=first.next(completed()))
        assert await _holder(store) == second.run_id
    async with open_store(url) as store:
        await store.log.append(second.run_id, epoch=2, log_events=second.next(_dequeued(1), completed()))
        stored = await store.sessions.messages(ANNE, session_id(1), through=9)
        assert [one.message.parts[0].text for one in stored] == ["1?", "2?"]


async def test_readers_of_a_run_that_waits_see_it_go_on(store: Store) -> None:
    first, second = await _holding(store), _queued(2)
    await store.log.create(second.new())
    reader = asyncio.ensure_future(everything(store.log, second.run_id))
    await _end(store, first)
    made = second.next(_dequeued(2), completed())
    await store.log.append(second.run_id, epoch=1, log_events=made)
    assert await reader == as_stored([*second.first(), *made])


async def test_a_run_waits_for_a_session_of_its_tenant_only(store: Store) -> None:
    await _holding(store)
    foreign = _queued(2)
    foreign.principal = BERT
    with pytest.raises(NotFound):
        await store.log.create(foreign.new())


async def test_a_session_that_nobody_holds_has_no_holder(store: Store) -> None:
    await store.sessions.create(ANNE, session_id=session_id(1), labels={}, now_ns=START_NS)
    assert await store.runs.holder(ANNE, session_id(1)) is None
    assert await store.runs.holder(ANNE, session_id(2)) is None


async def test_mistakes_of_a_caller_who_queues_are_told_at_once(store: Store) -> None:
    for mistaken in (
        Made(is_queued=True),
        Made(session_number=2, session_cut=1, is_queued=True),
    ):
        with pytest.raises(ValueError, match="a queued run"):
            await store.log.create(mistaken.new())


async def test_of_a_run_that_waits_and_one_that_does_not_at_the_end_of_the_holder_one_is_told_to_try_again(
    store: Store,
) -> None:
    first, waiting = await _holding(store), _queued(2)
    plain = Made(number=3, session_number=1, session_cut=2)
    ended = asyncio.ensure_future(_end(store, first))
    await asyncio.sleep(0)
    outcomes = await asyncio.gather(
        store.log.create(waiting.new()), store.log.create(plain.new()), return_exceptions=True
    )
    await ended
    assert [type(outcome) for outcome in outcomes] == [SessionBusy, type(None)]
