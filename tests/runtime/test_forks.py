"""Forks: what they share stands and is not done again, and their origins stay whole."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import get_args

import pytest

from bough.v1 import error_pb2, event_pb2, input_pb2, message_pb2, policy_pb2
from bough_server import ids
from bough_server.agents.function import agent
from bough_server.errors import CallError, ForkRefused, NotFound, RequestIdReused, SequenceOutOfRange
from bough_server.models.model import ModelRequest
from bough_server.runtime.context import Context
from bough_server.store.ports import Principal
from bough_server.store.sql.rebuild import rebuild_projections
from bough_server.tools.rules import OnRecovery
from bough_server.tools.tool import ToolContext, tool
from tests.support.forked import TEAM, TURNS, Log, Run, World, edited, open_forked, place, run_of
from tests.support.house import ME, House, names
from tests.support.laws import check_laws
from tests.support.readings import answer_of, check_replay, having, results_of, text_of
from tests.support.teams import call, calls, llm, open_team, script


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
    async with open_forked(tmp_path, world) as house:
        origin = await house.turn("p")
        whole = await house.tree(origin)
        for after in range(1, len(origin)):
            looked, asked = world.looked.total(), len(world.heard)
            log = await house.log(await house.fork(run_of(origin), after))
            check_laws(log)
            await check_replay(house, log)
            tree = await house.tree(log)
            entries = await house.store.usage.of_run(log[0].run_id)
            assert answer_of(log) == "Done."
            assert without_ids(log[:after]) == without_ids(origin[:after])
            assert log[after].run_forked.origin_sequence == after
            tool_ends = [event for event in origin if event.HasField("tool_completed") and event.sequence > after]
            ran = [end for end in tool_ends if not end.tool_completed.result.child_invocation_id]
            assert world.looked.total() - looked == len(ran)
            assert len(world.heard) - asked == remaining(origin, after, ["llm_completed"])
            assert [entry.sequence for entry in entries] == [
                event.sequence for event in having(log[after:], "llm_completed")
            ]
            answered = having(origin[:after], "llm_completed")
            assert tree.inherited_usage.input_tokens == 10 * len(answered)
            assert tree.tree_usage.input_tokens == whole.tree_usage.input_tokens
            assert (tree.forked_from.run_id, tree.forked_from.sequence) == (origin[0].run_id, after)


async def test_where_a_run_cannot_be_forked_says_why(tmp_path: Path, world: World) -> None:
    stranger = Principal(tenant_id="other", user_id="other")
    async with open_forked(tmp_path, world) as house:
        origin = await house.turn("p")
        refused: list[tuple[int, type[CallError], Principal]] = [
            (len(origin), ForkRefused, ME),
            (len(origin) + 1, SequenceOutOfRange, ME),
            (1, NotFound, stranger),
        ]
        for after, error, principal in refused:
            with pytest.raises(error):
                await house.fork(run_of(origin), after, principal=principal)
        assert await house.store.runs.open_runs() == []


ASKING = script(p=["Done."])


def asking_team(folder: Path) -> AbstractAsyncContextManager[House]:
    @agent(description="Asks.")
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        first = await ctx.ask("one?")
        return f"{first} {await ctx.ask('two?')}"

    return open_team(folder, ASKING, llm("p"), code_agents=[asker])


def answer_to(log: Log, value: str) -> input_pb2.InputAnswer:
    request = having(log, "input_requested")[-1].input_requested.request
    return input_pb2.InputAnswer(request_id=request.request_id, value_json=f'"{value}"')


async def test_a_fork_of_a_run_that_waits_asks_again_under_the_same_id(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as house:
        origin = await house.start("asker")
        asked = await house.until_interrupted(origin)
        await house.until_over(origin)
        fork = await house.fork(origin, len(asked))
        again = await house.until_interrupted(await fork_at(house, fork, len(asked)))
        await house.until_over(fork)
        assert (await house.runs.get(ME, fork.run_id)).run.open_requests == (
            await house.runs.get(ME, origin.run_id)
        ).run.open_requests
        await house.resume(fork, answer_to(asked, "fork"))
        second = await latest(house, fork)
        await house.resume(fork, answer_to(second, "done"))
        log = await house.log(fork)
        await check_replay(house, log)
        assert (await house.runs.get(ME, origin.run_id)).run.state == event_pb2.STATE_INPUT_REQUIRED
    assert again[-1].HasField("run_interrupted")
    assert len(having(log, "input_requested")) == 2
    assert answer_of(log) == "fork done"


async def fork_at(house: House, fork: Run, shared: int) -> Run:
    """The fork, once it waits itself."""
    async for event in house.follow(fork, after=shared):
        if event.HasField("run_interrupted"):
            break
    return fork


async def latest(house: House, run: Run) -> Log:
    """A run's events once it waits for its second answer."""
    seen = []
    async for event in house.follow(run):
        seen.append(event)
        if event.HasField("run_interrupted") and len(having(seen, "input_received")) == 1:
            break
    await house.until_over(run)
    return seen


