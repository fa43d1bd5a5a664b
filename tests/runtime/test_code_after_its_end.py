"""Code that fights its end: late effects, stray tasks, exits, swallowed cancellations; the log stays whole."""

import asyncio
import sys
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

from bough.v1 import agent_pb2, error_pb2, message_pb2, policy_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import RunError
from bough_server.runtime.agent import Context
from tests.support.log_laws import check_laws
from tests.support.run_harness import RunHarness, names, open_harness
from tests.support.teams import Scripts

ABORT = policy_pb2.RunPolicy(on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT)


def harness(folder: Path, *agents: FunctionAgent) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(folder, models=Scripts("agents: {}"), code_agents=agents)


@agent(description="Fails at once.")
async def failing(ctx: Context, input: message_pb2.Message) -> str:
    raise ValueError("no luck")


async def test_an_effect_of_a_task_that_outlives_its_invocation_writes_nothing(tmp_path: Path) -> None:
    go_on, tried = asyncio.Event(), asyncio.Event()
    strays: list[asyncio.Task[None]] = []

    @agent(description="Leaves a task behind.")
    async def leaver(ctx: Context, input: message_pb2.Message) -> str:
        async def later() -> None:
            await go_on.wait()
            try:
                await ctx.now()
            finally:
                tried.set()

        strays.append(asyncio.get_running_loop().create_task(later()))
        return "gone"

    @agent(description="Calls.", agents=["leaver"])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.dispatch("leaver", "go")
        go_on.set()
        await tried.wait()
        return "done"

    async with harness(tmp_path, caller, leaver) as it:
        log = await it.turn("caller")
        check_laws(log)
    assert names(log) == [
        "caller: run.started",
        "leaver: sub_agent.started",
        "leaver: sub_agent.completed",
        "caller: run.completed",
    ]
    with suppress(asyncio.CancelledError):
        await strays[0]


async def test_an_agent_that_exits_fails_and_the_server_goes_on(tmp_path: Path) -> None:
    @agent(description="Exits.")
    async def exiting(ctx: Context, input: message_pb2.Message) -> str:
        sys.exit(3)

    async with harness(tmp_path, exiting) as it:
        log = await it.turn("exiting")
        check_laws(log)
    assert log[-1].run_failed.error.message == "SystemExit: 3"


async def test_an_abort_that_code_catches_fails_it_all_the_same(tmp_path: Path) -> None:
    @agent(description="Catches.", agents=["failing"])
    async def catching(ctx: Context, input: message_pb2.Message) -> str:
        with suppress(RunError):
            await ctx.dispatch("failing", "go")
        return "as if nothing had happened"

    async with harness(tmp_path, catching, failing) as it:
        log = await it.log(await it.start("catching", policy=ABORT))
        check_laws(log)
        assert (await it.replay(log)).divergence == ""
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_SUB_AGENT_FAILED


async def test_an_abort_in_a_lane_ends_the_children_of_the_other_lanes(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    @agent(description="Waits.")
    async def waiter(ctx: Context, input: message_pb2.Message) -> str:
        waiting.set()
        await asyncio.Event().wait()
        return "never"

    @agent(description="Fans out.", agents=["failing", "waiter"])
    async def fan(ctx: Context, input: message_pb2.Message) -> str:
        async def fail(lane: Context) -> message_pb2.Message:
            await lane.step("wait", waiting.wait)
            return await lane.dispatch("failing", "go")

        await ctx.gather(lambda lane: lane.dispatch("waiter", "go"), fail)
        return "never"

    async with harness(tmp_path, fan, failing, waiter) as it:
        log = await it.log(await it.start("fan", policy=ABORT))
        check_laws(log)
    assert names(log)[-4:] == [
        "fan: control.cancel_requested",
        "waiter: sub_agent.failed",
        "failing: sub_agent.failed",
        "fan: run.failed",
    ]


async def test_work_that_cancels_itself_is_a_failed_step(tmp_path: Path) -> None:
    @agent(description="Cancels its own work.")
    async def odd(ctx: Context, input: message_pb2.Message) -> str:
        async def work() -> None:
            raise asyncio.CancelledError

        await ctx.step("odd", work)
        return "never"

    async with harness(tmp_path, odd) as it:
        log = await it.turn("odd")
        check_laws(log)
        assert (await it.replay(log)).divergence == ""
    assert log[-1].run_failed.error.message == "The step 'odd' cancelled itself."


async def test_a_child_that_cancels_itself_does_not_wait_for_its_wall(tmp_path: Path) -> None:
    @agent(description="Cancels itself.")
    async def odd(ctx: Context, input: message_pb2.Message) -> str:
        raise asyncio.CancelledError

    link = agent_pb2.AgentLink(agent="odd")
    link.limits.wall_duration.FromSeconds(600)

    @agent(description="Calls.", agents=[link])
    async def caller(ctx: Context, input: message_pb2.Message) -> str:
        with suppress(RunError):
            await ctx.dispatch("odd", "go")
        return "went on"

    async with harness(tmp_path, caller, odd) as it:
        log = await it.turn("caller")
        check_laws(log)
        assert (await it.replay(log)).divergence == ""
    assert log[-1].run_completed.final_answer.parts[0].text == "went on"


async def test_a_replay_of_code_that_waits_for_something_else_than_its_effects_ends(tmp_path: Path) -> None:
    came = asyncio.Event()

    @agent(description="Waits for something of its own.")
    async def waiter(ctx: Context, input: message_pb2.Message) -> str:
        await ctx.now()
        await came.wait()
        return "done"

    async with harness(tmp_path, waiter) as it:
        came.set()
        log = await it.turn("waiter")
        came.clear()
        replayed = await it.replay(log, patience=0.05)
    assert "waits for something else" in replayed.divergence
