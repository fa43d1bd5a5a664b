"""Two servers on one PostgreSQL: sessions, requests and agents are the same at both, whatever each remembers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from bough.v1 import event_pb2, execution_pb2
from bough_server.agents.definition import drop_unknown_fields
from bough_server.agents.editing import AgentEditor
from bough_server.clock import SystemClock
from bough_server.engine import input_requests
from bough_server.errors import AgentExists, AgentLinked, InvalidRequest, NotFound, SessionBusy
from bough_server.quotas import QuotaExceeded, QuotaLimits, Quotas, TenantQuotas
from bough_server.store.ports.runs import Page
from tests.store.logs import Made
from tests.support.databases import on_postgres
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, having
from tests.support.run_harness import ME, RunHarness
from tests.support.session_agents import CANCEL_INTERRUPTED, QUEUE, Floor, Run, answer_to, harness
from tests.support.teams import llm

ROUNDS = 10
"""How often two calls are made at once."""


@pytest.fixture
def floor() -> Floor:
    """The floor of both servers: all may speak at once."""
    return Floor()


@pytest.fixture
async def servers(tmp_path: Path, floor: Floor) -> AsyncIterator[Sequence[RunHarness]]:
    """Two servers."""
    with on_postgres(tmp_path):
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(harness(tmp_path, floor)) for _ in range(2)]


async def _both(*calls: object) -> tuple[list[Run], list[Exception]]:
    """Make calls at once; return the runs that were started, and the errors of the others."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    return [outcome for outcome in outcomes if isinstance(outcome, Run)], failed


async def _ended(servers: Sequence[RunHarness], run: Run) -> None:
    """Wait until a run's server has ended it."""
    for server in servers:
        await server.until_over(run)


async def test_one_request_at_both_at_once_is_one_run(servers: Sequence[RunHarness], floor: Floor) -> None:
    for number in range(ROUNDS):
        text = f"text {number}"
        floor.let(text)
        calls = (server.start("speaker", text, request_id=f"request-{number}") for server in servers)
        runs, failed = await _both(*calls)
        assert failed == []
        assert runs[0].run_id == runs[1].run_id
        await _ended(servers, runs[0])
        logs = [await server.log(runs[0]) for server in servers]
        assert logs[0] == logs[1]
        assert answer_of(logs[0]) == f"saw {text}"
    sessions, _ = await servers[0].store.sessions.list(ME, labels={}, page=Page(size=99))
    assert len(sessions) == ROUNDS


async def test_of_two_runs_that_would_hold_a_session_one_is_refused(
    servers: Sequence[RunHarness], floor: Floor
) -> None:
    for number in range(ROUNDS):
        texts, name = [f"{number} at one", f"{number} at the other"], f"session-{number}"
        calls = (
            server.start("speaker", text, session_id=name, creates=True)
            for server, text in zip(servers, texts, strict=True)
        )
        (run,), (refused,) = await _both(*calls)
        assert isinstance(refused, SessionBusy)
        assert refused.details["run_id"] == run.run_id
        floor.let(*texts)
        await _ended(servers, run)
        assert (await servers[0].store.sessions.get(ME, name)).current_run_id == ""


async def test_a_run_that_waits_for_input_gives_way_to_one_of_two(servers: Sequence[RunHarness], floor: Floor) -> None:
    for number in range(ROUNDS):
        texts = [f"{number} at one", f"{number} at the other"]
        asker = await servers[0].start("asker", "what?")
        await servers[0].until_interrupted(asker)
        await servers[0].until_over(asker)
        calls = (
            server.start("speaker", text, session_id=asker.session_id, policy=CANCEL_INTERRUPTED)
            for server, text in zip(servers, texts, strict=True)
        )
        (run,), (refused,) = await _both(*calls)
        assert isinstance(refused, SessionBusy)
        floor.let(*texts)
        await _ended(servers, run)
        log = await servers[1].log(asker)
        check_laws(log)
        assert [event.cancel_requested.by_run_id for event in having(log, "cancel_requested")] != [""]
        assert len(having(log, "run_cancelled")) == 1


async def test_runs_that_are_queued_at_both_all_have_their_turn(servers: Sequence[RunHarness], floor: Floor) -> None:
    for number in range(ROUNDS):
        held, *texts = [f"{number}: {part}" for part in range(5)]
        holder = await servers[number % 2].start("speaker", held)
        calls = [
            servers[place % 2].start("speaker", text, session_id=holder.session_id, policy=QUEUE)
            for place, text in enumerate(texts)
        ]
        floor.let(held, *texts)
        runs, failed = await _both(*calls)
        assert failed == []
        assert [
            (await servers[place % 2].log(run))[-1].HasField("run_completed") for place, run in enumerate(runs)
        ] == [True] * len(texts)
        assert (await servers[0].store.sessions.get(ME, holder.session_id)).current_run_id == ""


async def test_a_run_that_waits_for_one_that_expires_at_the_other_has_its_turn(
    servers: Sequence[RunHarness], floor: Floor
) -> None:
    one, other = servers
    floor.let("next")
    asker = await one.start("asker", "what?")
    await one.until_interrupted(asker)
    await one.until_over(asker)
    waiting = await one.start("speaker", "next", session_id=asker.session_id, policy=QUEUE)
    record = await other.store.runs.get(ME, asker.run_id)
    assert record.owner == one.dependencies.worker
    request = record.run.open_requests[0]
    asked = next(event for event in await one.until_interrupted(asker) if event.HasField("input_requested"))
    await other.runs.supervisor.continue_run(
        record,
        event_pb2.RESUME_CAUSE_ANSWER,
        answers=[input_requests.build_answer_event(asked, answer_to(request, "so"))],
    )
    assert answer_of(await other.log(asker)) == "so"
    async with asyncio.timeout(15):
        assert (await one.log(waiting))[-1].HasField("run_completed")


