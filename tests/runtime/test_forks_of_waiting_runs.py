"""Forks of runs that wait: for answers, for their session; and what they ask again."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from bough.v1 import execution_pb2, input_pb2, message_pb2, policy_pb2
from bough_server.agents.function import agent
from bough_server.errors import ForkRefused
from bough_server.runtime.agent import Context
from tests.support.databases import in_each_database
from tests.support.fork_agents import Log, Run, place
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import llm, open_team, script

pytestmark = in_each_database


ASKING = script(p=["Done."])


def asking_team(folder: Path) -> AbstractAsyncContextManager[RunHarness]:
    @agent(description="Asks.")
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        first = await ctx.ask("one?")
        return f"{first} {await ctx.ask('two?')}"

    return open_team(folder, ASKING, llm("p"), code_agents=[asker])


def answer_to(log: Log, value: str) -> input_pb2.InputAnswer:
    request = having(log, "input_requested")[-1].input_requested.request
    return input_pb2.InputAnswer(input_id=request.input_id, value_json=f'"{value}"')


async def test_a_fork_of_a_run_that_waits_asks_again_under_the_same_id(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as harness:
        origin = await harness.start("asker")
        asked = await harness.until_interrupted(origin)
        await harness.until_over(origin)
        fork = await harness.fork(origin, len(asked))
        again = await harness.until_interrupted(await fork_at(harness, fork, len(asked)))
        await harness.until_over(fork)
        assert (await harness.runs.get(ME, fork.run_id)).run.open_requests == (
            await harness.runs.get(ME, origin.run_id)
        ).run.open_requests
        await harness.resume(fork, answer_to(asked, "fork"))
        second = await latest(harness, fork)
        await harness.resume(fork, answer_to(second, "done"))
        log = await harness.log(fork)
        await check_replay(harness, log)
        assert (await harness.runs.get(ME, origin.run_id)).run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    assert again[-1].HasField("run_interrupted")
    assert len(having(log, "input_requested")) == 2
    assert answer_of(log) == "fork done"


async def fork_at(harness: RunHarness, fork: Run, shared: int) -> Run:
    """The fork, once it waits itself."""
    async for event in harness.follow(fork, after=shared):
        if event.HasField("run_interrupted"):
            break
    return fork


async def latest(harness: RunHarness, run: Run) -> Log:
    """A run's events once it waits for its second answer."""
    seen = []
    async for event in harness.follow(run):
        seen.append(event)
        if event.HasField("run_interrupted") and len(having(seen, "input_received")) == 1:
            break
    await harness.until_over(run)
    return seen


async def test_a_fork_of_an_answered_run_may_be_answered_otherwise(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as harness:
        origin = await harness.start("asker")
        asked = await harness.until_interrupted(origin)
        await harness.until_over(origin)
        await harness.resume(origin, answer_to(asked, "one"))
        await harness.resume(origin, answer_to(await latest(harness, origin), "two"))
        whole = await harness.log(origin)
        fork = await harness.fork(origin, place(whole, "input_received", 1) - 1)
        await fork_at(harness, fork, fork.forked_from.sequence)
        await harness.until_over(fork)
        await harness.resume(fork, answer_to(whole, "other"))
        log = await harness.log(fork)
        await check_replay(harness, log)
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

    async with open_team(tmp_path, ASKING, llm("p"), code_agents=[waiter]) as harness:
        origin = await harness.start("waiter")
        await began.wait()
        last = (await harness.runs.get(ME, origin.run_id)).run.last_sequence
        forks = [await harness.fork(origin, after) for after in range(1, last + 1)]
        may_end.set()
        logs = [await harness.log(run) for run in (origin, *forks)]
        for log in logs:
            await check_replay(harness, log)
    assert answer_of(logs[-1]) == answer_of(logs[0])


async def test_a_run_that_has_not_begun_cannot_be_forked_whatever_has_become_of_it(tmp_path: Path) -> None:
    queue = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
    async with asking_team(tmp_path) as harness:
        holder = await harness.start("asker")
        await harness.until_interrupted(holder)
        queued = await harness.start("p", session_id=holder.session_id, policy=queue)
        for after in (1, 2):
            with pytest.raises(ForkRefused):
                await harness.fork(queued, after)
    async with asking_team(tmp_path) as harness:
        await harness.runs.recover()
        async for event in harness.follow(queued):
            if event.HasField("run_resumed"):
                break
        for after in (1, 2, 3):
            with pytest.raises(ForkRefused, match="still waiting for its session"):
                await harness.fork(queued, after)
        await harness.runs.cancel(ME, queued.run_id)
        await harness.log(queued)
        for after in (1, 2, 3):
            with pytest.raises(ForkRefused, match="still waiting for its session"):
                await harness.fork(queued, after)


async def test_a_cancelled_run_is_forked_before_its_cancellation_only(tmp_path: Path) -> None:
    async with asking_team(tmp_path) as harness:
        origin = await harness.start("asker")
        asked = await harness.until_interrupted(origin)
        await harness.until_over(origin)
        await harness.runs.cancel(ME, origin.run_id)
        log = await harness.log(origin)
        with pytest.raises(ForkRefused, match="cancelled"):
            await harness.fork(origin, place(log, "cancel_requested"))
        fork = await harness.fork(origin, place(log, "cancel_requested") - 1)
        await fork_at(harness, fork, len(asked))
        await harness.until_over(fork)
        await harness.resume(fork, answer_to(asked, "x"))
        assert not having(await latest(harness, fork), "cancel_requested")
