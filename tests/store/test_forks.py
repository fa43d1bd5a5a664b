"""Forks: a run whose log begins with another's, in a new session, and charged nothing for what it shares."""

import asyncio
from dataclasses import replace

import pytest

from bough.v1 import event_pb2, execution_pb2, message_pb2, usage_pb2
from bough_server import ids
from bough_server.errors import Fenced, ForkRefused, NotFound
from bough_server.identity import Principal
from bough_server.messages import copy_of
from bough_server.store.opening import Store, open_store
from bough_server.store.ports.log import LogEvent, RequestIdTaken
from bough_server.store.ports.runs import Page
from tests.store.fork_logs import Fork
from tests.store.logs import (
    ANNE,
    BERT,
    START_NS,
    Made,
    as_stored,
    completed,
    definition,
    delta,
    everything,
    record,
    session_id,
    text,
)


def _answered(words: str, effect: str = "s0.m") -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key=effect, llm_completed=event_pb2.LlmCompleted())
    event.llm_completed.response.message.CopyFrom(text(words, "ASSISTANT"))
    event.llm_completed.response.message.parts.add().tool_call.call_id = f"{effect} call"
    event.llm_completed.response.usage.input_tokens = 7
    return event


def _tool_done(effect: str = "s0.m") -> event_pb2.AgentEvent:
    result = message_pb2.ToolResult(call=message_pb2.ToolCall(call_id=f"{effect} call"), agent="lead")
    return event_pb2.AgentEvent(effect_key="s0.t0", tool_completed=event_pb2.ToolCompleted(result=result))


async def _origin(store: Store) -> tuple[Made, list[LogEvent]]:
    """The second run of its session: asked, answered, its tool done, and still going."""
    before = Made(number=1, question=text("Hello.", "USER"))
    await store.log.create(before.new())
    await store.log.append(before.run_id, epoch=1, log_events=before.next(completed(text("Hi.", "ASSISTANT"))))
    origin = Made(number=2, session_number=1, session_cut=2, question=text("Why?", "USER"), labels={"of": "origin"})
    origin.request_id, origin.request_digest = "ask", "d"
    origin.definitions = [definition("lead", "r1"), definition("writer", "r2")]
    await store.log.create(origin.new())
    made = origin.next(delta("a"), _answered("Let me see."), delta("b"), _tool_done())
    await store.log.append(origin.run_id, epoch=1, log_events=made)
    return origin, [*origin.first(), *made]


async def _said(store: Store, number: int) -> list[tuple[int, str, str]]:
    stored = await store.sessions.messages(ANNE, session_id(number), through=99)
    return [(one.message.position, one.message.parts[0].text or "result", one.run_id[-1]) for one in stored]


async def test_a_forks_log_begins_with_the_bytes_of_its_origins(store: Store) -> None:
    origin, shared = await _origin(store)
    fork = Fork(number=3)
    new_fork = fork.of(origin, 4, delta("own"))
    await store.log.fork(new_fork)
    rest = fork.next(completed())
    await store.log.append(fork.run_id, epoch=1, log_events=rest)
    whole = as_stored([*shared[:4], *new_fork.log_events, *rest])
    assert await everything(store.log, fork.run_id) == whole
    assert await store.log.last_sequence(origin.run_id) == 5
    await store.log.append(origin.run_id, epoch=1, log_events=origin.next(completed()))
    assert await everything(store.log, fork.run_id) == whole


async def test_a_forks_row_is_its_origins_but_for_what_it_says_itself(store: Store) -> None:
    origin, _ = await _origin(store)
    plain, other = Fork(number=3), Fork(number=4, request_id="fork", request_digest="f")
    other.definitions = [definition("writer", "r3")]
    names = [event_pb2.DefinitionRef(name="writer", revision="r3")]
    await store.log.fork(plain.of(origin, 1))
    await store.log.fork(other.of(origin, 3, changes=event_pb2.RunForked(labels={"of": "fork"}, definition_refs=names)))
    first, second = [await store.runs.get(ANNE, fork.run_id) for fork in (plain, other)]
    assert (first.owner, first.epoch, first.principal, first.request_digest) == ("forker", 1, ANNE, "")
    assert (first.run.agent, first.run.state, dict(first.run.labels)) == (
        "lead",
        execution_pb2.EXECUTION_STATE_RUNNING,
        {"of": "origin"},
    )
    assert (first.run.forked_from.run_id, first.run.forked_from.sequence) == (origin.run_id, 1)
    assert first.run.create_time.ToNanoseconds() == plain.create_time_ns
    assert (first.run.last_sequence, second.run.last_sequence) == (2, 4)
    assert (dict(second.run.labels), second.request_digest) == ({"of": "fork"}, "f")
    assert await store.runs.find_request(ANNE, "fork") == second
    holder = await store.runs.holder(ANNE, session_id(4))
    assert holder == second
    for run in (plain, origin):
        await store.log.append(run.run_id, epoch=1, log_events=run.next(completed()))
        await store.sessions.delete(ANNE, run.session_id)
    kept = [await store.catalog.get(revision) for revision in ("r1", "r2", "r3")]
    assert kept == [definition("lead", "r1"), definition("writer", "r2"), definition("writer", "r3")]


