"""Sessions, runs and their lists: what a tenant sees of them, and what deleting takes along."""

import asyncio

import pytest
from structlog.testing import capture_logs

from bough.v1 import error_pb2, event_pb2, execution_pb2, session_pb2, usage_pb2
from bough_server.errors import InvalidRequest, NotFound, SessionBusy
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.store.sql.store import Store
from bough_server.store.window import PAGE_BYTES
from tests.store.logs import (
    ANNE,
    BERT,
    SECOND,
    START_NS,
    Made,
    completed,
    definition,
    delta,
    session_id,
    text,
)
from tests.support.open_runs import open_runs

_ALL = Page(size=100)


async def _run_through(store: Store, run: Made) -> None:
    await store.log.create(run.new())
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed(text("Yes.", "ASSISTANT"))))


async def test_a_session_is_as_it_was_made(store: Store) -> None:
    made = await store.sessions.create(ANNE, session_id=session_id(1), labels={"a": "b"}, now_ns=START_NS)
    expected = session_pb2.Session(session_id=session_id(1), user_id="anne", labels={"a": "b"})
    expected.create_time.FromNanoseconds(START_NS)
    assert made == expected
    assert await store.sessions.get(ANNE, session_id(1)) == expected
    assert (await store.sessions.read_position(ANNE, session_id(1))).position == 0


async def test_sessions_of_evaluations_are_listed_only_if_they_are_asked_for(store: Store) -> None:
    for number, name in enumerate(("mine", "bough/1", "BOUGH/2", "boughs")):
        await store.sessions.create(ANNE, session_id=name, labels={}, now_ns=START_NS + number)

    async def listed(**asked: bool) -> list[str]:
        found, token = await store.sessions.list(ANNE, labels={}, page=Page(size=2), **asked)
        rest, _ = await store.sessions.list(ANNE, labels={}, page=Page(size=2, token=token), **asked)
        return [session.session_id for session in (*found, *rest)]

    assert await listed() == ["boughs", "BOUGH/2", "mine"]
    assert await listed(include_evaluations=True) == ["boughs", "BOUGH/2", "bough/1", "mine"]


async def test_messages_that_are_committed_together_are_each_in_its_session(store: Store) -> None:
    runs = [Made(number=number, question=text("?", "USER"), agent="lead") for number in range(1, 30)]
    await asyncio.gather(*(store.log.create(run.new()) for run in runs))
    words = {run.session_id: ["", "Ö", "\N{SNOWMAN}" * 999, "it's \\ {}"][run.number % 4] for run in runs}
    answers = (run.next(completed(text(words[run.session_id], "ASSISTANT"))) for run in runs)
    with capture_logs() as logged:
        await asyncio.gather(
            *(store.log.append(run.run_id, epoch=1, log_events=end) for run, end in zip(runs, answers, strict=True))
        )
    assert logged == []
    for run in runs:
        asked, answered = await store.sessions.messages(ANNE, run.session_id, through=9)
        assert (asked.run_id, asked.message.parts[0].text) == (run.run_id, "?")
        assert (answered.run_id, answered.agent) == (run.run_id, "lead")
        assert answered.message.position == 2
        assert [part.text for part in answered.message.parts] == [words[run.session_id]]


async def test_nothing_of_another_tenant_exists(store: Store) -> None:
    run = Made()
    await _run_through(store, run)
    for asked in (
        store.runs.get(BERT, run.run_id),
        store.sessions.get(BERT, run.session_id),
        store.sessions.read_position(BERT, run.session_id),
        store.sessions.list_messages(BERT, run.session_id, _ALL),
        store.sessions.delete(BERT, run.session_id),
    ):
        with pytest.raises(NotFound):
            await asked
    assert await store.runs.list(BERT, RunFilter(), _ALL) == ([], "")
    assert await store.sessions.list(BERT, labels={}, page=_ALL) == ([], "")
    assert (await store.sessions.get(ANNE, run.session_id)).user_id == "anne"


