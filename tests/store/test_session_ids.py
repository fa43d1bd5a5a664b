"""Ids of sessions that callers choose, and request ids: unique in a tenant, and of a user."""

import asyncio
from dataclasses import replace

import pytest

from bough.v1 import event_pb2
from bough_server.errors import NotFound, RequestIdReused, SessionBusy, SessionExists
from bough_server.identity import Principal
from bough_server.store.opening import Store, open_store, rebuild_projections
from bough_server.store.ports.log import RequestIdTaken, SessionMoved
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql.writer import CommitHooks
from tests.store.logs import ANNE, BERT, SECOND, START_NS, Made, completed, session_id, text
from tests.store.sql import plans_of, seen_statements
from tests.store.test_session_state import change, kept

CARL = Principal(tenant_id=ANNE.tenant_id, user_id="carl")
_ALL = Page(size=100)


class Named(Made):
    """A run in the session "s1" of its tenant."""

    session_id = "s1"


async def _create(
    store: Store, principal: Principal = ANNE, *, session_id: str = "s1", request_id: str = "", digest: str = "d"
) -> str:
    made = await store.sessions.create(
        principal, session_id=session_id, labels={}, now_ns=START_NS, request_id=request_id, request_digest=digest
    )
    return made.session_id


def _run(
    number: int,
    principal: Principal = ANNE,
    *,
    session_cut: int = 0,
    state_json: str = "",
    is_queued: bool = False,
) -> Named:
    run = Named(number=number, session_number=1, principal=principal, question=text(f"{number}?", "USER"))
    run.session_cut, run.state_json, run.is_queued = session_cut, state_json, is_queued
    run.last_sequence = len(run.first())
    return run


async def test_two_tenants_have_a_session_of_one_id_and_neither_learns_of_the_others(url: str) -> None:
    async with open_store(url, durability="process") as store:
        for principal in (ANNE, BERT):
            await _create(store, principal)
            await store.sessions.update_state(principal, "s1", [change("of", f'"{principal.user_id}"')])
        annes, berts = _run(1, state_json='{"of":"anne"}'), _run(2, BERT, state_json='{"of":"bert"}')
        for run in (annes, berts):
            await store.log.create(run.new())
            await store.log.append(run.run_id, epoch=1, log_events=run.next(kept("e0", change("n", str(run.number)))))
        await store.log.append(annes.run_id, epoch=1, log_events=annes.next(completed(text("Yes.", "ASSISTANT"))))
        await _is_apart(store, annes, berts)
    assert rebuild_projections(url) == 2
    async with open_store(url, durability="process") as store:
        await _is_apart(store, annes, berts)
        await store.sessions.delete(ANNE, "s1")
        with pytest.raises(NotFound):
            await store.runs.get(ANNE, annes.run_id)
        assert [one.run_id for one in (await store.runs.list(BERT, RunFilter(session_id="s1"), _ALL))[0]] == [
            berts.run_id
        ]
        assert len(await store.sessions.messages(BERT, "s1", through=9)) == 1
        assert await store.log.last_sequence(berts.run_id) == 2


async def _is_apart(store: Store, annes: Made, berts: Made) -> None:
    assert await store.runs.holder(ANNE, "s1") is None
    holder = await store.runs.holder(BERT, "s1")
    assert holder is not None
    assert holder.run.run_id == berts.run_id
    for principal, run, said in ((ANNE, annes, ["1?", "Yes."]), (BERT, berts, ["2?"])):
        session = await store.sessions.get(principal, "s1")
        assert session.user_id == principal.user_id
        assert (await store.sessions.read_position(principal, "s1")).state_json == (
            f'{{"n":{run.number},"of":"{principal.user_id}"}}'
        )
        stored = await store.sessions.messages(principal, "s1", through=9)
        assert [one.message.parts[0].text for one in stored] == said
        listed, _ = await store.sessions.list_messages(principal, "s1", _ALL)
        assert [one.parts[0].text for one in reversed(listed)] == said
        assert {one.run_id for one in listed} == {run.run_id}


async def test_runs_wait_for_the_session_of_their_own_tenant(store: Store) -> None:
    for principal in (ANNE, BERT):
        await _create(store, principal)
    annes, berts, waiting = _run(1), _run(2, BERT), _run(3, BERT, is_queued=True)
    for run in (annes, berts, waiting):
        await store.log.create(run.new())
    await store.log.append(annes.run_id, epoch=1, log_events=annes.next(completed()))
    assert await store.runs.holder(ANNE, "s1") is None, "who waits in another tenant waits for another session"
    await store.log.append(berts.run_id, epoch=1, log_events=berts.next(completed()))
    holder = await store.runs.holder(BERT, "s1")
    assert holder is not None
    assert holder.run.run_id == waiting.run_id