@pytest.mark.parametrize(
    ("sequence", "shared"),
    [
        (1, [(1, "Hello.", "1"), (2, "Hi.", "1"), (3, "Why?", "3")]),
        (2, [(1, "Hello.", "1"), (2, "Hi.", "1"), (3, "Why?", "3")]),
        (3, [(1, "Hello.", "1"), (2, "Hi.", "1"), (3, "Why?", "3"), (4, "Let me see.", "3")]),
    ],
)
async def test_a_forks_session_has_what_its_origin_could_see_or_had_said(
    store: Store, sequence: int, shared: list[tuple[int, str, str]]
) -> None:
    origin, _ = await _origin(store)
    await store.log.append(origin.run_id, epoch=1, log_events=origin.next(completed(text("So.", "ASSISTANT"))))
    fork = Fork(number=3)
    await store.log.fork(fork.of(origin, sequence))
    assert await _said(store, 3) == shared
    assert (await store.sessions.read_position(ANNE, session_id(3))).position == len(shared)
    await store.log.append(fork.run_id, epoch=1, log_events=fork.next(completed(text("Thus.", "ASSISTANT"))))
    assert await _said(store, 3) == [*shared, (len(shared) + 1, "Thus.", "3")]
    assert await _said(store, 1) == [
        (1, "Hello.", "1"),
        (2, "Hi.", "1"),
        (3, "Why?", "2"),
        (4, "Let me see.", "2"),
        (5, "result", "2"),
        (6, "So.", "2"),
    ]
    await store.sessions.delete(ANNE, session_id(1))
    assert len(await _said(store, 3)) == len(shared) + 1, "a copy outlives what it is of"


async def _ids(store: Store, number: int) -> list[str]:
    stored = await store.sessions.messages(ANNE, session_id(number), through=99)
    return [one.message.message_id for one in stored]


async def test_messages_that_a_fork_shares_keep_their_ids_and_its_own_have_others(store: Store) -> None:
    origin, _ = await _origin(store)
    whole, early, again = Fork(number=3), Fork(number=4), Fork(number=5)
    await store.log.fork(whole.of(origin, 5))
    await store.log.fork(early.of(origin, 3, _tool_done(), delta()))
    await store.log.fork(again.of(early, 5))
    origins, wholes, earlys, agains = [await _ids(store, number) for number in (1, 3, 4, 5)]
    assert wholes == origins, "what is shared is the same message"
    assert earlys[:-1] == origins[:-1]
    assert earlys[-1] == ids.message_id(early.run_id, "s0.t0", "TOOL")
    assert origins[-1] == ids.message_id(origin.run_id, "s0.t0", "TOOL")
    assert agains == earlys


async def test_listed_messages_name_their_runs(store: Store) -> None:
    origin, _ = await _origin(store)
    fork = Fork(number=3)
    await store.log.fork(fork.of(origin, 3, completed(text("Thus.", "ASSISTANT"))))
    listed, _ = await store.sessions.list_messages(ANNE, session_id(3), Page(size=9))
    assert [(one.position, one.run_id[-1]) for one in listed] == [(5, "3"), (4, "3"), (3, "3"), (2, "1"), (1, "1")]
    listed, _ = await store.sessions.list_messages(ANNE, session_id(1), Page(size=9))
    assert [(one.position, one.run_id[-1]) for one in listed] == [(5, "2"), (4, "2"), (3, "2"), (2, "1"), (1, "1")]


async def test_a_fork_has_used_what_it_shares_and_what_it_uses_itself(store: Store) -> None:
    origin, _ = await _origin(store)
    plain, spending = Fork(number=3), Fork(number=4)
    await store.log.fork(plain.of(origin, 4))
    await store.log.fork(spending.of(origin, 4, _answered("Again.", "s1.m")))
    used = [(await store.runs.get(ANNE, run.run_id)).run.tree_usage for run in (origin, plain, spending)]
    assert used == [usage_pb2.Usage(input_tokens=7 * calls, model_calls=calls) for calls in (1, 1, 2)]


