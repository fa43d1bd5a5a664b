"""Commits that fail although they happened, or do not happen at all: nothing is written twice, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bough.v1 import event_pb2
from bough_server.errors import Fenced, StorageFailed
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.accounts import AccountKey, AccountSums, StoredAdjustment
from bough_server.store.ports.log import RunMoved
from bough_server.store.ports.runs import Page
from bough_server.store.ports.workers import RunCommand
from bough_server.store.sql.writer import CommitHooks
from tests.store.evaluation_logs import MadeEvaluation, fact, passed, scored
from tests.store.fork_logs import Fork
from tests.store.logs import ANNE, START_NS, Made, as_stored, completed, delta, everything, record, resumed, text

RETRIES = 2


class Doubt:
    """Fails commits, right before or right after they happen, while it is told to."""

    def __init__(self) -> None:
        self.before = self.after = 0

    def fail_before(self) -> None:
        """The hook before a commit."""
        if self.before:
            self.before -= 1
            raise _broken()

    def fail_after(self) -> None:
        """The hook after a commit."""
        if self.after:
            self.after -= 1
            raise _broken()


def _broken() -> OSError:
    return OSError("the database failed")


@pytest.fixture
def doubt() -> Doubt:
    """What makes commits fail."""
    return Doubt()


@pytest.fixture
async def store(url: str, doubt: Doubt) -> AsyncIterator[Store]:
    """A store whose commits may be made to fail."""
    hooks = CommitHooks(before=doubt.fail_before, after=doubt.fail_after)
    async with open_store(url, durability="process", retry_delays=(0.0,) * RETRIES, hooks=hooks) as opened:
        yield opened


Write = Callable[[], Awaitable[object]]


async def _in_doubt(write: Write, doubt: Doubt) -> None:
    """Writes, while a first commit does not happen and says so, and a second happens and says that it did not."""
    doubt.before, doubt.after = 1, 1
    await write()
    assert (doubt.before, doubt.after) == (0, 0)


async def _in_vain(write: Write, doubt: Doubt) -> None:
    """Writes, while no commit happens."""
    doubt.before = 1 + RETRIES + 1
    with pytest.raises(StorageFailed):
        await write()
    doubt.before = 0


async def test_a_take_over_in_doubt_happens_once(store: Store, doubt: Doubt) -> None:
    run = Made(question=text("?", "USER"))
    await store.log.create(run.new())
    made = run.next(resumed(2), delta(), completed(text("So.", "ASSISTANT")))
    await _in_doubt(lambda: store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1]), doubt)
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta("old owner"), 3)])
    await store.log.append(run.run_id, epoch=2, log_events=made[1:])
    assert await everything(store.log, run.run_id, after=1) == as_stored(made)
    assert len(await store.sessions.messages(ANNE, run.session_id, through=9)) == 2


async def test_a_take_over_of_the_epoch_alone_in_doubt_happens_once(store: Store, doubt: Doubt) -> None:
    run = Made()
    await store.log.create(run.new())
    await _in_doubt(lambda: store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[]), doubt)
    with pytest.raises(RunMoved):
        await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[])
    assert (await store.runs.get(ANNE, run.run_id)).epoch == 2


async def test_a_run_whose_storage_failed_is_taken_over(store: Store, doubt: Doubt) -> None:
    run = Made(question=text("?", "USER"))
    await store.log.create(run.new())
    await _in_vain(lambda: store.log.append(run.run_id, epoch=1, log_events=[record(completed(), 2)]), doubt)
    await _in_vain(
        lambda: store.log.take_over(run.run_id, epoch=2, owner="next", log_events=[record(resumed(2), 2)]), doubt
    )
    assert (await store.runs.get(ANNE, run.run_id)).epoch == 1
    made = run.next(resumed(2), completed(text("So.", "ASSISTANT")))
    await store.log.take_over(run.run_id, epoch=2, owner="next", log_events=made[:1])
    await store.log.append(run.run_id, epoch=2, log_events=made[1:])
    assert await everything(store.log, run.run_id, after=1) == as_stored(made)
    assert [one.message.position for one in await store.sessions.messages(ANNE, run.session_id, through=9)] == [1, 2]


async def test_an_owner_keeps_its_run_where_a_take_over_failed(store: Store, doubt: Doubt) -> None:
    run = Made()
    await store.log.create(run.new())
    taken = [record(resumed(2), 2)]
    await _in_vain(lambda: store.log.take_over(run.run_id, epoch=2, owner="next", log_events=taken), doubt)
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))


async def test_a_fork_in_doubt_happens_once(store: Store, doubt: Doubt) -> None:
    origin, fork = Made(number=1, question=text("?", "USER")), Fork(number=2, request_id="fork")
    await store.log.create(origin.new())
    new_fork = fork.of(origin, 1)
    await _in_vain(lambda: store.log.fork(new_fork), doubt)
    assert await store.runs.find_request(ANNE, "fork") is None
    await store.leases.begin("worker")  # the disk is well again, and so is tried again
    await _in_doubt(lambda: store.log.fork(new_fork), doubt)
    made = fork.next(completed(text("So.", "ASSISTANT")))
    await store.log.append(fork.run_id, epoch=1, log_events=made)
    assert await everything(store.log, fork.run_id) == as_stored([*origin.first(), *new_fork.log_events, *made])
    assert len(await store.sessions.messages(ANNE, fork.session_id, through=9)) == 2


async def test_a_run_that_waits_is_accepted_once_in_doubt(store: Store, doubt: Doubt) -> None:
    holder, run = Made(number=1), Made(number=2, session_number=1, is_queued=True)
    await store.log.create(holder.new())
    await _in_doubt(lambda: store.log.create(run.new()), doubt)
    await _in_doubt(lambda: store.log.append(holder.run_id, epoch=1, log_events=holder.next(completed())), doubt)
    held = await store.runs.holder(ANNE, holder.session_id)
    assert held is not None
    assert held.run.run_id == run.run_id


async def test_a_letter_in_doubt_is_posted_once(store: Store, doubt: Doubt) -> None:
    run = Made()
    await store.log.create(run.new())
    letter = RunCommand(command_id=0, run_id=run.run_id, cancel=event_pb2.CancelRequested())
    await _in_doubt(lambda: store.mailbox.post(letter), doubt)
    (taken,) = await store.mailbox.take(run.run_id)
    await _in_doubt(lambda: store.mailbox.delete_command(taken.command_id), doubt)
    assert await store.mailbox.take(run.run_id) == []


async def test_an_end_is_not_lost_for_what_was_refused_behind_it(store: Store, doubt: Doubt) -> None:
    run = Made(question=text("?", "USER"))
    await store.log.create(run.new())
    doubt.before = 1
    end = record(completed(), 2)
    writes = [store.log.append(run.run_id, epoch=1, log_events=[one]) for one in (end, record(delta("late"), 3))]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), Fenced]
    assert await everything(store.log, run.run_id, after=1) == as_stored([end])


async def test_an_evaluation_in_doubt_is_created_once(store: Store, doubt: Doubt) -> None:
    made = MadeEvaluation(request_id="ask")
    await _in_vain(lambda: store.log.create_evaluation(made.new()), doubt)
    assert await store.evaluations.find_request(ANNE, "ask") is None
    await store.leases.begin("worker")  # the disk is well again, and so is tried again
    await _in_doubt(lambda: store.log.create_evaluation(made.new()), doubt)
    before = made.next(scored())
    await _in_doubt(lambda: store.log.append(made.evaluation_id, epoch=1, log_events=before), doubt)
    await _in_doubt(lambda: store.log.take_over(made.evaluation_id, epoch=2, owner="next", log_events=[]), doubt)
    after = made.next(scored(), passed())
    await _in_doubt(lambda: store.log.append(made.evaluation_id, epoch=2, log_events=after), doubt)
    assert await everything(store.log, made.evaluation_id) == as_stored([*made.first(), *before, *after])
    assert (await store.evaluations.get(ANNE, made.evaluation_id)).evaluation.totals.trials_ended == 2


async def test_an_evaluation_whose_storage_failed_is_taken_over(store: Store, doubt: Doubt) -> None:
    made = MadeEvaluation()
    await store.log.create_evaluation(made.new())
    lost = [fact(scored(), made.last_sequence + 1)]
    await _in_vain(lambda: store.log.append(made.evaluation_id, epoch=1, log_events=lost), doubt)
    await store.log.take_over(made.evaluation_id, epoch=2, owner="next", log_events=[])
    await store.log.append(made.evaluation_id, epoch=2, log_events=made.next(scored(), passed()))
    assert (await store.evaluations.get(ANNE, made.evaluation_id)).evaluation.totals.trials_ended == 1


async def test_a_claim_in_doubt_is_made_once(store: Store, doubt: Doubt) -> None:
    await store.leases.begin("a")
    await store.log.create(Made().new())

    async def claim() -> None:
        (claimed,) = await store.leases.claim("a", most=9)
        assert (claimed.run.run_id, claimed.owner) == (Made().run_id, "")

    await _in_doubt(claim, doubt)


async def test_a_claim_that_was_made_although_it_failed_is_found_by_the_next(store: Store, doubt: Doubt) -> None:
    await store.leases.begin("a")
    await store.log.create(Made().new())
    doubt.after = 1 + RETRIES
    with pytest.raises(StorageFailed):
        await store.leases.claim("a", most=9)
    assert doubt.after == 0
    (claimed,) = await store.leases.claim("a", most=9)
    assert claimed.run.run_id == Made().run_id
    assert (await store.runs.get(ANNE, Made().run_id)).owner == "a"


async def test_an_adjustment_in_doubt_is_made_once(store: Store, doubt: Doubt) -> None:
    key = AccountKey(tenant_id="acme", user_id="anne", currency_code="EUR")
    paid = StoredAdjustment(
        request_id="p", amount_nanos=5, currency_code="EUR", note="", time_ns=START_NS, made_by="bill"
    )
    await _in_vain(lambda: store.accounts.adjust(key, paid), doubt)
    await store.leases.begin("worker")  # the disk is well again, and so is tried again
    await _in_doubt(lambda: store.accounts.adjust(key, paid), doubt)
    assert await store.accounts.adjust(key, paid) == paid
    assert (await store.accounts.list_adjustments(key, Page(size=9)))[0] == [paid]
    assert await store.accounts.read_sums([key]) == [AccountSums(balance_nanos=5, summed_from_ns=START_NS)]
