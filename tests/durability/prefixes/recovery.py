"""Records a run, cuts its log, and lets a harness finish what is left; it judges nothing."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bough.v1 import agent_service_pb2, event_pb2, execution_pb2, follow_pb2, invocation_pb2, run_pb2, usage_pb2
from bough_server.models.model import RetryPolicy
from bough_server.runs.replay import ReplayOutcome
from bough_server.store.opening import rebuild_projections
from bough_server.store.ports.accounts import AccountKey, StoredAdjustment
from bough_server.store.ports.sessions import StoredMessage
from tests.durability.prefixes.scenario import Answer, Scenario, World
from tests.store.sql import execute
from tests.support.databases import copy_database
from tests.support.held_clock import HeldClock
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import open_team

PATIENT = RetryPolicy(retries=9, base=0.0, longest=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run at its end: its log and what can be read from it, and what was called meanwhile."""

    scenario: Scenario
    folder: Path
    world: World
    log: Sequence[event_pb2.AgentEvent]
    tree: invocation_pb2.Invocation
    ledger: Sequence[usage_pb2.Usage]
    charges: Sequence[int]
    """What each line of the ledger is charged."""
    unaccounted: int
    """By how much the balance differs from what was paid less all charges of the user."""
    messages: Sequence[StoredMessage]
    """The session's."""
    state_json: str
    """The values that the session has at the end."""
    replayed: ReplayOutcome


async def record(scenario: Scenario, folder: Path, *, is_cancelled: bool) -> Finished:
    """Executes a run from its beginning to its end, cancelled where its scenario says so and the caller wants it."""
    world = World(HeldClock(), is_patient=not scenario.cancelled_at or is_cancelled)
    async with _harness(scenario, folder, world) as harness:
        await _pay(harness)
        past = await harness.start(scenario.root) if scenario.has_past else run_pb2.Run()
        if scenario.has_past:
            await _follow(harness, past, scenario.answer)
            world.forget()
        run = await harness.start(scenario.root, session_id=past.session_id, policy=scenario.policy, case=scenario.case)
        if scenario.cancelled_at and is_cancelled:
            await _cancel(harness, run, world, scenario.cancelled_at)
        await _follow(harness, run, scenario.answer)
        return await _finished(scenario, folder, world, harness, run)


async def recover(whole: Finished, through: int, folder: Path) -> Finished:
    """Executes what is left of a run whose log is another's up to a sequence."""
    scenario, prefix = whole.scenario, whole.log[:through]
    cut(whole, through, folder)
    clock = HeldClock(prefix[-1].record_time.ToNanoseconds() + 10**9)
    world = World(clock, is_patient=not scenario.cancelled_at)
    async with _harness(scenario, folder, world, failed=_failed(prefix)) as harness:
        run = run_pb2.Run(run_id=prefix[0].run_id, session_id=prefix[0].session_id)
        await harness.runs.recover()
        await _follow(harness, run, scenario.answer)
        return await _finished(scenario, folder, world, harness, run)


def cut(whole: Finished, through: int, folder: Path) -> None:
    """A copy of a run's database as it was after one of its events, but for the epoch, which never goes back."""
    cut_off(whole.folder, whole.log[:through], folder)


def cut_off(whole: Path, prefix: Sequence[event_pb2.AgentEvent], folder: Path) -> None:
    """The same of a database in a folder, where a run's log is to be this one."""
    folder.mkdir()
    url, run_id, last = copy_database(whole, folder), prefix[0].run_id, prefix[-1].sequence
    execute(url, f"DELETE FROM events WHERE run_id = '{run_id}' AND sequence > {last}")
    # The files that came with those events: what is left refers to none of them.
    execute(url, f"DELETE FROM session_blobs WHERE run_id = '{run_id}' AND sequence > {last}")
    execute(url, "DELETE FROM blobs WHERE sha256 NOT IN (SELECT sha256 FROM session_blobs)")
    execute(url, "UPDATE runs SET owner = ''")  # as its server left it when it stopped, had the run not ended before
    rebuild_projections(url)


