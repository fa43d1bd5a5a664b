"""Where a run stands while it goes on: its state, what it asks, and when the first of that expires."""

import pytest

from bough.v1 import event_pb2, execution_pb2, run_pb2
from bough_server.store.opening import Store, open_store
from tests.store.logs import ANNE, BERT, SECOND, START_NS, Made, completed, delta, resumed
from tests.store.question_events import answered, asked, interrupted, request, tool_ended

CHILD = "s0.t0"


async def _shown(store: Store, run: Made) -> run_pb2.Run:
    return (await store.runs.get(ANNE, run.run_id)).run


async def _append(store: Store, run: Made, *batch: event_pb2.AgentEvent) -> tuple[int, list[str]]:
    """Appends each event by itself; gives the run's state after the last, and what it asks."""
    for event in batch:
        await store.log.append(run.run_id, epoch=1, log_events=run.next(event))
    shown = await _shown(store, run)
    return shown.state, [each.input_id for each in shown.open_requests]


async def test_a_run_that_waits_for_an_answer_is_input_required_until_it_is_resumed(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    first, second = request("q1", run), request("q2", run, call_id="c1")
    assert await _append(store, run, asked(first), delta(), asked(second)) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        ["q1", "q2"],
    )
    assert list((await _shown(store, run)).open_requests) == [first, second]
    waiting = await _append(store, run, interrupted(first, second))
    assert waiting == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, ["q1", "q2"])
    assert (await store.sessions.get(ANNE, run.session_id)).current_run_id == run.run_id
    resumed_run = await _append(store, run, answered("q1"), resumed(1))
    assert resumed_run == (execution_pb2.EXECUTION_STATE_RUNNING, ["q2"])
    assert await _append(store, run, completed()) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, [])


async def test_a_run_that_waits_and_is_to_end_waits_for_nobody_any_more(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    asks = request("q1", run)
    part = event_pb2.AgentEvent(cancel_requested=event_pb2.CancelRequested(effect_scope=CHILD))
    whole = event_pb2.AgentEvent(cancel_requested=event_pb2.CancelRequested())
    assert await _append(store, run, asked(asks), interrupted(asks), part) == (
        execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        ["q1"],
    )
    assert await _append(store, run, whole) == (execution_pb2.EXECUTION_STATE_RUNNING, ["q1"])


async def test_what_an_interruption_lists_is_open_and_nothing_else(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    requests = [request(name, run) for name in ("q1", "q2", "q3")]
    state = await _append(store, run, *map(asked, requests), interrupted(requests[2], requests[0]))
    assert state == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, ["q3", "q1"])


@pytest.mark.parametrize("failed", [False, True])
async def test_a_call_that_ends_asks_nothing_any_more(store: Store, failed: bool) -> None:
    run = Made()
    await store.log.create(run.new())
    requests = [
        request("approval", run, call_id="c1"),
        request("other call", run, call_id="c2"),
        request("other agent's", run, call_id="c1", scope=CHILD),
        request("question", run),
    ]
    state = await _append(store, run, *map(asked, requests), tool_ended("c1", failed=failed))
    assert state == (execution_pb2.EXECUTION_STATE_RUNNING, ["other call", "other agent's", "question"])


@pytest.mark.parametrize(
    "end",
    [
        event_pb2.AgentEvent(sub_agent_completed=event_pb2.SubAgentCompleted()),
        event_pb2.AgentEvent(sub_agent_failed=event_pb2.SubAgentFailed()),
    ],
)
async def test_an_invocation_that_ends_asks_nothing_any_more(store: Store, end: event_pb2.AgentEvent) -> None:
    run = Made()
    await store.log.create(run.new())
    child, own = (
        request("child's", run, call_id="c9", scope=CHILD),
        request("root's", run, call_id="c1"),
    )
    ended = event_pb2.AgentEvent(invocation_id=child.invocation_id)
    ended.MergeFrom(end)
    assert await _append(store, run, asked(child), asked(own), ended) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        ["root's"],
    )


async def test_the_next_expiry_is_the_first_of_all_runs_that_wait(store: Store) -> None:
    runs = [Made(number=1), Made(number=2, principal=BERT), Made(number=3)]
    for run, expires in zip(runs, ((50, 40), (30,), (0,)), strict=True):
        await store.log.create(run.new())
        requests = [request(f"q{number}", run, expires=time) for number, time in enumerate(expires)]
        await store.log.append(run.run_id, epoch=1, log_events=run.next(*map(asked, requests)))
        assert await store.runs.next_expiry() is None
    assert await store.runs.next_expiry() is None, "no run waits yet"
    expected = []
    for run, first_time in zip(runs, (40, 30, 0), strict=True):
        listed = [request("q", run, expires=first_time)]
        await store.log.append(run.run_id, epoch=1, log_events=run.next(interrupted(*listed)))
        expected.append(await store.runs.next_expiry())
    first, second = (START_NS + 40 * SECOND, runs[0].run_id), (START_NS + 30 * SECOND, runs[1].run_id)
    assert expected == [first, second, second]
    await store.log.append(runs[1].run_id, epoch=1, log_events=runs[1].next(resumed(1)))
    assert await store.runs.next_expiry() == first
    await store.log.append(runs[0].run_id, epoch=1, log_events=runs[0].next(completed()))
    assert await store.runs.next_expiry() is None


async def test_what_is_asked_outlives_the_server(url: str) -> None:
    run = Made()
    requests = [request("q1", run, expires=9), request("q2", run)]
    async with open_store(url) as store:
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(*map(asked, requests), interrupted(*requests)))
    async with open_store(url) as store:
        assert await store.runs.next_expiry() == (START_NS + 9 * SECOND, run.run_id)
        assert list((await _shown(store, run)).open_requests) == requests
        assert await _append(store, run, answered("q1")) == (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, ["q2"])
        assert await store.runs.next_expiry() is None
