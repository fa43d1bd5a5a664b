"""What every store does with evaluations: logs as those of runs, and nothing of them among the runs."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bough.v1 import evaluation_ref_pb2, event_pb2, execution_pb2
from bough.v1.evaluation_ref_pb2 import EvaluationRef
from bough_server.errors import Fenced, NotFound, StorageFailed
from bough_server.log import evaluation_events
from bough_server.store.opening import Store, open_store, rebuild_projections
from bough_server.store.ports.log import AnyLogEvent, RequestIdTaken, RunMoved
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.ports.workers import RunCommand
from tests.store.evaluation_logs import MadeEvaluation, began, cancelled, fact, passed, scored
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, BERT, Made, as_stored, completed, everything, next_page
from tests.support.open_runs import open_runs

TURN, JUDGE = evaluation_ref_pb2.EVALUATION_ROLE_TURN, evaluation_ref_pb2.EVALUATION_ROLE_JUDGE
RUNNING = execution_pb2.EXECUTION_STATE_RUNNING


async def _made(store: Store, number: int = 1) -> MadeEvaluation:
    made = MadeEvaluation(number=number)
    await store.log.create_evaluation(made.new())
    return made


class _Disguised(Made):
    """An evaluation, named as a run is."""

    @property
    def run_id(self) -> str:
        return MadeEvaluation(number=self.number).evaluation_id


async def test_a_log_has_the_bytes_that_were_appended(store: Store) -> None:
    made = await _made(store)
    rest = made.next(began(), scored(), passed())
    await store.log.append(made.evaluation_id, epoch=1, log_events=rest)
    assert list(await store.log.read(made.evaluation_id)) == as_stored([*made.first(), *rest])
    assert await store.log.last_sequence(made.evaluation_id) == 6
    stamp = evaluation_events.stamp(made.evaluation_id)
    (_, _, planned, *_) = [
        evaluation_events.parse(stamp + one.data) for one in await store.log.read(made.evaluation_id)
    ]
    assert (planned.evaluation_id, planned.sequence, planned.case_planned.eval_case.id) == (
        made.evaluation_id,
        3,
        "two",
    )


async def test_an_evaluation_that_has_ended_is_deleted_with_its_log_and_no_other(store: Store) -> None:
    made, other = await _made(store), await _made(store, number=2)
    assert not await store.evaluations.delete(ANNE, made.evaluation_id)
    await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(began(), scored(), passed()))
    with pytest.raises(NotFound):
        await store.evaluations.delete(replace(ANNE, tenant_id="other"), made.evaluation_id)
    assert (await store.evaluations.get(ANNE, made.evaluation_id)).evaluation.last_sequence == 6
    assert await store.evaluations.delete(ANNE, made.evaluation_id)
    with pytest.raises(NotFound):
        await store.evaluations.delete(ANNE, made.evaluation_id)
    with pytest.raises(NotFound):
        await store.evaluations.get(ANNE, made.evaluation_id)
    with pytest.raises(NotFound):
        await store.log.read(made.evaluation_id)
    assert list(await store.log.read(other.evaluation_id)) == as_stored(other.first())
    run = Made(number=9)
    await store.log.create(run.new())
    with pytest.raises(NotFound):
        await store.evaluations.delete(ANNE, run.run_id)


async def test_a_tail_ends_with_the_terminal_event(store: Store) -> None:
    made = await _made(store)
    tail = store.log.tail(made.evaluation_id)
    assert await next_page(tail) == as_stored(made.first())
    waiting = asyncio.ensure_future(next_page(tail))
    await asyncio.sleep(0)
    rest = made.next(began(), cancelled())
    await store.log.append(made.evaluation_id, epoch=1, log_events=rest)
    assert await waiting == as_stored(rest)
    with pytest.raises(StopAsyncIteration):
        await anext(tail)
    assert await everything(store.log, made.evaluation_id, after=4) == as_stored(rest[1:])


async def test_an_ended_log_is_read_after_a_restart(url: str) -> None:
    made = MadeEvaluation()
    rest = made.next(*(scored() for _ in range(300)), passed())
    async with open_store(url) as store:
        await store.log.create_evaluation(made.new())
        await store.log.append(made.evaluation_id, epoch=1, log_events=rest)
    async with open_store(url) as store:
        assert await everything(store.log, made.evaluation_id) == as_stored([*made.first(), *rest])


async def test_readers_are_ended_with_an_error(store: Store) -> None:
    made = await _made(store)
    tail = store.log.tail(made.evaluation_id)
    await next_page(tail)
    store.log.fail_readers(made.evaluation_id, StorageFailed("No."))
    with pytest.raises(StorageFailed):
        await anext(tail)
    await store.log.take_over(made.evaluation_id, epoch=2, owner="next", log_events=[])
    assert await next_page(store.log.tail(made.evaluation_id)) == as_stored(made.first())


async def test_an_evaluation_of_eight_mebibytes_is_created_in_one_transaction(store: Store) -> None:
    made = MadeEvaluation(cases=[str(number) * 2**20 for number in range(8)])
    await store.log.create_evaluation(made.new())
    assert await store.log.last_sequence(made.evaluation_id) == 9
    stored = [
        one for after in range(9) for one in await store.log.read(made.evaluation_id, after=after, through=after + 1)
    ]
    assert stored == as_stored(made.first())


async def test_an_append_that_leaves_a_gap_is_refused_and_so_is_every_later_one(store: Store) -> None:
    made = await _made(store)
    for sequence in (5, 4):
        with pytest.raises(Fenced):
            await store.log.append(made.evaluation_id, epoch=1, log_events=[fact(began(), sequence)])
    assert await store.log.last_sequence(made.evaluation_id) == 3


async def test_nothing_follows_a_terminal_event(store: Store) -> None:
    made = await _made(store)
    await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(passed()))
    with pytest.raises(Fenced):
        await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(began()))
    with pytest.raises(Fenced):
        await store.log.take_over(made.evaluation_id, epoch=2, owner="late", log_events=[])
    with pytest.raises(ValueError, match="terminal event"):
        store.log.append(made.evaluation_id, epoch=1, log_events=made.next(passed(), began()))


@pytest.mark.parametrize("is_reopened", [False, True])
async def test_a_taken_over_evaluation_has_one_owner(url: str, is_reopened: bool) -> None:
    made = MadeEvaluation(owner="first")
    async with open_store(url) as store:
        await store.log.create_evaluation(made.new())
        before = made.next(scored())
        await store.log.append(made.evaluation_id, epoch=1, log_events=before)
        if not is_reopened:
            await _take_over(store, made, [*made.first(), *before], "first")
    if is_reopened:
        async with open_store(url) as store:
            await _take_over(store, made, [*made.first(), *before], "")  # "first" has no lease


async def _take_over(store: Store, made: MadeEvaluation, before: list[AnyLogEvent], owner: str) -> None:
    (open_one,) = await store.evaluations.open_evaluations()
    assert (open_one.owner, open_one.epoch) == (owner, 1)
    await store.log.take_over(made.evaluation_id, epoch=2, owner="next", log_events=[])
    with pytest.raises(RunMoved):
        await store.log.take_over(made.evaluation_id, epoch=2, owner="another", log_events=[])
    with pytest.raises(Fenced):
        await store.log.append(made.evaluation_id, epoch=1, log_events=[fact(began(), made.last_sequence + 1)])
    after = made.next(scored(), began())
    await store.log.append(made.evaluation_id, epoch=2, log_events=after)
    last = made.next(passed())
    await store.log.take_over(made.evaluation_id, epoch=3, owner="last", log_events=last)
    assert await everything(store.log, made.evaluation_id) == as_stored([*before, *after, *last])
    record = await store.evaluations.get(ANNE, made.evaluation_id)
    assert (record.owner, record.epoch, record.evaluation.last_sequence) == ("last", 3, made.last_sequence)
    assert (record.evaluation.totals.trials_ended, record.evaluation.totals.trials_passed) == (2, 2)
    assert await store.evaluations.open_evaluations() == []


async def test_the_owner_of_an_open_evaluation_is_known_to_have_crashed(url: str) -> None:
    async with open_store(url) as store:
        await store.leases.begin("first")
        await store.log.create_evaluation(MadeEvaluation(owner="first").new())
    async with open_store(url) as store:
        assert store.leases.has_crashed("first")


async def test_request_ids_of_evaluations_and_of_runs_are_apart(store: Store) -> None:
    run, made = Made(request_id="ask", request_digest="r"), MadeEvaluation(request_id="ask", request_digest="e")
    await store.log.create(run.new())
    await store.log.create_evaluation(made.new())
    with pytest.raises(RequestIdTaken) as taken:
        await store.log.create(Made(number=2, request_id="ask").new())
    assert (taken.value.run_id, taken.value.request_digest) == (run.run_id, "r")
    with pytest.raises(RequestIdTaken) as taken:
        await store.log.create_evaluation(MadeEvaluation(number=2, request_id="ask").new())
    assert (taken.value.run_id, taken.value.request_digest) == (made.evaluation_id, "e")
    await store.log.create_evaluation(MadeEvaluation(number=3, principal=BERT, request_id="ask").new())
    await store.log.create_evaluation(MadeEvaluation(number=4).new())
    await store.log.create_evaluation(MadeEvaluation(number=5).new())
    found = await store.evaluations.find_request(ANNE, "ask")
    assert found == await store.evaluations.get(ANNE, made.evaluation_id)
    assert await store.evaluations.find_request(BERT, "other") is None
    assert await store.evaluations.find_request(ANNE, "") is None
    started = await store.runs.find_request(ANNE, "ask")
    assert started == await store.runs.get(ANNE, run.run_id)


async def test_of_equal_requests_at_once_one_is_accepted(store: Store) -> None:
    new = [MadeEvaluation(number=number, request_id="same").new() for number in range(1, 9)]
    outcomes = await asyncio.gather(*map(store.log.create_evaluation, new), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None)] + [RequestIdTaken] * 7


async def test_an_evaluation_is_no_run(store: Store) -> None:
    made, run = await _made(store), Made()
    await store.log.create(run.new())
    evaluation_id = made.evaluation_id
    with pytest.raises(NotFound) as unknown:
        await store.runs.get(ANNE, evaluation_id)
    with pytest.raises(NotFound) as absent:
        await store.runs.get(ANNE, "absent")
    assert unknown.value.message == absent.value.message.replace("absent", evaluation_id)
    assert await store.runs.find(evaluation_id) is None
    listed, _ = await store.runs.list(ANNE, RunFilter(), Page(size=9))
    assert [one.run_id for one in listed] == [run.run_id]
    assert [one.run.run_id for one in await open_runs(store)] == [run.run_id]
    with pytest.raises(NotFound):
        await store.log.fork(Fork(number=2).of(_Disguised(), 1))
    assert await store.runs.holder(ANNE, "") is None
    with pytest.raises(NotFound):
        await store.sessions.delete(ANNE, "")


async def test_a_run_is_no_evaluation(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(NotFound, match="evaluation"):
        await store.evaluations.get(ANNE, run.run_id)
    assert await store.evaluations.find(run.run_id) is None
    assert await store.evaluations.open_evaluations() == []


async def test_another_tenants_evaluation_does_not_exist(store: Store) -> None:
    made = await _made(store)
    with pytest.raises(NotFound):
        await store.evaluations.get(BERT, made.evaluation_id)
    assert (await store.evaluations.find(made.evaluation_id)) == await store.evaluations.get(ANNE, made.evaluation_id)


async def test_an_evaluation_has_no_session(store: Store) -> None:
    made = await _made(store)
    await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(scored(), passed()))
    assert (await store.sessions.list(ANNE, labels={}, page=Page(size=9)))[0] == []
    assert await store.usage.list_for_run(made.evaluation_id) == []


async def test_what_an_evaluation_is_created_with_has_to_be_in_its_first_events(store: Store) -> None:
    new = MadeEvaluation(request_id="ask").new()
    mistaken = {
        "sequence 1": replace(new, log_events=new.log_events[1:]),
        "one case_planned for each case": replace(new, log_events=new.log_events[:-1]),
        "request id": replace(new, request_id="another"),
        "set's name": replace(new, eval_set_name="another"),
    }
    for problem, one in mistaken.items():
        with pytest.raises(ValueError, match="gap|" + problem):
            await store.log.create_evaluation(one)


async def test_cancelling_reaches_the_owner_by_the_mailbox(store: Store) -> None:
    made, run = await _made(store), Made()
    await store.log.create(run.new())
    cancel = event_pb2.CancelRequested(requested_by="anne", note="Too slow.")
    number = await store.mailbox.post(RunCommand(command_id=0, run_id=made.evaluation_id, cancel=cancel))
    assert await anext(aiter(store.mailbox.arrivals())) == made.evaluation_id
    (command,) = await store.mailbox.take(made.evaluation_id)
    assert command == RunCommand(command_id=number, run_id=made.evaluation_id, cancel=cancel)
    await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(cancelled()))
    assert await store.mailbox.take(made.evaluation_id) == []
    with pytest.raises(Fenced):
        await store.mailbox.post(command)
    with pytest.raises(NotFound):
        await store.mailbox.post(replace(command, run_id="absent"))


async def test_runs_know_the_evaluation_that_they_belong_to(store: Store) -> None:
    turn = EvaluationRef(evaluation_id="e1", case_id="one", trial=2, turn=1, role=TURN)
    judge = EvaluationRef(evaluation_id="e1", case_id="two", role=JUDGE, metric="polite", judged_run_id="r")
    started, other = Made(number=1, evaluation=turn), Made(number=2)
    await store.log.create(started.new())
    await store.log.create(other.new())
    await store.log.fork(Fork(number=3).of(other, 1, changes=event_pb2.RunForked(evaluation=judge)))
    await store.log.fork(Fork(number=4).of(started, 1))
    shown = [(await store.runs.get(ANNE, Made(number=number).run_id)).run for number in range(1, 5)]
    assert [run.evaluation for run in shown] == [turn, EvaluationRef(), judge, EvaluationRef()]
    assert [run.HasField("evaluation") for run in shown] == [True, False, True, False]
    numbers = {run.run_id: number for number, run in enumerate(shown, start=1)}

    async def listed(**asked: Any) -> list[int]:
        found, _ = await store.runs.list(ANNE, RunFilter(**asked), Page(size=9))
        return [numbers[run.run_id] for run in found]

    assert await listed() == await listed(agent="lead") == [4, 2]
    assert await listed(include_evaluation_runs=True) == [4, 3, 2, 1]
    assert await listed(session_id=started.session_id) == [1]
    assert await listed(evaluation_id="e1") == [3, 1]
    assert await listed(case_id="one") == await listed(evaluation_role=TURN) == [1]
    assert await listed(evaluation_id="e1", evaluation_role=JUDGE) == [3]
    assert await listed(states=[RUNNING], include_evaluation_runs=True) == [4, 3, 2, 1]
    pages, token = [], ""
    while not pages or token:
        page, token = await store.runs.list(ANNE, RunFilter(include_evaluation_runs=True), Page(size=1, token=token))
        pages += [numbers[run.run_id] for run in page]
    assert pages == [4, 3, 2, 1]
    listed_first, _ = await store.runs.list(ANNE, RunFilter(evaluation_id="e1"), Page(size=9))
    only, token = await store.runs.list(ANNE, RunFilter(evaluation_id="e1"), Page(size=1))
    rest, _ = await store.runs.list(ANNE, RunFilter(evaluation_id="e1"), Page(size=1, token=token))
    assert [*only, *rest] == listed_first
    assert (await store.runs.list(ANNE, RunFilter(evaluation_id="e2"), Page(size=9)))[0] == []


async def test_rebuilding_counts_runs_and_keeps_evaluations(url: str) -> None:
    async with open_store(url) as store:
        made, run = await _made(store), Made()
        await store.log.create(run.new())
        await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
        await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(scored()))
        before = await store.evaluations.get(ANNE, made.evaluation_id)
    assert rebuild_projections(url) == 1
    async with open_store(url) as store:
        assert await store.evaluations.get(ANNE, made.evaluation_id) == before
        await store.log.append(made.evaluation_id, epoch=1, log_events=made.next(passed()))