async def test_an_id_in_use_in_the_tenant_is_refused(store: Store) -> None:
    await _create(store)
    for principal in (ANNE, CARL):
        with pytest.raises(SessionExists) as refused:
            await _create(store, principal)
        assert refused.value.details == {"session_id": "s1"}
    assert (await store.sessions.get(ANNE, "s1")).user_id == "anne"
    await store.sessions.delete(ANNE, "s1")
    assert await _create(store, CARL) == "s1"


async def test_a_request_creates_one_session_and_is_of_its_user(store: Store) -> None:
    first = await _create(store, session_id=session_id(1), request_id="ask")
    again = await _create(store, session_id=session_id(2), request_id="ask")
    assert first == again == session_id(1)
    with pytest.raises(RequestIdReused) as reused:
        await _create(store, session_id=session_id(3), request_id="ask", digest="other")
    assert reused.value.details == {"session_id": session_id(1)}
    for number, principal in ((4, CARL), (5, BERT)):
        assert await _create(store, principal, session_id=session_id(number), request_id="ask") == session_id(number)
    assert await _create(store, session_id=session_id(6)) == session_id(6), "no request id is no request id"
    assert await _create(store, session_id=session_id(7)) == session_id(7)
    await store.sessions.delete(ANNE, session_id(1))
    assert await _create(store, session_id=session_id(8), request_id="ask") == session_id(8)


async def test_a_session_whose_commit_was_in_doubt_is_created_once(url: str) -> None:
    doubts = 0

    def doubt() -> None:
        nonlocal doubts
        doubts += 1
        if doubts == 1:
            raise OSError("the database failed")

    async with open_store(url, retry_delays=(0.0,), hooks=CommitHooks(after=doubt)) as store:
        assert await _create(store) == "s1"
        with pytest.raises(SessionExists):
            await _create(store)
    assert doubts == 3


async def test_labels_are_replaced_as_a_whole(store: Store) -> None:
    before = await store.sessions.create(ANNE, session_id="s1", labels={"a": "b", "c": "d"}, now_ns=START_NS)
    changed = await store.sessions.set_labels(ANNE, "s1", {"c": "e"})
    before.labels.clear()
    before.labels["c"] = "e"
    assert changed == before == await store.sessions.get(ANNE, "s1")
    assert (await store.sessions.list(ANNE, labels={"a": "b"}, page=_ALL))[0] == []
    with pytest.raises(NotFound):
        await store.sessions.set_labels(BERT, "s1", {})
    assert (await store.sessions.get(ANNE, "s1")).labels == {"c": "e"}


async def test_a_run_creates_the_session_that_it_names_if_there_is_none(store: Store) -> None:
    with pytest.raises(NotFound):
        await store.log.create(_run(1).new())
    run = _run(1)
    await store.log.create(replace(run.new(), create_session=True))
    session = await store.sessions.get(ANNE, "s1")
    assert (session.user_id, session.current_run_id) == ("anne", run.run_id)
    assert session.create_time.ToNanoseconds() == run.create_time_ns
    assert (await store.sessions.read_position(ANNE, "s1")).position == 1
    with pytest.raises(SessionBusy):
        await store.log.create(replace(_run(2).new(), create_session=True))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
    with pytest.raises(SessionMoved):
        await store.log.create(replace(_run(2).new(), create_session=True))
    later = _run(2, session_cut=1)
    await store.log.create(replace(later.new(), create_session=True))
    assert (await store.sessions.read_position(ANNE, "s1")).position == 2


async def test_a_run_that_begins_where_a_session_was_creates_none_before_its_caller_has_looked_again(
    store: Store,
) -> None:
    with pytest.raises(SessionMoved):
        await store.log.create(replace(_run(1, session_cut=1).new(), create_session=True))
    with pytest.raises(NotFound):
        await store.sessions.get(ANNE, "s1")


async def test_of_runs_that_create_one_session_at_once_one_holds_it(store: Store) -> None:
    runs = [replace(_run(number).new(), create_session=True) for number in range(1, 5)]
    outcomes = await asyncio.gather(*(store.log.create(run) for run in runs), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), SessionBusy, SessionBusy, SessionBusy]


async def test_a_run_that_waits_creates_no_session(store: Store) -> None:
    with pytest.raises(ValueError, match="cannot create its session"):
        await store.log.create(replace(_run(1, is_queued=True).new(), create_session=True))