async def test_a_run_made_without_a_session_makes_one_and_holds_it_until_its_end(store: Store) -> None:
    run = Made(question=text("Is it?", "USER"))
    await store.log.create(run.new())
    held = await store.sessions.get(ANNE, run.session_id)
    assert (held.current_run_id, held.user_id) == (run.run_id, "anne")
    assert held.last_run_time.ToNanoseconds() == START_NS + SECOND
    assert (await store.sessions.read_position(ANNE, run.session_id)).position == 1
    await store.log.append(run.run_id, epoch=1, log_events=run.next(completed(text("Yes.", "ASSISTANT"))))
    released = await store.sessions.get(ANNE, run.session_id)
    assert released.current_run_id == ""
    assert released.last_run_time.ToNanoseconds() == START_NS + 2 * SECOND
    assert (await store.sessions.read_position(ANNE, run.session_id)).position == 2


async def test_positions_go_on_over_the_runs_of_a_session(store: Store) -> None:
    for number in range(1, 4):
        cut = 2 * (number - 1)
        run = Made(number=number, session_number=int(number > 1), session_cut=cut, question=text(f"{number}?", "USER"))
        await _run_through(store, run)
    stored = await store.sessions.messages(ANNE, session_id(1), through=5)
    assert [one.message.position for one in stored] == [1, 2, 3, 4, 5]
    assert [one.message.parts[0].text for one in stored] == ["1?", "Yes.", "2?", "Yes.", "3?"]
    shown, token = await store.sessions.list_messages(ANNE, session_id(1), Page(size=4))
    assert [message.position for message in shown] == [6, 5, 4, 3]
    shown, token = await store.sessions.list_messages(ANNE, session_id(1), Page(size=4, token=token))
    assert ([message.position for message in shown], token) == ([2, 1], "")


async def test_runs_are_listed_newest_first_page_by_page(store: Store) -> None:
    for number in range(1, 8):
        await store.log.create(Made(number=number).new())
    seen: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        shown, token = await store.runs.list(ANNE, RunFilter(), Page(size=3, token=token))
        seen += [run.run_id for run in shown]
        pages += 1
    assert (seen, pages) == ([Made(number=number).run_id for number in range(7, 0, -1)], 3)