async def test_a_fork_of_an_answered_run_may_be_answered_otherwise(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as house:
        origin = await house.start("asker")
        asked = await house.until_interrupted(origin)
        await house.until_over(origin)
        await house.resume(origin, answer_to(asked, "one"))
        await house.resume(origin, answer_to(await latest(house, origin), "two"))
        whole = await house.log(origin)
        fork = await house.fork(origin, place(whole, "input_received", 1) - 1)
        await fork_at(house, fork, fork.forked_from.sequence)
        await house.until_over(fork)
        await house.resume(fork, answer_to(whole, "other"))
        log = await house.log(fork)
        await check_replay(house, log)
    assert (answer_of(whole), answer_of(log)) == ("one two", "one other")


async def test_a_run_that_goes_on_is_forked_and_both_end(tmp_path: Path) -> None:
    may_end, began = asyncio.Event(), asyncio.Event()

    @agent(description="Waits.")
    async def waiter(ctx: Context, input: message_pb2.Message) -> str:
        async def wait() -> str:
            began.set()
            await may_end.wait()
            return "waited"

        first = await ctx.now()
        return f"{first} {await ctx.step('wait', wait)}"

    async with open_team(tmp_path, ASKING, llm("p"), code_agents=[waiter]) as house:
        origin = await house.start("waiter")
        await began.wait()
        last = (await house.runs.get(ME, origin.run_id)).run.last_sequence
        forks = [await house.fork(origin, after) for after in range(1, last + 1)]
        may_end.set()
        logs = [await house.log(run) for run in (origin, *forks)]
        for log in logs:
            await check_replay(house, log)
    assert answer_of(logs[-1]) == answer_of(logs[0])


async def test_a_fork_of_a_fork_shares_both_their_changes_only_up_to_where_it_begins(
    tmp_path: Path, world: World
) -> None:
    async with open_forked(tmp_path, world) as house:
        origin = await house.turn("p")
        cut = place(origin, "step_completed", 0)
        first = await house.fork(run_of(origin), cut, instructions={"p": "First."}, labels={"by": "first"})
        first_log = await house.log(first)
        world.heard.clear()
        before = await house.log(await house.fork(first, cut, models={"p": "other"}))
        asked_before = [request.instruction for request in world.heard if request.agent == "p"]
        world.heard.clear()
        after_fork = await house.fork(first, cut + 1, models={"p": "other"})
        after = await house.log(after_fork)
        asked_after = [request.instruction for request in world.heard if request.agent == "p"]
        row = (await house.runs.get(ME, after_fork.run_id)).run
        for log in (first_log, before, after):
            await check_replay(house, log)
    assert set(asked_before) == {"You are p."}
    assert set(asked_after) == {"First."}
    assert (row.forked_from.run_id, row.forked_from.sequence) == (first.run_id, cut + 1)
    assert dict(row.labels) == {"by": "first"}
    assert answer_of(after) == "Done."


async def test_a_fork_says_of_itself_what_its_row_says(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as house:
        origin = await house.turn("p")
        fork = await house.fork(run_of(origin), 5, labels={"a": "b"})
        row = (await house.runs.get(ME, fork.run_id)).run
        tree = await house.tree(await house.log(fork))
    assert (fork.start_time, dict(fork.labels), fork.forked_from) == (row.start_time, {"a": "b"}, row.forked_from)
    assert (fork.session_id, fork.agent, fork.create_time) == (row.session_id, row.agent, row.create_time)
    assert tree.start_time == row.start_time
    assert dict(tree.labels) == {"a": "b"}


async def test_a_run_that_has_not_begun_cannot_be_forked_whatever_has_become_of_it(tmp_path: Path) -> None:
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_QUEUE)
    async with asking_team(tmp_path) as house:
        holder = await house.start("asker")
        await house.until_interrupted(holder)
        queued = await house.start("p", session_id=holder.session_id, policy=queue)
        for after in (1, 2):
            with pytest.raises(ForkRefused):
                await house.fork(queued, after)
    async with asking_team(tmp_path) as house:
        await house.runs.recover()
        async for event in house.follow(queued):
            if event.HasField("run_resumed"):
                break
        for after in (1, 2, 3):
            with pytest.raises(ForkRefused, match="begun"):
                await house.fork(queued, after)
        await house.runs.cancel(ME, queued.run_id)
        await house.log(queued)
        for after in (1, 2, 3):
            with pytest.raises(ForkRefused, match="begun"):
                await house.fork(queued, after)


async def test_a_run_that_was_queued_is_forked_from_its_dequeuing_on(tmp_path: Path) -> None:
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.ON_BUSY_SESSION_QUEUE)
    heard: list[ModelRequest] = []
    may_begin = asyncio.Event()

    async def hold(agent: str, turn: int, chunk: int) -> None:
        await may_begin.wait()

    async with open_team(tmp_path, script(p=["Done."]), llm("p"), heard=heard, gate=hold) as house:
        first = await house.start("p", "one")
        second = await house.start("p", "two", session_id=first.session_id, policy=queue)
        may_begin.set()
        log = await house.log(second)
        begins = place(log, "run_dequeued")
        heard.clear()
        fork = await house.fork(second, begins)
        assert answer_of(await house.log(fork)) == "Done."
        assert fork.start_time == (await house.runs.get(ME, fork.run_id)).run.start_time
        await check_replay(house, await house.log(fork))
        stored = await house.messages(fork.session_id)
        with pytest.raises(ForkRefused):
            await house.fork(second, begins - 1)
    assert [text_of(message) for message in heard[0].messages] == ["one", "Done.", "two"]
    assert [text_of(one.message) for one in stored] == ["one", "Done.", "two", "Done."]


