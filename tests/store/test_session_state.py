"""The values of a session in the store: written with their events, checked where a run begins, copied by forks."""

import pytest

from bough.v1 import event_pb2, session_pb2
from bough_server.errors import InvalidRequest, NotFound, SessionBusy
from bough_server.log.session_state import MAX_STATE_BYTES
from bough_server.store.opening import Store, open_store, rebuild_projections
from bough_server.store.ports.log import SessionMoved
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, BERT, START_NS, Made, completed, delta, resumed, session_id
from tests.store.sql import execute


def change(key: str, text: str | None) -> session_pb2.SessionStateChange:
    """A change; None deletes."""
    return session_pb2.SessionStateChange(key=key, value_json=text)


def kept(effect: str, *changes: session_pb2.SessionStateChange) -> event_pb2.AgentEvent:
    """What code wrote."""
    return event_pb2.AgentEvent(
        effect_key=effect, session_state_changed=event_pb2.SessionStateChanged(state_changes=changes)
    )


async def _state(store: Store, number: int) -> str:
    return (await store.sessions.read_position(ANNE, session_id(number))).state_json


async def test_what_a_run_writes_is_the_sessions_with_its_event(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e0", change("a", "1.0"), change("b", "2"))))
    assert await _state(store, 1) == '{"a":1.0,"b":2}'
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta(), kept("e1", change("a", None)), delta()))
    assert await _state(store, 1) == '{"b":2}'
    await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e2", change("b", None)), completed()))
    assert await _state(store, 1) == ""


async def test_an_append_that_is_refused_writes_nothing_of_the_state(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    records = run.next(kept("e0", change("a", "1")))
    with pytest.raises(Exception, match="cannot be continued here"):
        await store.log.append(run.run_id, epoch=2, log_events=records)
    assert await _state(store, 1) == ""


async def test_a_run_begins_with_the_state_that_its_session_has_or_not_at_all(store: Store) -> None:
    await store.sessions.create(ANNE, session_id=session_id(1), labels={}, now_ns=START_NS)
    await store.sessions.update_state(ANNE, session_id(1), [change("a", "1")])
    for state_json in ("", '{"a":2}'):
        with pytest.raises(SessionMoved):
            await store.log.create(Made(number=2, session_number=1, state_json=state_json).new())
    run = Made(number=2, session_number=1, state_json='{"a":1}')
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e0", change("b", "2"))))
    assert await _state(store, 1) == '{"a":1,"b":2}'


@pytest.mark.parametrize("made", [Made(state_json='{"a":1}'), Made(session_number=2, is_queued=True, state_json="{}")])
async def test_a_run_that_can_have_no_state_yet_names_none(store: Store, made: Made) -> None:
    with pytest.raises(ValueError, match=r"cannot have a state|without a session cut or state"):
        await store.log.create(made.new())


async def test_a_state_is_changed_by_nobody_while_a_run_holds_its_session(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(SessionBusy) as busy:
        await store.sessions.update_state(ANNE, run.session_id, [change("a", "1")])
    assert busy.value.details["run_id"] == run.run_id
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    assert await store.sessions.update_state(ANNE, run.session_id, [change("a", "1")]) == '{"a":1}'


async def test_a_state_is_changed_by_its_tenant_alone_and_within_its_bound(store: Store) -> None:
    await store.sessions.create(ANNE, session_id=session_id(1), labels={}, now_ns=START_NS)
    with pytest.raises(NotFound):
        await store.sessions.update_state(BERT, session_id(1), [change("a", "1")])
    large = change("large", '"' + "x" * MAX_STATE_BYTES + '"')
    with pytest.raises(InvalidRequest):
        await store.sessions.update_state(ANNE, session_id(1), [change("a", "1"), large])
    assert await _state(store, 1) == ""


async def test_another_owner_goes_on_from_the_state_of_the_log(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e0.1/e0", change("a", "1"))))
    await store.log.take_over(run.run_id, epoch=2, owner="b", log_events=run.next(resumed(2, "b")))
    await store.log.append(
        run.run_id, epoch=2, log_events=run.next(kept("e0.0/e0", change("a", "0"), change("b", "0")))
    )
    assert await _state(store, 1) == '{"a":1,"b":0}'


async def test_a_forks_session_begins_with_the_state_at_its_cut(store: Store) -> None:
    origin = Made()
    await store.log.create(origin.new())
    batch = origin.next(kept("e0", change("a", "1")), kept("e1", change("a", "2")), completed())
    await store.log.append(origin.run_id, epoch=1, log_events=batch)
    for number, sequence in ((2, 1), (3, 2), (4, 3)):
        fork = Fork(number=number)
        await store.log.fork(fork.of(origin, sequence))
    assert [await _state(store, number) for number in (1, 2, 3, 4)] == ['{"a":2}', "", '{"a":1}', '{"a":2}']
    await store.log.append(fork.run_id, epoch=1, log_events=fork.next(kept("e2", change("b", "3"))))
    assert [await _state(store, number) for number in (1, 4)] == ['{"a":2}', '{"a":2,"b":3}']


async def test_a_fork_of_a_run_that_wrote_nothing_begins_with_what_that_one_began_with(store: Store) -> None:
    await store.sessions.create(ANNE, session_id=session_id(1), labels={}, now_ns=START_NS)
    await store.sessions.update_state(ANNE, session_id(1), [change("a", "1")])
    origin = Made(number=2, session_number=1, state_json='{"a":1}')
    await store.log.create(origin.new())
    await store.log.append(origin.run_id, epoch=1, log_events=origin.next(completed()))
    await store.sessions.update_state(ANNE, session_id(1), [change("a", "2")])
    await store.log.fork(Fork(number=3).of(origin, 1))
    assert await _state(store, 3) == '{"a":1}'


async def test_rebuilding_makes_the_states_of_logs_and_leaves_those_of_calls(url: str) -> None:
    async with open_store(url) as store:
        for number in (1, 2):
            run = Made(number=number)
            await store.log.create(run.new())
            records = run.next(kept("e0", change("a", str(number))), completed())
            await store.log.append(run.run_id, epoch=1, log_events=records)
        await store.sessions.update_state(ANNE, session_id(2), [change("b", "2")])
    execute(url, "UPDATE sessions SET state_json = 'lost' WHERE state_run_id != ''")
    rebuild_projections(url)
    async with open_store(url) as store:
        assert [await _state(store, number) for number in (1, 2)] == ['{"a":1}', '{"a":2,"b":2}']
