"""What every EventLog does when a run gets another owner."""

import asyncio
import threading

import pytest

from bough.v1 import event_pb2, execution_pb2, session_pb2
from bough_server.errors import Fenced
from bough_server.runs.close import read_log_events
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.log import RunMoved
from bough_server.store.sql.writer import CommitHooks
from tests.store.logs import ANNE, Made, as_stored, completed, delta, everything, record, resumed, text


def kept(effect: str, **values: str) -> event_pb2.AgentEvent:
    """What code wrote."""
    changes = [session_pb2.SessionStateChange(key=key, value_json=text) for key, text in values.items()]
    return event_pb2.AgentEvent(
        effect_key=effect, session_state_changed=event_pb2.SessionStateChanged(state_changes=changes)
    )


async def test_taking_over_refuses_the_owner_before(store: Store) -> None:
    run = Made(owner="first")
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    assert (await store.runs.get(ANNE, run.run_id)).owner == "first"
    begun = run.next(resumed(2, "second"))
    await store.log.take_over(run.run_id, epoch=2, owner="second", log_events=begun)
    taken = await store.runs.get(ANNE, run.run_id)
    assert (taken.owner, taken.epoch, taken.run.last_sequence) == ("second", 2, 3)
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta("old owner"), 4)])
    await store.log.append(run.run_id, epoch=2, log_events=run.next(completed()))
    assert (await store.runs.get(ANNE, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


async def test_of_two_who_read_the_same_log_one_takes_it_over(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    outcomes = await asyncio.gather(
        *(
            store.log.take_over(run.run_id, epoch=2, owner="same", log_events=[record(resumed(2, "same"), 2)])
            for _ in range(3)
        ),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), RunMoved, RunMoved]
    assert await store.log.last_sequence(run.run_id) == 2


@pytest.mark.parametrize(("epoch", "sequence"), [(1, 2), (3, 2), (2, 1), (2, 3)])
async def test_who_read_another_log_than_there_is_has_to_read_again(store: Store, epoch: int, sequence: int) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(RunMoved):
        await store.log.take_over(run.run_id, epoch=epoch, owner="late", log_events=[record(resumed(epoch), sequence)])
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    assert (await store.runs.get(ANNE, run.run_id)).owner == ""


async def test_an_append_that_is_still_queued_comes_before_a_take_over(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    made = run.next(delta(), resumed(2))
    append = store.log.append(run.run_id, epoch=1, log_events=made[:1])
    with pytest.raises(RunMoved):
        await store.log.take_over(run.run_id, epoch=2, owner="late", log_events=[record(resumed(2), 2)])
    await append
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[1:])
    assert list(await store.log.read(run.run_id, after=1)) == as_stored(made)


async def test_a_take_over_alone_raises_the_epoch_and_says_nothing(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[])
    with pytest.raises(RunMoved):
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[])
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta(), 2)])
    made = run.next(completed())
    await store.log.append(run.run_id, epoch=2, log_events=made)
    assert await everything(store.log, run.run_id) == as_stored([run.new().first, *made])


async def test_what_a_new_owner_writes_first_is_derived_from_as_any_append(store: Store) -> None:
    run = Made(question=text("?", "USER"))
    await store.log.create(run.new())
    reader = asyncio.ensure_future(everything(store.log, run.run_id, after=1))
    await asyncio.sleep(0)
    made = run.next(resumed(2), completed(text("So.", "ASSISTANT")))
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made)
    assert await reader == as_stored(made)
    assert (await store.runs.get(ANNE, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_SUCCEEDED
    assert (await store.sessions.get(ANNE, run.session_id)).current_run_id == ""
    stored = await store.sessions.messages(ANNE, run.session_id, through=9)
    assert [(one.message.position, one.message.parts[0].text) for one in stored] == [(1, "?"), (2, "So.")]
    with pytest.raises(Fenced):
        await store.log.take_over(run.run_id, epoch=3, owner="late", log_events=[record(resumed(3), 4)])


async def test_an_append_in_the_name_of_an_epoch_to_come_does_not_harm_it(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=2, log_events=[record(delta("too soon"), 2)])
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=run.next(resumed(2)))
    await store.log.append(run.run_id, epoch=2, log_events=run.next(completed()))


async def test_a_taker_who_goes_away_leaves_readers_no_gap(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    reader = asyncio.ensure_future(everything(store.log, run.run_id))
    made = run.next(resumed(2), delta(), completed())
    taking = asyncio.ensure_future(store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1]))
    await asyncio.sleep(0)
    taking.cancel()
    await store.log.append(run.run_id, epoch=2, log_events=made[1:2])
    await store.log.append(run.run_id, epoch=2, log_events=made[2:])
    assert await reader == as_stored([run.new().first, *made])


async def test_a_run_goes_on_after_the_store_was_closed(url: str) -> None:
    run = Made(question=text("Why?", "USER"))
    async with open_store(url) as store:
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    async with open_store(url) as store:
        made = run.next(resumed(2), completed(text("So.", "ASSISTANT")))
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1])
        await store.log.append(run.run_id, epoch=2, log_events=made[1:])
        stored = await store.sessions.messages(ANNE, run.session_id, through=9)
        assert [(one.message.position, one.message.parts[0].text) for one in stored] == [(1, "Why?"), (2, "So.")]
        assert [one.agent for one in stored] == ["lead", "lead"]


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_new_owner_goes_on_from_the_log_that_it_has_read_itself(store: Store, is_read: bool) -> None:
    run = Made(question=text("Why?", "USER"))
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e0.1/e0", a="1"), delta()))
    log = [] if not is_read else await read_log_events(store.log, run.run_id)
    written = kept("e0.0/e0", a="0", b="0")  # in an earlier lane than what the owner before has written
    made = run.next(resumed(2), written, completed(text("So.", "ASSISTANT")))
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1], log=log)
    await store.log.append(run.run_id, epoch=2, log_events=made[1:])
    stored = await store.sessions.messages(ANNE, run.session_id, through=9)
    assert [(one.message.position, one.message.parts[0].text) for one in stored] == [(1, "Why?"), (2, "So.")]
    assert (await store.sessions.read_position(ANNE, run.session_id)).state_json == '{"a":1,"b":0}'


async def test_a_log_that_ended_before_another_owner_wrote_takes_nothing_over(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    log = await read_log_events(store.log, run.run_id)
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    with pytest.raises(RunMoved):
        await store.log.take_over(run.run_id, epoch=2, owner="late", log_events=[record(resumed(2), 2)], log=log)
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))


async def test_a_late_append_of_the_former_owner_fails_alone(url: str) -> None:
    may_commit = threading.Event()
    may_commit.set()

    def hold() -> None:
        may_commit.wait()

    async with open_store(url, hooks=CommitHooks(before=hold)) as store:
        run, busy = Made(number=1), Made(number=2)
        for each in (run, busy):
            await store.log.create(each.new())
        taken = run.next(resumed(2))
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=taken)
        may_commit.clear()
        holding = store.log.append(busy.run_id, epoch=1, log_events=busy.next(delta()))
        first = run.next(delta("first"))
        appends = [store.log.append(run.run_id, epoch=2, log_events=first)]
        appends.append(store.log.append(run.run_id, epoch=1, log_events=[record(delta("late"), 4)]))
        second = run.next(delta("second"), completed())
        appends.append(store.log.append(run.run_id, epoch=2, log_events=second))
        may_commit.set()
        await holding
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), Fenced, type(None)]
        assert await everything(store.log, run.run_id, after=1) == as_stored([*taken, *first, *second])