async def test_a_sessions_last_run_time_is_when_a_run_last_started_or_ended(store: Store) -> None:
    async def last(number: int = 1) -> int:
        session = await store.sessions.get(ANNE, session_id(number))
        return (session.last_run_time.ToNanoseconds() - START_NS) // SECOND if session.HasField("last_run_time") else -1

    await store.sessions.create(ANNE, session_id=session_id(1), labels={}, now_ns=START_NS)
    assert await last() == -1
    first = Made(number=1, session_number=1)
    waiting = Made(number=2, session_number=1, is_queued=True)
    await store.log.create(first.new())
    assert await last() == 1
    await store.log.create(waiting.new())
    said = event_pb2.AgentEvent(llm_completed=event_pb2.LlmCompleted())
    said.llm_completed.response.message.CopyFrom(text("Hm.", "ASSISTANT"))
    await store.log.append(first.run_id, epoch=1, log_events=first.next(said))
    assert await last() == 1, "neither waiting nor what a run says is a start or an end"
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed()))
    assert await last() == 3


async def test_the_last_run_time_is_when_a_run_that_waited_starts_and_never_goes_back(store: Store) -> None:
    first, waiting = Made(number=1), Made(number=2, session_number=1, is_queued=True)
    for run in (first, waiting):
        await store.log.create(run.new())
    await store.log.append(first.run_id, epoch=1, log_events=first.next(completed()))
    dequeued = event_pb2.AgentEvent(run_dequeued=event_pb2.RunDequeued())
    await store.log.append(waiting.run_id, epoch=1, log_events=waiting.next(dequeued))
    held = await store.sessions.get(ANNE, session_id(1))
    assert held.last_run_time.ToNanoseconds() == START_NS + 3 * SECOND
    (ended,) = waiting.next(completed())
    ended.event.record_time.FromNanoseconds(START_NS)
    await store.log.append(waiting.run_id, epoch=1, log_events=[ended])
    released = await store.sessions.get(ANNE, session_id(1))
    assert released.last_run_time.ToNanoseconds() == START_NS + 3 * SECOND


async def test_a_request_id_of_runs_belongs_to_its_user(store: Store) -> None:
    runs = [
        Made(number=number, principal=principal, request_id="ask")
        for number, principal in ((1, ANNE), (2, CARL), (3, BERT))
    ]
    for run in runs:
        await store.log.create(run.new())
    for run in runs:
        found = await store.runs.find_request(run.principal, "ask")
        assert found is not None
        assert found.run.run_id == run.run_id
        with pytest.raises(RequestIdTaken) as taken:
            await store.log.create(Made(number=9, principal=run.principal, request_id="ask").new())
        assert taken.value.run_id == run.run_id


async def test_a_runs_deadline_is_the_one_in_force(store: Store) -> None:
    run = Made()
    new = run.new()
    new.first.event.run_started.deadline_time.FromNanoseconds(START_NS + 9 * SECOND)

    async def deadline() -> int | None:
        shown = (await store.runs.get(ANNE, run.run_id)).run
        return shown.deadline_time.ToNanoseconds() if shown.HasField("deadline_time") else None

    await store.log.create(new)
    assert await deadline() == START_NS + 9 * SECOND
    interrupted = event_pb2.AgentEvent(run_interrupted=event_pb2.RunInterrupted())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(interrupted))
    assert await deadline() is None
    resumed = event_pb2.AgentEvent(run_resumed=event_pb2.RunResumed(epoch=1))
    resumed.run_resumed.deadline_time.FromNanoseconds(START_NS + 99 * SECOND)
    await store.log.append(run.run_id, epoch=1, log_events=run.next(resumed))
    assert await deadline() == START_NS + 99 * SECOND


def _is_looked_up(statement: str) -> bool:
    is_by_request = "request_id" in statement.partition("WHERE")[2]
    return is_by_request or "count" in statement


async def test_what_is_looked_up_by_request_or_waits_is_found_by_an_index(file_url: str) -> None:
    async with open_store(file_url, durability="process") as store:
        with seen_statements() as seen:
            await _create(store, request_id="ask")
            await store.log.create(_run(1).new())
            await store.log.create(Made(number=2, request_id="ask").new())
            await store.log.create(_run(3, is_queued=True).new())
            await store.runs.find_request(ANNE, "ask")
    looked_up = [each for each in seen if each[0].startswith("SELECT") and _is_looked_up(each[0])]
    plans = plans_of(file_url, looked_up)
    used = ["sessions_by_request", "runs_by_request", "runs_waiting", "runs_by_request"]
    for plan, index in zip(plans, used, strict=True):
        assert f"INDEX {index} " in " ".join(plan)
        assert "TEMP B-TREE" not in " ".join(plan)