async def test_a_run_that_was_claimed_and_not_yet_continued_is_handed_over_when_its_server_drains(
    servers: Sequence[RunHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = servers
    run, claimed = Made(owner=""), asyncio.Event()

    async def get(*_: object) -> None:
        claimed.set()
        await asyncio.Event().wait()

    async def owner() -> str | None:
        record = await other.store.runs.find(run.run_id)
        return record and record.owner

    await other.store.log.create(run.new())
    monkeypatch.setattr(one.store.runs, "get", get)
    await one.runs.recover()
    await claimed.wait()
    assert await owner() == one.dependencies.worker
    await one.runs.drain(0)
    assert await owner() == ""


async def test_a_server_that_remembers_a_session_sees_what_was_said_at_the_other(
    servers: Sequence[RunHarness], floor: Floor
) -> None:
    one, other = servers
    floor.let("a", "b", "c", "d")
    run = await one.start("speaker", "a", session_id="talk", creates=True)
    await one.until_over(run)
    said = []
    for server, text in ((other, "b"), (one, "c"), (other, "d")):
        run = await server.start("speaker", text, session_id="talk")
        await server.until_over(run)
        said.append(answer_of(await server.log(run)))
    assert said == ["saw a . b", "saw a . b . c", "saw a . b . c . d"]


async def test_a_server_that_remembers_a_session_forgets_it_if_it_was_deleted_and_made_again_at_the_other(
    servers: Sequence[RunHarness], floor: Floor
) -> None:
    one, other = servers
    floor.let("a", "b", "c", "d", "e")
    for text in ("a", "b"):
        await one.until_over(await one.start("speaker", text, session_id="talk", creates=True))
    await other.store.sessions.delete(ME, "talk")
    for text in ("c", "d"):
        await other.until_over(await other.start("speaker", text, session_id="talk", creates=True))
    run = await one.start("speaker", "e", session_id="talk")
    await one.until_over(run)
    assert answer_of(await one.log(run)) == "saw c . d . e"


async def test_an_agent_that_is_stored_at_one_runs_at_the_other_until_it_is_deleted(
    servers: Sequence[RunHarness],
) -> None:
    one, other = (AgentEditor(each.dependencies.agents, each.store.agents, SystemClock()) for each in servers)
    made = await one.create(ME.tenant_id, drop_unknown_fields(llm("poet")))
    with pytest.raises(AgentExists):
        await other.create(ME.tenant_id, drop_unknown_fields(llm("poet")))
    catalogs = [each.dependencies.agents for each in servers]
    assert [(await each.of(ME.tenant_id)).current("poet").revision for each in catalogs] == [made.revision] * 2
    changed = drop_unknown_fields(llm("poet"))
    changed.description = "Writes poems."
    updated = await other.update(ME.tenant_id, changed, mask=FieldMask(), revision=made.revision)
    assert [(await each.of(ME.tenant_id)).current("poet").revision for each in catalogs] == [updated.revision] * 2
    await one.delete(ME.tenant_id, "poet", revision=updated.revision)
    for server in servers:
        with pytest.raises(NotFound):
            await server.start("poet", "hi")


async def test_agents_that_are_stored_at_both_at_once_are_all_there(servers: Sequence[RunHarness]) -> None:
    editors = [AgentEditor(each.dependencies.agents, each.store.agents, SystemClock()) for each in servers]
    names = [f"poet-{number}" for number in range(6)]
    made = await asyncio.gather(
        *(editors[place % 2].create(ME.tenant_id, drop_unknown_fields(llm(name))) for place, name in enumerate(names))
    )
    assert [each.definition.name for each in made] == names
    linked = llm("lead", links=["poet-0"])
    outcomes = await asyncio.gather(
        editors[0].create(ME.tenant_id, drop_unknown_fields(linked)),
        editors[1].delete(ME.tenant_id, "poet-0", revision=""),
        return_exceptions=True,
    )
    refused = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert [type(error) for error in refused] in ([InvalidRequest], [AgentLinked])


async def test_of_100_starts_at_once_on_three_servers_as_many_run_as_a_quota_allows(
    tmp_path: Path, floor: Floor
) -> None:
    quotas = Quotas(tenants={ME.tenant_id: TenantQuotas(of_tenant=QuotaLimits(concurrent_runs=10))})
    with on_postgres(tmp_path):
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(harness(tmp_path, floor, quotas=quotas)) for _ in range(3)]
            started, failed = await _both(*(opened[number % 3].start("speaker", "one") for number in range(100)))
            assert (len(started), len(failed), {type(error) for error in failed}) == (10, 90, {QuotaExceeded})
            floor.let("one")
            for run in started:
                await _ended(opened, run)
            states = {(await opened[0].runs.get(ME, run.run_id)).run.state for run in started}
            assert states == {execution_pb2.EXECUTION_STATE_SUCCEEDED}
            await _ended(opened, await opened[2].start("speaker", "one"))
