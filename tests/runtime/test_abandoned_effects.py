"""Effects that code starts in tasks that it creates, abandons in flight, or tries again and again after its end."""

import asyncio
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

from bough.v1 import error_pb2, execution_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, names, open_harness
from tests.support.teams import Scripts


def harness(folder: Path, *agents: FunctionAgent) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(folder, models=Scripts("agents: {}"), code_agents=agents)


def reason_of(raised: BaseException | None) -> object:
    assert isinstance(raised, RunError)
    return raised.reason


async def test_effects_of_a_task_that_code_made_are_refused_and_take_no_key(tmp_path: Path) -> None:
    refused: list[object] = []

    @agent(description="Leaves effects to tasks of its own.")
    async def scattered(ctx: Context, input: message_pb2.Message) -> str:
        async def later(lane: Context) -> None:
            await lane.now()

        strays = [asyncio.ensure_future(ctx.gather(later, later)), asyncio.ensure_future(ctx.now())]
        await asyncio.wait(strays)
        refused.extend(reason_of(stray.exception()) for stray in strays)
        await ctx.now()
        return "gone"

    async with harness(tmp_path, scattered) as it:
        log = await it.turn("scattered")
        await check_replay(it, log)
    assert set(refused) == {error_pb2.ERROR_REASON_CONCURRENT_EFFECTS}
    assert [event.effect_key for event in having(log, "value_recorded")] == ["e0"]


async def test_a_task_that_is_not_awaited_changes_nothing(tmp_path: Path) -> None:
    strays: list[asyncio.Future[object]] = []

    @agent(description="Waits.")
    async def waiter(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.sleep(600)
        return "never"

    @agent(description="Starts lanes and goes.", agents=["waiter"])
    async def leaver(ctx: Context, input: message_pb2.Message) -> str:
        strays.append(asyncio.ensure_future(ctx.gather(lambda lane: lane.dispatch("waiter", "go"))))
        await ctx.step("pass the time", lambda: asyncio.sleep(0))
        return "gone"

    async with harness(tmp_path, leaver, waiter) as it:
        log = await it.turn("leaver")
        await check_replay(it, log)
    assert names(log) == ["leaver: run.started", "leaver: control.value_recorded", "leaver: run.completed"]
    assert {reason_of(stray.exception()) for stray in strays} == {error_pb2.ERROR_REASON_CONCURRENT_EFFECTS}


async def test_an_effect_in_a_thread_is_refused(tmp_path: Path) -> None:
    @agent(description="Uses a thread.")
    async def threaded(ctx: Context, input: message_pb2.Message) -> str:
        return await asyncio.to_thread(ctx.new_id)

    async with harness(tmp_path, threaded) as it:
        log = await it.turn("threaded")
        await check_replay(it, log)
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_CONCURRENT_EFFECTS


@pytest.mark.timeout(20)
async def test_code_that_will_not_hear_of_its_end_does_not_hold_the_others(tmp_path: Path) -> None:
    began, is_over = asyncio.Event(), asyncio.Event()

    @agent(description="Goes on and on.")
    async def stubborn(ctx: Context, input: message_pb2.Message) -> str:
        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        while not is_over.is_set():
            with suppress(asyncio.CancelledError):
                await ctx.step("work", work)
        return "never"

    @agent(description="Answers.")
    async def quick(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.now()
        return "done"

    async with harness(tmp_path, stubborn, quick) as it:
        run = await it.start("stubborn")
        await began.wait()
        await it.runs.cancel(ME, run.run_id)
        assert answer_of(await it.turn("quick")) == "done"
        log = await it.log(run)
        check_laws(log)
        await it.until_over(run)
    is_over.set()
    assert log[-1].HasField("run_cancelled")


@pytest.mark.timeout(20)
async def test_a_run_waits_for_input_beside_code_that_will_not_hear_of_its_end(tmp_path: Path) -> None:
    began, is_over = asyncio.Event(), asyncio.Event()

    @agent(description="Goes on and on.")
    async def stubborn(ctx: Context, input: message_pb2.Message) -> str:
        began.set()
        while not is_over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return "never"

    @agent(description="Fails.")
    async def failing(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.step("wait", began.wait)
        raise ValueError("no luck")

    @agent(description="Fans out.", agents=["stubborn", "failing"])
    async def fan(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.gather(lambda lane: lane.dispatch("stubborn", "go"), lambda lane: lane.dispatch("failing", "go"))
        return "never"

    fan.definition.on_sub_agent_failure = 2

    @agent(description="Asks.", agents=["fan"])
    async def asker(ctx: Context, input: message_pb2.Message) -> str:
        with suppress(RunError):
            await ctx.dispatch("fan", "go")
        return str(await ctx.ask("well?"))

    async with harness(tmp_path, asker, fan, failing, stubborn) as it:
        run = await it.start("asker")
        log = await it.until_interrupted(run)
        assert (await it.runs.get(ME, run.run_id)).run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    is_over.set()
    assert log[-1].HasField("run_interrupted")


async def test_an_effect_that_code_gives_up_fails_its_run_at_once_and_says_what_to_use(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    @agent(description="Asks, and does not wait for long.")
    async def hasty(ctx: Context, input: message_pb2.Message) -> str:
        async def ask(lane: Context) -> object:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    return await lane.ask("well?")
            return await lane.step("go on", lambda: asyncio.sleep(0))

        await ctx.gather(ask, lambda lane: lane.step("wait", may_end.wait))
        return "never"

    async with harness(tmp_path, hasty) as it:
        log = await it.turn("hasty")
        check_laws(log)
        assert (await it.replay(log)).divergence == ""
    error = log[-1].run_failed.error
    assert error.reason == error_pb2.ERROR_REASON_NON_DETERMINISTIC
    assert "`expires`" in error.message
    assert having(log, "value_recorded") == []


async def test_time_that_is_up_while_a_log_is_handed_back_gives_nothing_up(tmp_path: Path) -> None:
    patience: list[float | None] = [None]

    @agent(description="Has little time.")
    async def timed(ctx: Context, input: message_pb2.Message) -> str:
        async with asyncio.timeout(patience[0]):
            for _ in range(100):
                await ctx.now()
        return "done"

    async with harness(tmp_path, timed) as it:
        log = await it.turn("timed")
        patience[0] = 0.0
        assert (await it.replay(log)).divergence == ""
    assert answer_of(log) == "done"