async def test_a_cancelled_run_is_forked_before_its_cancellation_only(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as house:
        origin = await house.start("asker")
        asked = await house.until_interrupted(origin)
        await house.until_over(origin)
        await house.runs.cancel(ME, origin.run_id)
        log = await house.log(origin)
        with pytest.raises(ForkRefused, match="cancelled"):
            await house.fork(origin, place(log, "cancel_requested"))
        fork = await house.fork(origin, place(log, "cancel_requested") - 1)
        await fork_at(house, fork, len(asked))
        await house.until_over(fork)
        await house.resume(fork, answer_to(asked, "x"))
        assert not having(await latest(house, fork), "cancel_requested")


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
    async with open_team(tmp_path, turns, llm("p", tools=["pay"]), tools=[pay]) as house:
        origin = await house.turn("p")
        started = having(origin, "tool_started")[0]
        if rule == "retry":
            fork = await house.fork(run_of(origin), started.sequence)
        else:
            with pytest.raises(ForkRefused, match="'pay'"):
                await house.fork(run_of(origin), started.sequence)
            call_id = started.tool_started.call.call_id
            instead = await house.fork(run_of(origin), started.sequence, tool_results=[edited("free", call_id)])
            assert text_of(results_of(await house.log(instead))[0]) == "free"
            fork = await house.fork(run_of(origin), started.sequence, allow_open_effects=True)
        log = await house.until_interrupted(fork) if rule == "ask" else await house.log(fork)
        if rule != "ask":
            await check_replay(house, log)
    own = ids.derived_id(fork.run_id, started.effect_key)
    if rule == "retry":
        assert seen == [started.tool_started.idempotency_key, own]
        assert [event.attempt for event in having(log, "tool_started")] == [1, 2]
        assert having(log, "tool_started")[1].tool_started.idempotency_key == own
    else:
        assert seen == [started.tool_started.idempotency_key]
    if rule == "fail":
        assert results_of(log)[0].error.reason == error_pb2.ERROR_REASON_TOOL_FAILED


async def test_the_same_request_to_fork_finds_its_fork_and_another_is_refused(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as house:
        origin = await house.turn("p")
        forks = await asyncio.gather(*(house.fork(run_of(origin), 3, request_id="f") for _ in range(3)))
        await house.log(forks[0])
        late = await house.fork(run_of(origin), 3, request_id="f")
        for refusal in (house.fork(run_of(origin), 4, request_id="f"), house.start("p", request_id="f")):
            with pytest.raises(RequestIdReused) as reused:
                await refusal
            assert reused.value.details == {"run_id": late.run_id}
    assert {fork.run_id for fork in (*forks, late)} == {forks[0].run_id}


async def test_a_forks_session_goes_on_by_itself_and_outlives_its_origins(tmp_path: Path, world: World) -> None:
    async with open_forked(tmp_path, world) as house:
        await house.turn("p", "zero")
        first = await house.turn("p", "one")
        origin = await house.turn("p", "two", session_id=first[0].session_id)
        untouched = await house.messages(origin[0].session_id)
        fork = await house.fork(run_of(origin), place(origin, "step_completed", 0))
        await house.log(fork)
        await house.until_over(fork)
        world.heard.clear()
        await house.turn("p", "three", session_id=fork.session_id)
        seen = [text_of(message) for message in world.heard[0].messages]
        assert await house.messages(origin[0].session_id) == untouched
        before = await house.messages(fork.session_id)
        await house.store.sessions.delete(ME, origin[0].session_id)
        log = await house.log(fork)
        check_laws(log)
    assert [text for text in seen if text in ("zero", "one", "two", "three", "Done.")] == [
        *("one", "Done.", "two", "Done.", "three")
    ]
    assert [one.message.position for one in before] == list(range(1, len(before) + 1))
    rebuild_projections(f"sqlite:///{tmp_path / 'bough.db'}")
    async with open_forked(tmp_path, world) as house:
        assert await house.messages(fork.session_id) == before
        assert (await house.runs.get(ME, fork.run_id)).run.forked_from.sequence == fork.forked_from.sequence
        again = await house.log(await house.fork(fork, 3))
        assert answer_of(again) == "Done."


async def test_a_fork_that_is_killed_goes_on_as_a_fork(tmp_path: Path, world: World) -> None:
    reached = asyncio.Event()
    is_held = False

    async def hold(agent: str, turn: int, chunk: int) -> None:
        if is_held and agent == "p":
            reached.set()
            await asyncio.Event().wait()

    async with open_team(tmp_path, TURNS, *TEAM, tools=world.tools(), gate=hold) as house:
        origin = await house.turn("p")
        is_held = True
        fork = await house.fork(
            run_of(origin), place(origin, "step_completed", -2), instructions={"p": "In verse."}, models={"p": "other"}
        )
        await reached.wait()
        await house.crash()
    world.heard.clear()
    looked = world.looked.total()
    async with open_forked(tmp_path, world) as house:
        assert await house.runs.recover() == 1
        log = await house.log(fork)
        await check_replay(house, log)
    assert answer_of(log) == "Done."
    assert [request.instruction for request in world.heard] == ["In verse."]
    assert [event.llm_retrying.next_model for event in having(log, "llm_retrying")] == ["other"]
    assert world.looked.total() == looked
    assert names(log)[-1] == "p: run.completed"