async def test_a_forks_deadline_user_and_excerpt_are_its_own(store: Store) -> None:
    origin, _ = await _origin(store)
    carl = Principal(tenant_id=ANNE.tenant_id, user_id="carl")
    changes = event_pb2.RunForked()
    changes.changes.input.CopyFrom(text("How  is it?"))
    changes.deadline_time.FromNanoseconds(START_NS)
    plain, other = Fork(number=3), Fork(number=4, principal=carl)
    await store.log.fork(plain.of(origin, 1))
    await store.log.fork(other.of(origin, 1, changes=changes, principal=carl))
    first, second = [(await store.runs.get(user, fork.run_id)).run for user, fork in ((ANNE, plain), (carl, other))]
    assert (first.user_id, first.input_excerpt, first.HasField("deadline_time")) == ("anne", "Why?", False)
    assert (second.user_id, second.input_excerpt) == ("carl", "How is it?")
    assert second.deadline_time.ToNanoseconds() == START_NS
    held = await store.sessions.get(ANNE, session_id(3))
    assert held.last_run_time == first.start_time


async def test_what_a_fork_shares_is_not_charged_again(store: Store) -> None:
    origin, _ = await _origin(store)
    fork = Fork(number=3)
    await store.log.fork(fork.of(origin, 4, _answered("Again.", "s1.m")))
    assert [entry.sequence for entry in await store.usage.list_for_run(origin.run_id)] == [3]
    assert [entry.sequence for entry in await store.usage.list_for_run(fork.run_id)] == [6]


async def test_a_call_that_was_open_at_the_fork_point_is_charged_to_the_origin_alone(store: Store) -> None:
    started = event_pb2.LlmStarted(reserved_cost_nanos=5, reserved_currency_code="EUR")
    lost = event_pb2.AgentEvent(
        effect_key="s0.m", llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_RECOVERED)
    )
    origin, fork = Made(), Fork(number=3)
    await store.log.create(origin.new())
    await store.log.append(
        origin.run_id,
        epoch=1,
        log_events=origin.next(event_pb2.AgentEvent(effect_key="s0.m", llm_started=started), copy_of(lost)),
    )
    await store.log.fork(fork.of(origin, 2, copy_of(lost), copy_of(lost)))
    charged = [await store.usage.list_for_run(run_id) for run_id in (origin.run_id, fork.run_id)]
    assert [[(entry.sequence, entry.charge.nanos) for entry in entries] for entries in charged] == [
        [(3, 5)],
        [(4, 0), (5, 5)],
    ]


async def test_a_fork_in_which_the_user_says_something_else_has_that_in_its_session(store: Store) -> None:
    origin, _ = await _origin(store)
    changes = event_pb2.RunForked()
    changes.changes.input.CopyFrom(message_pb2.Message(parts=[message_pb2.Part(text="How?")]))
    fork = Fork(number=3)
    new_fork = fork.of(origin, 1, changes=changes)
    await store.log.fork(new_fork)
    assert await _said(store, 3) == [(1, "Hello.", "1"), (2, "Hi.", "1"), (3, "How?", "3")]
    (said,) = (await store.sessions.messages(ANNE, session_id(3), through=3))[2:]
    assert (said.message.kind, said.agent) == (message_pb2.MESSAGE_KIND_USER, "lead")
    assert said.message.create_time == new_fork.log_events[0].event.record_time


async def test_a_result_that_the_fork_has_itself_belongs_to_the_call_that_it_shares(store: Store) -> None:
    origin, _ = await _origin(store)
    fork = Fork(number=3)
    await store.log.fork(fork.of(origin, 3, _tool_done()))
    assert (await _said(store, 3))[3:] == [(4, "Let me see.", "3"), (5, "result", "3")]


async def test_a_fork_can_be_forked(store: Store) -> None:
    origin, shared = await _origin(store)
    fork, again = Fork(number=3), Fork(number=4)
    first = fork.of(origin, 3, _answered("Own.", "s1.m"))
    await store.log.fork(first)
    second = again.of(fork, 5, completed(text("Done.", "ASSISTANT")))
    await store.log.fork(second)
    assert await everything(store.log, again.run_id) == as_stored([*shared[:3], *first.log_events, *second.log_events])
    shown = (await store.runs.get(ANNE, again.run_id)).run
    assert (shown.state, shown.forked_from.run_id) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, fork.run_id)
    assert (await _said(store, 4))[1:] == [
        (2, "Hi.", "1"),
        (3, "Why?", "4"),
        (4, "Let me see.", "4"),
        (5, "Own.", "4"),
        (6, "Done.", "4"),
    ]
    assert await store.usage.list_for_run(again.run_id) == []
    assert (await store.sessions.get(ANNE, session_id(4))).current_run_id == ""