def _failed(prefix: Sequence[event_pb2.AgentEvent]) -> int:
    """How many attempts of models have failed so far."""
    return sum(event.llm_retrying.HasField("error") for event in prefix)


def _script(scenario: Scenario, failed: int) -> str:
    """What models say after so many of their attempts have failed."""
    agents = json.loads(json.dumps({"agents": scenario.turns or {"*": []}}))
    for turns in agents["agents"].values():
        for turn in turns:
            if "times" in turn.get("error", {}):
                turn["error"]["times"] -= failed
                if turn["error"]["times"] <= 0:
                    del turn["error"]
    return json.dumps(agents)


@asynccontextmanager
async def _harness(scenario: Scenario, folder: Path, world: World, *, failed: int = 0) -> AsyncIterator[RunHarness]:
    team = scenario.team(world)
    async with open_team(
        folder,
        _script(scenario, failed),
        *team.definitions,
        tools=team.tools,
        code_agents=team.code_agents,
        functions=team.functions,
        heard=world.heard,
        retry=PATIENT,
        clock=world.clock,
        accounts_per="user",
    ) as harness:
        yield harness


async def _cancel(harness: RunHarness, run: run_pb2.Run, world: World, place: str) -> None:
    if place == "its questions":
        async for _ in harness.runs.follow(ME, run.run_id, until=follow_pb2.WATCH_UNTIL_INTERRUPTED):
            pass
    else:
        await world.until_arrived(place)
        await _until_a_child_returned(harness, run)  # else chance would decide what is in flight
    await harness.runs.cancel(ME, run.run_id)


async def _until_a_child_returned(harness: RunHarness, run: run_pb2.Run) -> None:
    async with aclosing(harness.follow(run)) as seen:
        async for event in seen:
            if event.tool_completed.result.child_invocation_id:
                return


async def _follow(harness: RunHarness, run: run_pb2.Run, answer: Answer) -> None:
    """Follows a run to its end and answers what it asks, one request at a time."""
    after = 0
    while True:
        record = await harness.runs.get(ME, run.run_id)
        if record.run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
            asked = record.run.open_requests[0]
            given = answer(asked)
            given.input_id = asked.input_id
            request = agent_service_pb2.ResumeRunRequest(run_id=run.run_id, answers=[given])
            after = record.run.last_sequence
            await harness.runs.resume(ME, request, deadline_time_ns=None)
        elif record.run.HasField("end_time"):
            return
        pages = harness.runs.follow(ME, run.run_id, after=after, until=follow_pb2.WATCH_UNTIL_INTERRUPTED, past=after)
        async for _ in pages:
            pass


_PAID: Final = 10**15
_ACCOUNT: Final = AccountKey(tenant_id=ME.tenant_id, user_id=ME.user_id, currency_code="USD")


async def _pay(harness: RunHarness) -> None:
    paid = StoredAdjustment(
        request_id="p", amount_nanos=_PAID, currency_code="USD", note="", time_ns=harness.clock.now_ns(), made_by=""
    )
    await harness.store.accounts.adjust(_ACCOUNT, paid)


async def _unaccounted(harness: RunHarness) -> int:
    (sums,) = await harness.store.accounts.read_sums([_ACCOUNT])
    charged = (await harness.store.usage.sum_lines(ME.tenant_id, user_id=ME.user_id, from_ns=0)).charges
    return sums.balance_nanos + sums.reserved_nanos - (_PAID - charged.get("USD", 0))


async def _finished(scenario: Scenario, folder: Path, world: World, harness: RunHarness, run: run_pb2.Run) -> Finished:
    await harness.until_over(run)
    log = await harness.log(run)
    ledger = await harness.store.usage.list_for_run(run.run_id)
    return Finished(
        scenario=scenario,
        folder=folder,
        world=world,
        log=log,
        tree=await harness.tree(log),
        ledger=[line.usage for line in ledger],
        charges=[line.charge.nanos for line in ledger],
        unaccounted=await _unaccounted(harness),
        messages=await harness.messages(run.session_id),
        state_json=(await harness.store.sessions.read_position(ME, run.session_id)).state_json,
        replayed=await harness.replay(log),
    )
