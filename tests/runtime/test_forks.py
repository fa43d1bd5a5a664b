"""Forks: what they share stands and is not done again, and their origins stay whole."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import pytest

from bough.v1 import error_pb2, event_pb2, fork_pb2, policy_pb2
from bough_server import ids
from bough_server.errors import CallError, ForkRefused, NotFound, RequestIdReused, SequenceOutOfRange
from bough_server.identity import Principal
from bough_server.models.model import ModelRequest
from bough_server.store.opening import rebuild_projections
from bough_server.tools.tool import OnRecovery, ToolContext, tool
from tests.support.databases import database_in, in_each_database
from tests.support.fork_agents import TEAM, TURNS, Log, World, edited, open_forked, place, run_of
from tests.support.held_clock import HeldClock
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having, results_of, text_of
from tests.support.open_runs import open_runs
from tests.support.run_harness import ME, names
from tests.support.teams import call, calls, llm, open_team, script

pytestmark = in_each_database


FIRST = {"p": fork_pb2.AgentOverride(instruction="First.")}
OTHER = {"p": fork_pb2.AgentOverride(model="other")}


@pytest.fixture
def world() -> World:
    return World()


def without_ids(log: Log) -> list[event_pb2.AgentEvent]:
    """Events without the stamp of their run."""
    bare = []
    for event in log:
        copy = event_pb2.AgentEvent()
        copy.CopyFrom(event)
        copy.run_id = copy.session_id = ""
        bare.append(copy)
    return bare


def remaining(log: Log, after: int, payloads: Sequence[str]) -> int:
    """How many effects have their results only after a sequence."""
    return sum(event.sequence > after and event.WhichOneof("payload") in payloads for event in log)


async def test_a_fork_from_every_sequence_gives_the_same_answer_and_does_nothing_of_its_beginning_again(
    tmp_path: Path, world: World
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        whole = await harness.tree(origin)
        for after in range(1, len(origin)):
            looked, asked = world.looked.total(), len(world.heard)
            log = await harness.log(await harness.fork(run_of(origin), after))
            check_laws(log)
            await check_replay(harness, log)
            tree = await harness.tree(log)
            entries = await harness.store.usage.list_for_run(log[0].run_id)
            assert answer_of(log) == "Done."
            assert without_ids(log[:after]) == without_ids(origin[:after])
            assert log[after].run_forked.origin.sequence == after
            tool_ends = [event for event in origin if event.HasField("tool_completed") and event.sequence > after]
            ran = [end for end in tool_ends if not end.tool_completed.result.child_invocation_id]
            assert world.looked.total() - looked == len(ran)
            assert len(world.heard) - asked == remaining(origin, after, ["llm_completed"])
            assert [entry.sequence for entry in entries] == [
                event.sequence
                for event in log[after:]
                if event.HasField("llm_completed") or event.HasField("llm_retrying")
            ]
            answered = having(origin[:after], "llm_completed")
            assert tree.inherited_usage.input_tokens == 10 * len(answered)
            assert tree.tree_usage.input_tokens == whole.tree_usage.input_tokens
            assert (tree.forked_from.run_id, tree.forked_from.sequence) == (origin[0].run_id, after)


async def test_where_a_run_cannot_be_forked_says_why(tmp_path: Path, world: World) -> None:
    stranger = Principal(tenant_id="other", user_id="other")
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        refused: list[tuple[int, type[CallError], Principal]] = [
            (len(origin), ForkRefused, ME),
            (len(origin) + 1, SequenceOutOfRange, ME),
            (1, NotFound, stranger),
        ]
        for after, error, principal in refused:
            with pytest.raises(error):
                await harness.fork(run_of(origin), after, principal=principal)
        assert await open_runs(harness.store) == []


async def test_a_fork_of_a_fork_shares_both_their_changes_only_up_to_where_it_begins(
    tmp_path: Path, world: World
) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        cut = place(origin, "step_completed", 0)
        first = await harness.fork(run_of(origin), cut, agents=FIRST, labels={"by": "first"})
        first_log = await harness.log(first)
        world.heard.clear()
        before = await harness.log(await harness.fork(first, cut, agents=OTHER))
        asked_before = [request.instruction for request in world.heard if request.agent == "p"]
        world.heard.clear()
        after_fork = await harness.fork(first, cut + 1, agents=OTHER)
        after = await harness.log(after_fork)
        asked_after = [request.instruction for request in world.heard if request.agent == "p"]
        row = (await harness.runs.get(ME, after_fork.run_id)).run
        for log in (first_log, before, after):
            await check_replay(harness, log)
    assert set(asked_before) == {"You are p."}
    assert set(asked_after) == {"First."}
    assert (row.forked_from.run_id, row.forked_from.sequence) == (first.run_id, cut + 1)
    assert dict(row.labels) == {"by": "first"}
    assert answer_of(after) == "Done."


async def test_a_fork_says_of_itself_what_its_row_says(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        fork = await harness.fork(run_of(origin), 5, labels={"a": "b"})
        row = (await harness.runs.get(ME, fork.run_id)).run
        tree = await harness.tree(await harness.log(fork))
    assert (fork.start_time, dict(fork.labels), fork.forked_from) == (row.start_time, {"a": "b"}, row.forked_from)
    assert (fork.session_id, fork.agent, fork.create_time) == (row.session_id, row.agent, row.create_time)
    assert tree.start_time == row.start_time
    assert dict(tree.labels) == {"a": "b"}


async def test_a_run_that_was_queued_is_forked_from_its_dequeuing_on(tmp_path: Path) -> None:
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    heard: list[ModelRequest] = []
    may_begin = asyncio.Event()

    async def hold(agent: str, turn: int, chunk: int) -> None:
        await may_begin.wait()

    async with open_team(tmp_path, script(p=["Done."]), llm("p"), heard=heard, gate=hold) as harness:
        first = await harness.start("p", "one")
        second = await harness.start("p", "two", session_id=first.session_id, policy=queue)
        may_begin.set()
        log = await harness.log(second)
        begins = place(log, "run_dequeued")
        heard.clear()
        fork = await harness.fork(second, begins)
        assert answer_of(await harness.log(fork)) == "Done."
        assert fork.start_time == (await harness.runs.get(ME, fork.run_id)).run.start_time
        await check_replay(harness, await harness.log(fork))
        stored = await harness.messages(fork.session_id)
        with pytest.raises(ForkRefused):
            await harness.fork(second, begins - 1)
    assert [text_of(message) for message in heard[0].messages] == ["one", "Done.", "two"]
    assert [text_of(one.message) for one in stored] == ["one", "Done.", "two", "Done."]


@pytest.mark.parametrize("rule", get_args(OnRecovery))
async def test_a_tool_that_is_open_where_a_fork_begins_runs_under_the_forks_own_key_if_it_may(
    tmp_path: Path, rule: OnRecovery
) -> None:
    seen: list[str] = []

    @tool(on_recovery=rule)
    def pay(amount: int, context: ToolContext) -> str:
        """Pays."""
        seen.append(context.idempotency_key)
        return "paid"

    turns = script(p=[calls(call("pay", amount=7)), "Done."])
    async with open_team(tmp_path, turns, llm("p", tools=["pay"]), tools=[pay]) as harness:
        origin = await harness.turn("p")
        started = having(origin, "tool_started")[0]
        if rule == "retry":
            fork = await harness.fork(run_of(origin), started.sequence)
        else:
            with pytest.raises(ForkRefused, match="'pay'"):
                await harness.fork(run_of(origin), started.sequence)
            call_id = started.tool_started.call.call_id
            instead = await harness.fork(run_of(origin), started.sequence, tool_results=[edited("free", call_id)])
            assert text_of(results_of(await harness.log(instead))[0]) == "free"
            fork = await harness.fork(run_of(origin), started.sequence, allow_open_effects=True)
        log = await harness.until_interrupted(fork) if rule == "ask" else await harness.log(fork)
        if rule != "ask":
            await check_replay(harness, log)
    own = ids.derive_id(fork.run_id, started.effect_key)
    if rule == "retry":
        assert seen == [started.tool_started.idempotency_key, own]
        assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
        assert having(log, "tool_started")[1].tool_started.idempotency_key == own
    else:
        assert seen == [started.tool_started.idempotency_key]
    if rule == "fail":
        assert results_of(log)[0].error.reason == error_pb2.ERROR_REASON_TOOL_OUTCOME_UNKNOWN


async def test_the_same_request_to_fork_finds_its_fork_and_another_is_refused(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        origin = await harness.turn("p")
        forks = await asyncio.gather(*(harness.fork(run_of(origin), 3, request_id="f") for _ in range(3)))
        await harness.log(forks[0])
        late = await harness.fork(run_of(origin), 3, request_id="f")
        for refusal in (harness.fork(run_of(origin), 4, request_id="f"), harness.start("p", request_id="f")):
            with pytest.raises(RequestIdReused) as reused:
                await refusal
            assert reused.value.details == {"run_id": late.run_id}
    assert {fork.run_id for fork in (*forks, late)} == {forks[0].run_id}


async def test_a_forks_session_goes_on_by_itself_and_outlives_its_origins(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as harness:
        await harness.turn("p", "zero")
        first = await harness.turn("p", "one")
        origin = await harness.turn("p", "two", session_id=first[0].session_id)
        untouched = await harness.messages(origin[0].session_id)
        fork = await harness.fork(run_of(origin), place(origin, "step_completed", 0))
        await harness.log(fork)
        await harness.until_over(fork)
        world.heard.clear()
        await harness.turn("p", "three", session_id=fork.session_id)
        seen = [text_of(message) for message in world.heard[0].messages]
        assert await harness.messages(origin[0].session_id) == untouched
        before = await harness.messages(fork.session_id)
        await harness.store.sessions.delete(ME, origin[0].session_id)
        log = await harness.log(fork)
        check_laws(log)
    assert [text for text in seen if text in ("zero", "one", "two", "three", "Done.")] == [
        *("one", "Done.", "two", "Done.", "three")
    ]
    assert [one.message.position for one in before] == list(range(1, len(before) + 1))
    rebuild_projections(database_in(tmp_path))
    async with open_forked(tmp_path, world) as harness:
        assert await harness.messages(fork.session_id) == before
        assert (await harness.runs.get(ME, fork.run_id)).run.forked_from.sequence == fork.forked_from.sequence
        again = await harness.log(await harness.fork(fork, 3))
        assert answer_of(again) == "Done."


async def test_a_fork_that_is_killed_goes_on_as_a_fork(tmp_path: Path, world: World) -> None:
    reached = asyncio.Event()
    is_held = False

    async def hold(agent: str, turn: int, chunk: int) -> None:
        if is_held and agent == "p":
            reached.set()
            await asyncio.Event().wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=world.tools(), gate=hold) as harness:
        origin = await harness.turn("p")
        is_held = True
        in_verse = fork_pb2.AgentOverride(model="other", instruction="In verse.")
        fork = await harness.fork(run_of(origin), place(origin, "step_completed", -2), agents={"p": in_verse})
        await reached.wait()
        await harness.crash()
    world.heard.clear()
    looked = world.looked.total()
    async with open_forked(tmp_path, world) as harness:
        assert await harness.runs.recover() == 1
        log = await harness.log(fork)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [request.instruction for request in world.heard] == ["In verse."]
    assert [event.llm_retrying.next_model for event in having(log, "llm_retrying")] == ["other"]
    assert world.looked.total() == looked
    assert names(log)[-1] == "p: run.completed"


async def test_a_fork_begins_when_it_was_forked_and_counts_its_own_time_only(tmp_path: Path) -> None:
    clock = HeldClock()

    async def later(agent: str, turn: int, chunk: int) -> None:
        if turn:
            clock.advance(2)

    turns = script(lead=[calls(call("call_child", message="go")), "Done."], child=["I am here."])
    team = [llm("lead", links=["child"]), llm("child")]
    async with open_team(tmp_path, turns, *team, gate=later, clock=clock) as harness:
        origin = await harness.log(await harness.start("lead"))
        clock.advance(1_000)
        after = having(origin, "sub_agent_completed")[0].sequence
        forked = await harness.fork(run_of(origin), after)
        log = await harness.log(forked)
        run = (await harness.runs.get(ME, forked.run_id)).run
        tree = await harness.tree(log)
    start = having(log, "run_forked")[0].record_time
    assert forked.start_time == run.start_time == tree.start_time == start
    lead, child = tree.agents
    assert (lead.start_time, lead.end_time) == (start, run.end_time)
    assert child.start_time == having(origin, "sub_agent_started")[0].record_time
    assert log[-1].run_completed.duration.ToSeconds() == 2
    step = having(log, "step_completed")
    assert [each.step_completed.step.duration.ToSeconds() for each in step] == [0, 0, 2]