async def test_a_run_that_has_ended_is_forked_before_its_end(store: Store) -> None:
    origin, shared = await _origin(store)
    await store.log.append(origin.run_id, epoch=1, log_events=origin.next(completed()))
    with pytest.raises(ForkRefused, match="ended at sequence 6"):
        await store.log.fork(Fork(number=3).of(origin, 6))
    fork = Fork(number=3)
    await store.log.fork(fork.of(origin, 5))
    assert list(await store.log.read(fork.run_id, through=5)) == as_stored(shared)


async def test_a_fork_of_a_run_that_waits_waits_for_nothing(store: Store) -> None:
    holder = Made(number=1, question=text("Hello.", "USER"))
    await store.log.create(holder.new())
    waiting = Made(number=2, session_number=1, is_queued=True, question=text("Why?", "USER"))
    await store.log.create(waiting.new())
    fork = Fork(number=3)
    await store.log.fork(fork.of(waiting, 2))
    shown = (await store.runs.get(ANNE, fork.run_id)).run
    assert (shown.state, shown.start_time.ToNanoseconds()) == (
        execution_pb2.EXECUTION_STATE_RUNNING,
        record(delta(), 3).event.record_time.ToNanoseconds(),
    )
    assert await _said(store, 3) == [(1, "Why?", "3")]


async def test_a_fork_goes_on_after_the_store_was_closed(url: str) -> None:
    fork = Fork(number=3)
    async with open_store(url) as store:
        origin, _ = await _origin(store)
        await store.log.fork(fork.of(origin, 3))
    async with open_store(url) as store:
        made = fork.next(_tool_done(), _answered("So.", "s1.m"), completed())
        await store.log.append(fork.run_id, epoch=1, log_events=made)
        assert (await _said(store, 3))[3:] == [(4, "Let me see.", "3"), (5, "result", "3"), (6, "So.", "3")]
        assert [entry.sequence for entry in await store.usage.list_for_run(fork.run_id)] == [6]


async def test_a_fork_of_what_is_not_there_leaves_nothing(store: Store) -> None:
    origin, _ = await _origin(store)
    fork = Fork(number=3)
    for refused in (
        fork.of(origin, 6),
        fork.of(origin, 1, principal=BERT),
        fork.of(Made(number=9), 1),
    ):
        with pytest.raises(NotFound):
            await store.log.fork(refused)
    with pytest.raises(NotFound):
        await store.sessions.get(ANNE, fork.session_id)


async def test_a_forks_request_id_is_taken_once_by_a_user(store: Store) -> None:
    origin, _ = await _origin(store)
    with pytest.raises(RequestIdTaken) as taken:
        await store.log.fork(Fork(number=3, request_id="ask").of(origin, 1))
    assert taken.value.run_id == origin.run_id
    forks = [Fork(number=number, request_id="fork") for number in range(3, 7)]
    outcomes = await asyncio.gather(*(store.log.fork(fork.of(origin, 2)) for fork in forks), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(RequestIdTaken) == 3


async def test_mistakes_of_a_caller_who_forks_are_told_at_once(store: Store) -> None:
    origin, _ = await _origin(store)
    new_fork = Fork(number=3).of(origin, 2)
    for mistaken in (
        replace(new_fork, log_events=[]),
        replace(new_fork, log_events=[record(delta(), 3)]),
        replace(new_fork, origin_sequence=1),
        replace(new_fork, origin_run_id=Made(number=9).run_id),
        replace(new_fork, request_id="another"),
    ):
        with pytest.raises(ValueError, match=r"fork|append"):
            await store.log.fork(mistaken)


async def test_readers_of_a_fork_see_it_go_on(store: Store) -> None:
    origin, shared = await _origin(store)
    fork = Fork(number=3)
    new_fork = fork.of(origin, 5)
    await store.log.fork(new_fork)
    reader = asyncio.ensure_future(everything(store.log, fork.run_id))
    made = fork.next(delta(), completed())
    for one in made:
        await store.log.append(fork.run_id, epoch=1, log_events=[one])
    assert await reader == as_stored([*shared, *new_fork.log_events, *made])
    with pytest.raises(Fenced):
        await store.log.append(fork.run_id, epoch=1, log_events=[record(delta(), 9)])
