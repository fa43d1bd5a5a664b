"""What every EventLog does: accepting runs, appending, taking over, reading pages."""

import asyncio

import pytest

from bough.v1 import event_pb2
from bough_server.errors import Fenced, NotFound, SessionBusy
from bough_server.log import events
from bough_server.store.ports.log import RequestIdTaken, SessionMoved, StoredEvent
from bough_server.store.sql.store import Store
from bough_server.store.window import PAGE_BYTES, PAGE_EVENTS
from tests.store.logs import ANNE, BERT, Made, as_stored, completed, definition, delta, everything, record, text


async def test_a_log_gives_back_the_bytes_that_were_appended(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    rest = run.next(delta("a"), delta("b"), completed())
    await store.log.append(run.run_id, epoch=1, log_events=rest)
    assert list(await store.log.read(run.run_id)) == as_stored([run.new().first, *rest])
    assert await store.log.last_sequence(run.run_id) == 4


async def test_appends_of_a_run_are_committed_in_the_order_of_the_calls(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    appended = [run.next(delta(str(number))) for number in range(200)]
    await asyncio.gather(*(store.log.append(run.run_id, epoch=1, log_events=one) for one in appended))
    stored = await store.log.read(run.run_id, after=1)
    assert list(stored) == as_stored([one for (one,) in appended])


async def test_an_append_that_leaves_a_gap_is_refused_and_so_is_every_later_one(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta(), 3)])
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta(), 2)])
    assert await store.log.last_sequence(run.run_id) == 1


async def test_an_append_at_a_place_that_is_taken_is_refused(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    mine = run.next(delta("mine"))
    await store.log.append(run.run_id, epoch=1, log_events=mine)
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=[record(delta("late"), 2)])
    assert list(await store.log.read(run.run_id, after=1)) == as_stored(mine)


async def test_a_refused_run_takes_no_other_run_of_its_group_with_it(store: Store) -> None:
    runs = [Made(number=number) for number in range(1, 6)]
    for run in runs:
        await store.log.create(run.new())
    await store.log.take_over(runs[2].run_id, epoch=2, owner="", log_events=[])
    outcomes = await asyncio.gather(
        *(store.log.append(run.run_id, epoch=1, log_events=run.next(delta())) for run in runs), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), Fenced, type(None), type(None)]
    assert [await store.log.last_sequence(run.run_id) for run in runs] == [2, 2, 1, 2, 2]


