"""Drained runs end what is in flight and go on later; code that decides by what no effect gave goes nowhere."""

import asyncio
import time
from itertools import count
from pathlib import Path

import pytest

from bough.v1 import error_pb2, execution_pb2, input_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.runtime.agent import Context
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, open_harness
from tests.support.teams import Scripts, llm, open_team, script


async def test_a_drain_lets_effects_in_flight_end_and_none_begin(tmp_path: Path) -> None:
    may_end, began = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    def worker_agent() -> FunctionAgent:
        @agent(description="Does two things.")
        async def two(ctx: Context, input: message_pb2.Message) -> str:
            async def first() -> str:
                began.set()
                await may_end.wait()
                done.append("first")
                return "one"

            async def second() -> str:
                done.append("second")
                return "two"

            return f"{await ctx.step('first', first)} {await ctx.step('second', second)}"

        return two

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[worker_agent()]) as harness:
        run = await harness.start("two")
        await began.wait()
        draining = asyncio.create_task(harness.runs.drain(10))
        await asyncio.sleep(0)
        may_end.set()
        await draining
        assert done == ["first"]
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[worker_agent()]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "one two"
    assert done == ["first", "second"]
    assert [event.WhichOneof("payload") for event in log] == [
        *("run_started", "value_recorded", "run_resumed", "value_recorded", "run_completed")
    ]


async def test_a_run_that_sleeps_is_drained_at_once_and_sleeps_on(tmp_path: Path) -> None:
    @agent(description="Sleeps.")
    async def sleeper(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.sleep(0.3)
        return "awake"

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[sleeper]) as harness:
        run = await harness.start("sleeper")
        async for event in harness.follow(run):
            if event.HasField("value_recorded"):
                break
        began = time.monotonic()
        await harness.runs.drain(60)
        assert time.monotonic() - began < 30
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[sleeper]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "awake"
    slept = log[-1].record_time.ToNanoseconds() - having(log, "value_recorded")[0].record_time.ToNanoseconds()
    assert slept >= 290_000_000


async def test_a_run_that_asks_while_it_is_drained_is_left_resumable(tmp_path: Path) -> None:
    may_end, began = asyncio.Event(), asyncio.Event()

    @agent(description="Asks and works.")
    async def both(ctx: Context, input: message_pb2.Message) -> str:
        async def work(lane: Context) -> object:
            async def wait() -> str:
                began.set()
                await may_end.wait()
                return "worked"

            return await lane.step("work", wait)

        async def asks(lane: Context) -> object:
            return await lane.ask("well?")

        return " ".join(map(str, await ctx.gather(work, asks)))

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[both]) as harness:
        run = await harness.start("both")
        await began.wait()
        async for event in harness.follow(run):
            if event.HasField("input_requested"):
                request = event.input_requested.request
                break
        draining = asyncio.create_task(harness.runs.drain(10))
        await asyncio.sleep(0)
        may_end.set()
        await draining
        state = (await harness.runs.get(ME, run.run_id)).run.state
    assert state in (execution_pb2.EXECUTION_STATE_INPUT_REQUIRED, execution_pb2.EXECUTION_STATE_RUNNING)
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[both]) as harness:
        await harness.runs.recover()
        await harness.until_interrupted(run)
        await harness.resume(run, input_pb2.InputAnswer(input_id=request.input_id, value_json='"yes"'))
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "worked yes"
    assert len(having(log, "input_requested")) == 1


@pytest.mark.parametrize("source", ["the clock", "chance", "how many effects there are"])
async def test_code_that_decides_by_what_no_effect_gave_is_told_what_to_do_and_writes_nothing(
    tmp_path: Path, source: str
) -> None:
    decisions = iter([True, False])
    touched: list[str] = []
    reached = asyncio.Event()

    def fickle_agent() -> FunctionAgent:
        @agent(description="Decides by something that changes.")
        async def fickle(ctx: Context, input: message_pb2.Message) -> str:
            async def touch(name: str) -> str:
                touched.append(name)
                return name

            first = next(decisions)
            if source == "how many effects there are":
                if first:
                    await ctx.step("extra", lambda: touch("extra"))
            else:
                name = "a" if first else "b"
                await ctx.step(name, lambda: touch(name))

            async def wait() -> None:
                reached.set()
                await asyncio.Event().wait()

            await ctx.step("wait", wait)
            return "never"

        return fickle

    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[fickle_agent()]) as harness:
        run = await harness.start("fickle")
        await reached.wait()
        await harness.crash()
    before = list(touched)
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[fickle_agent()]) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        check_laws(log)
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_NON_DETERMINISTIC
    assert "Agent code must touch the world through effects only" in error.message
    assert touched == before
    assert len(having(log, "value_recorded")) == 1


async def test_a_run_whose_log_is_handed_back_is_drained_at_once(tmp_path: Path) -> None:
    is_stuck = True

    async def gate(agent: str, turn: int, chunk: int) -> None:
        if is_stuck:
            await asyncio.Event().wait()

    async with open_team(tmp_path, script(p=["Done."]), llm("p"), gate=gate) as harness:
        run = await harness.start("p")
        async for event in harness.follow(run):
            if event.HasField("llm_started"):
                break
        await harness.crash()
    async with open_team(tmp_path, script(p=["Done."]), llm("p"), gate=gate) as harness:
        recovering = asyncio.create_task(harness.runs.recover())
        async with asyncio.timeout(30):  # a thread reads the log: turns of the loop say nothing of how long it takes
            for _ in count():
                await asyncio.sleep(0)
                if (live := harness.live(run.run_id)) is not None:
                    break
        assert not live.execution.barrier.live
        async with asyncio.timeout(30):
            await harness.runs.drain(60)
        await recovering
    is_stuck = False
    async with open_team(tmp_path, script(p=["Done."]), llm("p"), gate=gate) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "Done."
    assert [event.attempt for event in having(log, "llm_retrying")] == [2], "the drained one asked no model"