async def test_a_page_of_runs_or_sessions_ends_before_it_is_too_large(store: Store) -> None:
    labels = {"is": "large", "large": "x" * (PAGE_BYTES // 2 - 100)}
    for number in (1, 2, 3):
        await store.sessions.create(ANNE, session_id=session_id(number), labels=labels, now_ns=START_NS + number)
        await store.log.create(Made(number=number, session_number=number, labels=labels).new())
    await store.log.create(Made(number=4, labels={"large": "x" * PAGE_BYTES}).new())
    runs, token = await store.runs.list(ANNE, RunFilter(), _ALL)
    assert [run.run_id for run in runs] == [Made(number=4).run_id]
    runs, token = await store.runs.list(ANNE, RunFilter(), Page(size=100, token=token))
    assert [run.run_id for run in runs] == [Made(number=3).run_id, Made(number=2).run_id]
    runs, token = await store.runs.list(ANNE, RunFilter(), Page(size=100, token=token))
    assert ([run.run_id for run in runs], token) == ([Made(number=1).run_id], "")
    sessions, token = await store.sessions.list(ANNE, labels={"is": "large"}, page=_ALL)
    assert [session.session_id for session in sessions] == [session_id(3), session_id(2)]
    sessions, token = await store.sessions.list(ANNE, labels={"is": "large"}, page=Page(size=100, token=token))
    assert ([session.session_id for session in sessions], token) == ([session_id(1)], "")


async def test_runs_made_at_the_same_time_are_neither_lost_nor_repeated(store: Store) -> None:
    class Same(Made):
        create_time_ns = START_NS

    for number in range(1, 6):
        await store.log.create(Same(number=number).new())
    seen, token = await store.runs.list(ANNE, RunFilter(), Page(size=2))
    rest, _ = await store.runs.list(ANNE, RunFilter(), Page(size=9, token=token))
    assert [run.run_id for run in (*seen, *rest)] == [Made(number=number).run_id for number in range(5, 0, -1)]


@pytest.mark.parametrize(
    ("run_filter", "expected"),
    [
        (RunFilter(), [4, 3, 2, 1]),
        (RunFilter(agent="writer"), [4, 3]),
        (RunFilter(session_id=session_id(2)), [2]),
        (RunFilter(states=[execution_pb2.EXECUTION_STATE_SUCCEEDED]), [3]),
        (
            RunFilter(states=[execution_pb2.EXECUTION_STATE_SUCCEEDED, execution_pb2.EXECUTION_STATE_RUNNING]),
            [4, 3, 2, 1],
        ),
        (RunFilter(labels={"team": "a"}), [3, 1]),
        (RunFilter(labels={"team": "a", "odd.\"key'": "ü"}), [3]),
        (RunFilter(labels={"team": "%"}), []),
        (RunFilter(create_time_from_ns=START_NS + 120 * SECOND, create_time_before_ns=START_NS + 240 * SECOND), [3, 2]),
        (RunFilter(agent="writer", labels={"team": "b"}), [4]),
        (RunFilter(create_time_from_ns=-(2**65), create_time_before_ns=2**65), [4, 3, 2, 1]),
    ],
)
async def test_runs_are_filtered(store: Store, run_filter: RunFilter, expected: list[int]) -> None:
    await store.log.create(Made(number=1, labels={"team": "a"}).new())
    await store.log.create(Made(number=2).new())
    await _run_through(store, Made(number=3, agent="writer", labels={"team": "a", "odd.\"key'": "ü"}))
    await store.log.create(Made(number=4, agent="writer", labels={"team": "b"}).new())
    shown, _ = await store.runs.list(ANNE, run_filter, _ALL)
    assert [run.run_id for run in shown] == [Made(number=number).run_id for number in expected]


@pytest.mark.parametrize("token", ["x", "!!", "AAAA", "WzFd", "WzEsMiwzXQ==", "eyJhIjoxfQ=="])
async def test_a_token_that_is_none_is_refused(store: Store, token: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await store.runs.list(ANNE, RunFilter(), Page(size=1, token=token))
    assert refused.value.reason == error_pb2.ERROR_REASON_INVALID_PAGE_TOKEN
    assert [violation.field for violation in refused.value.violations] == ["page_token"]


async def test_a_token_of_another_list_or_filter_or_tenant_is_refused(store: Store) -> None:
    for number in (1, 2):
        await _run_through(store, Made(number=number, question=text("?", "USER")))
    _, runs = await store.runs.list(ANNE, RunFilter(), Page(size=1))
    _, sessions = await store.sessions.list(ANNE, labels={}, page=Page(size=1))
    _, messages = await store.sessions.list_messages(ANNE, session_id(1), Page(size=1))
    assert len({runs, sessions, messages}) == 3
    for asked in (
        store.runs.list(ANNE, RunFilter(), Page(size=1, token=sessions)),
        store.runs.list(ANNE, RunFilter(agent="lead"), Page(size=1, token=runs)),
        store.runs.list(BERT, RunFilter(), Page(size=1, token=runs)),
        store.sessions.list(ANNE, labels={"a": "b"}, page=Page(size=1, token=sessions)),
        store.sessions.list_messages(ANNE, session_id(2), Page(size=1, token=messages)),
    ):
        with pytest.raises(InvalidRequest):
            await asked


async def test_sessions_are_listed_newest_first_by_their_labels(store: Store) -> None:
    for number, label in enumerate("abab", 1):
        now = START_NS + number
        await store.sessions.create(ANNE, session_id=session_id(number), labels={"of": label}, now_ns=now)
    shown, token = await store.sessions.list(ANNE, labels={"of": "b"}, page=Page(size=1))
    rest, end = await store.sessions.list(ANNE, labels={"of": "b"}, page=Page(size=1, token=token))
    assert [session.session_id for session in (*shown, *rest)] == [session_id(4), session_id(2)]
    assert end == ""


async def test_a_run_is_shown_as_its_log_says(store: Store) -> None:
    run = Made(labels={"team": "a"}, request_digest="d", request_id="ask", question=text("Is it\n so?"))
    await store.log.create(run.new())
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, message="It is away.")
    failed = event_pb2.RunFailed(error=error, tree_usage=usage_pb2.Usage(input_tokens=0, model_calls=2))
    await store.log.append(run.run_id, epoch=1, log_events=run.next(delta(), event_pb2.AgentEvent(run_failed=failed)))
    record = await store.runs.get(ANNE, run.run_id)
    assert (record.principal, record.epoch, record.request_digest) == (ANNE, 1, "d")
    shown = record.run
    assert (shown.user_id, shown.input_excerpt, shown.HasField("deadline_time")) == ("anne", "Is it so?", False)
    assert (shown.state, shown.error, shown.tree_usage) == (
        execution_pb2.EXECUTION_STATE_FAILED,
        error,
        failed.tree_usage,
    )
    assert shown.tree_usage.HasField("input_tokens"), "known to be zero is not unknown"
    assert (shown.agent, dict(shown.labels), shown.last_sequence) == ("lead", {"team": "a"}, 3)
    times = [time.ToNanoseconds() for time in (shown.create_time, shown.start_time, shown.end_time)]
    assert times == [run.create_time_ns, START_NS + SECOND, START_NS + 3 * SECOND]


async def test_open_runs_are_those_of_every_tenant_that_have_not_ended_oldest_first(store: Store) -> None:
    await store.log.create(Made(number=2, principal=BERT).new())
    await _run_through(store, Made(number=3))
    await store.log.create(Made(number=1).new())
    assert [one.run.run_id for one in await open_runs(store)] == [Made(number=1).run_id, Made(number=2).run_id]


async def test_a_run_of_any_tenant_is_found_by_its_executor(store: Store) -> None:
    run = Made(principal=BERT)
    await store.log.create(run.new())
    assert await store.runs.find(run.run_id) == await store.runs.get(BERT, run.run_id)
    assert await store.runs.find("absent's") is None


async def test_a_session_that_a_run_holds_is_not_deleted(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    with pytest.raises(SessionBusy):
        await store.sessions.delete(ANNE, run.session_id)
    assert (await store.runs.get(ANNE, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_RUNNING


async def test_deleting_a_session_takes_its_runs_logs_messages_and_unnamed_definitions(store: Store) -> None:
    kept, gone = Made(number=1, definitions=[definition("lead", "both")]), Made(number=2, request_id="ask")
    gone.definitions = [definition("lead", "both"), definition("writer", "gone only")]
    for run in (kept, gone):
        run.question = text("?", "USER")
        await _run_through(store, run)
    await store.sessions.delete(ANNE, gone.session_id)
    for asked in (
        store.sessions.get(ANNE, gone.session_id),
        store.sessions.delete(ANNE, gone.session_id),
        store.runs.get(ANNE, gone.run_id),
        store.log.read(gone.run_id),
        store.log.read(gone.run_id, after=1, deltas=False),
    ):
        with pytest.raises(NotFound):
            await asked
    assert list(await store.sessions.messages(ANNE, gone.session_id, through=9)) == []
    assert await store.runs.find_request(ANNE, "ask") is None
    assert await store.catalog.get("gone only") is None
    assert await store.catalog.get("both") == definition("lead", "both")
    assert len(await store.sessions.messages(ANNE, kept.session_id, through=9)) == 2


async def test_usage_entries_outlive_their_session(store: Store) -> None:
    run = Made()
    await store.log.create(run.new())
    answered = event_pb2.AgentEvent(llm_completed=event_pb2.LlmCompleted())
    answered.llm_completed.response.usage.output_tokens = 0
    await store.log.append(run.run_id, epoch=1, log_events=run.next(answered, completed()))
    before = await store.usage.list_for_run(run.run_id)
    await store.sessions.delete(ANNE, run.session_id)
    assert await store.usage.list_for_run(run.run_id) == before
    assert [(entry.sequence, entry.user_id, entry.usage.output_tokens) for entry in before] == [(2, "anne", 0)]