async def test_nothing_follows_a_terminal_event(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    with pytest.raises(Fenced):
        await store.log.append(run.run_id, epoch=1, log_events=run.next(delta()))
    with pytest.raises(Fenced):
        await store.log.take_over(run.run_id, epoch=2, owner="late", log_events=[])


async def test_an_append_to_a_run_that_does_not_exist_is_refused(store: Store) -> None:
    with pytest.raises(Fenced):
        await store.log.append(Made().run_id, epoch=1, log_events=Made().next(delta()))
    with pytest.raises(NotFound):
        await store.log.take_over(Made().run_id, epoch=1, owner="", log_events=[])
    with pytest.raises(NotFound):
        await store.log.last_sequence(Made().run_id)


async def test_mistakes_of_the_caller_are_told_at_once(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    for mistaken in (
        [],
        [record(delta(), 2), record(delta(), 4)],
        [record(completed(), 2), record(delta(), 3)],
    ):
        with pytest.raises(ValueError, match=r"append|event"):
            store.log.append(run.run_id, epoch=1, log_events=mistaken)


async def test_a_page_has_at_most_256_events(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(*(delta() for _ in range(600))))
    page = await store.log.read(run.run_id, after=100)
    assert [event.sequence for event in page] == list(range(101, 101 + PAGE_EVENTS))
    assert [event.sequence for event in await store.log.read(run.run_id, after=600)] == [601]
    assert list(await store.log.read(run.run_id, after=601)) == []


async def test_a_page_has_at_most_a_mebibyte_but_always_one_event(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    large = "x" * (PAGE_BYTES // 2 - 100)
    await store.log.append(
        run.run_id, epoch=1, log_events=run.next(delta(large), delta(large), delta("x" * PAGE_BYTES))
    )
    assert [event.sequence for event in await store.log.read(run.run_id, after=1)] == [2, 3]
    assert [event.sequence for event in await store.log.read(run.run_id, after=3)] == [4]


async def test_a_page_can_end_early_and_leave_out_deltas(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    started = event_pb2.AgentEvent(llm_started=event_pb2.LlmStarted(model="m"))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(started, delta(), delta(), completed()))
    assert [event.sequence for event in await store.log.read(run.run_id, through=3)] == [1, 2, 3]
    without = await store.log.read(run.run_id, deltas=False)
    assert [event.kind for event in without] == [events.RUN_STARTED, events.LLM_STARTED, events.RUN_COMPLETED]


async def test_a_request_id_is_taken_once_in_a_tenant(store: Store) -> None:
    first = Made(number=1, request_id="ask-1", request_digest="d1")
    await store.log.create(first.new())
    with pytest.raises(RequestIdTaken) as taken:
        await store.log.create(Made(number=2, request_id="ask-1", request_digest="d2").new())
    assert (taken.value.run_id, taken.value.request_digest) == (first.run_id, "d1")
    await store.log.create(Made(number=3, principal=BERT, request_id="ask-1", request_digest="d3").new())
    await store.log.create(Made(number=4).new())
    await store.log.create(Made(number=5).new())
    assert (await store.runs.find_request(ANNE, "ask-1")) == await store.runs.get(ANNE, first.run_id)
    assert await store.runs.find_request(BERT, "ask-2") is None
    assert await store.runs.find_request(ANNE, "") is None


async def test_of_equal_requests_at_once_one_is_accepted(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.log.create(Made(number=number, request_id="same").new()) for number in range(1, 9)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None)] + [RequestIdTaken] * 7


async def test_a_session_has_one_run_at_a_time(store: Store) -> None:
    first = Made(number=1, question=text("1", "USER"))
    await store.log.create(first.new())
    second = Made(number=2, session_number=1, session_cut=2)
    with pytest.raises(SessionBusy) as busy:
        await store.log.create(second.new())
    assert busy.value.details == {"session_id": first.session_id, "run_id": first.run_id}
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed(text("one", "ASSISTANT"))))
    await store.log.create(second.new())
    assert (await store.sessions.get(ANNE, first.session_id)).current_run_id == second.run_id


async def test_a_run_that_names_an_old_cut_of_its_session_is_refused(store: Store) -> None:
    first = Made(number=1, question=text("1", "USER"))
    await store.log.create(first.new())
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed(text("one", "ASSISTANT"))))
    with pytest.raises(SessionMoved):
        await store.log.create(Made(number=2, session_number=1, session_cut=1).new())


async def test_a_refused_run_leaves_nothing(store: Store) -> None:
    run = Made(number=7, session_number=3, request_id="ask", question=text("1", "USER"))
    with pytest.raises(NotFound):
        await store.log.create(run.new())
    assert await store.runs.find_request(ANNE, "ask") is None
    with pytest.raises(NotFound):
        await store.log.read(run.run_id)
    with pytest.raises(NotFound):
        await store.runs.get(ANNE, run.run_id)


async def test_another_tenants_session_does_not_exist(store: Store) -> None:
    first = Made(number=1)
    await store.log.create(first.new())
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed()))
    with pytest.raises(NotFound):
        await store.log.create(Made(number=2, principal=BERT, session_number=1).new())


async def test_definitions_are_kept_once_by_revision(store: Store) -> None:
    lead, writer = definition("lead", "r1"), definition("writer", "r2")
    await store.log.create(Made(number=1, definitions=[lead, writer]).new())
    await store.log.create(Made(number=2, definitions=[lead]).new())
    assert [await store.catalog.get(revision) for revision in ("r1", "r2", "r3")] == [lead, writer, None]


async def test_what_a_run_started_with_has_to_be_in_its_first_event(store: Store) -> None:
    new_run = Made().new()
    new_run.first.event.run_started.request_id = "another"
    with pytest.raises(ValueError, match="request id"):
        await store.log.create(new_run)


async def test_a_log_of_any_length_is_read_in_pages(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    made = run.next(*(delta(str(number)) for number in range(1000)), completed())
    await store.log.append(run.run_id, epoch=1, log_events=made)
    pages: list[StoredEvent] = []
    while page := await store.log.read(run.run_id, after=pages[-1].sequence if pages else 0):
        pages += page
    assert pages == as_stored([run.new().first, *made])
    assert await everything(store.log, run.run_id) == pages
