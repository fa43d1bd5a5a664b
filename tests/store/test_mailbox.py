"""What every Mailbox does: commands that survive until their owner has acted on them, and the bell."""

import asyncio

import pytest

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, input_pb2
from bough_server.errors import Fenced, NotFound, ServerStopping
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.workers import RunCommand, Topic
from bough_server.store.sql.mailbox import REPEAT_SECONDS
from tests.store.logs import ANNE, Made, completed, resumed
from tests.support.held_clock import HeldClock


def _cancel(run: Made, letter_id: int = 0) -> RunCommand:
    return RunCommand(
        command_id=letter_id,
        run_id=run.run_id,
        cancel=event_pb2.CancelRequested(
            reason=execution_pb2.CANCEL_REASON_CALLER, requested_by="anne", note="It takes too long.", by_run_id="next"
        ),
    )


def _answers(run: Made, letter_id: int = 0) -> RunCommand:
    answer = input_pb2.InputAnswer(input_id="q1", value_json="1")
    answers = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=[answer], request_id="ask")
    return RunCommand(command_id=letter_id, run_id=run.run_id, answers=answers, user_id="bert", deadline_time_ns=2**62)


async def _made(store: Store, number: int = 1) -> Made:
    run = Made(number=number)
    await store.log.create(run.new())
    return run


async def test_letters_are_taken_in_the_order_they_were_posted_until_they_are_done(store: Store) -> None:
    run, other = await _made(store, 1), await _made(store, 2)
    first = await store.mailbox.post(_answers(run))
    await store.mailbox.post(_cancel(other))
    second = await store.mailbox.post(_cancel(run))
    both = [_answers(run, first), _cancel(run, second)]
    assert await store.mailbox.take(run.run_id) == both
    assert await store.mailbox.take(run.run_id) == both, "they stay until they are done"
    await store.mailbox.delete_command(first)
    await store.mailbox.delete_command(first)
    assert await store.mailbox.take(run.run_id) == both[1:]


async def test_letters_outlive_the_server_and_their_ids_are_given_once(url: str) -> None:
    async with open_store(url) as store:
        run = await _made(store)
        first = await store.mailbox.post(_cancel(run))
        second = await store.mailbox.post(_answers(run))
        await store.mailbox.delete_command(second)
    async with open_store(url) as store:
        assert await store.mailbox.take(run.run_id) == [_cancel(run, first)]
        assert await anext(aiter(store.mailbox.arrivals())) == run.run_id
        assert await store.mailbox.post(_cancel(run)) > second


async def test_whoever_listens_is_told_of_what_waits_and_of_what_comes(store: Store) -> None:
    runs = [await _made(store, number) for number in (1, 2, 3)]
    await store.mailbox.post(_cancel(runs[0]))
    arrivals = [aiter(store.mailbox.arrivals()) for _ in range(2)]
    assert [await anext(each) for each in arrivals] == [runs[0].run_id] * 2
    waiting = [asyncio.ensure_future(anext(each)) for each in arrivals]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    await store.mailbox.post(_answers(runs[1]))
    await store.mailbox.post(_cancel(runs[2]))
    assert await asyncio.gather(*waiting) == [runs[1].run_id] * 2
    assert [await anext(each) for each in arrivals] == [runs[2].run_id] * 2


async def test_who_posts_and_goes_away_has_posted(store: Store) -> None:
    run = await _made(store)
    arrivals = aiter(store.mailbox.arrivals())
    waiting = asyncio.ensure_future(anext(arrivals))
    posting = asyncio.ensure_future(store.mailbox.post(_cancel(run)))
    await asyncio.sleep(0)
    posting.cancel()
    assert await waiting == run.run_id
    assert len(await store.mailbox.take(run.run_id)) == 1


async def test_a_run_that_has_ended_takes_no_letters_and_keeps_none(store: Store) -> None:
    run, taken = await _made(store, 1), await _made(store, 2)
    for each in (run, taken):
        await store.mailbox.post(_cancel(each))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    await store.log.take_over(taken.run_id, epoch=2, owner="next", log_events=taken.next(resumed(2), completed()))
    for each in (run, taken):
        assert await store.mailbox.take(each.run_id) == []
        with pytest.raises(Fenced):
            await store.mailbox.post(_cancel(each))
    await store.sessions.delete(ANNE, run.session_id)
    with pytest.raises(NotFound):
        await store.mailbox.post(_cancel(run))


async def test_a_letter_says_one_thing(store: Store) -> None:
    run = await _made(store)
    for mistaken in (
        RunCommand(command_id=0, run_id=run.run_id),
        RunCommand(
            command_id=0,
            run_id=run.run_id,
            cancel=event_pb2.CancelRequested(),
            answers=agent_service_pb2.ResumeRunRequest(),
        ),
    ):
        with pytest.raises(ValueError, match="either cancel a run or bring answers"):
            await store.mailbox.post(mistaken)


async def test_closing_the_store_sends_listeners_home(url: str) -> None:
    async with open_store(url) as store:
        arrivals = aiter(store.mailbox.arrivals())
        waiting = asyncio.ensure_future(anext(arrivals))
        await store.leases.begin("somebody")
    with pytest.raises(ServerStopping):
        await waiting


async def test_commands_that_stay_pending_are_notified_again_by_the_servers_clock(url: str) -> None:
    clock = HeldClock()
    async with open_store(url, durability="process", clock=clock) as store:
        run, other = await _made(store, 1), await _made(store, 2)
        await store.mailbox.post(_cancel(run))
        arrivals = aiter(store.mailbox.arrivals())
        assert await anext(arrivals) == run.run_id
        waiting = asyncio.ensure_future(anext(arrivals))
        store.notifier.deliver(Topic.COMMANDS, "")
        await store.mailbox.post(_cancel(other))
        assert await waiting == other.run_id, "no time has passed for the first one"
        clock.advance(REPEAT_SECONDS)
        store.notifier.deliver(Topic.COMMANDS, "")
        assert {await anext(arrivals), await anext(arrivals)} == {run.run_id, other.run_id}
