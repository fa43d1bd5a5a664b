"""Code that fights while it asks: it is told what to do, and writes nothing while its run waits."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bough import reply
from bough.v1 import error_pb2, input_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.question_agents import (
    harness,
    open_requests,
)
from tests.support.run_harness import names

Message = message_pb2.Message
Request = input_pb2.InputRequest


async def test_effects_at_once_fail_with_what_to_do_though_one_of_them_asks(tmp_path: Path) -> None:
    @agent(description="Asks twice at once, and wrongly.")
    async def hasty(ctx: Context, input: Message) -> str:
        await asyncio.gather(ctx.ask("a?"), ctx.ask("b?"))
        return "never"

    async with harness(tmp_path, hasty) as it:
        run = await it.start("hasty")
        log = await it.until_interrupted(run)
    assert not having(log, "run_interrupted")
    assert log[-1].run_failed.error.reason == error_pb2.ERROR_REASON_CONCURRENT_EFFECTS
    assert "ctx.gather" in log[-1].run_failed.error.message


Stubborn = Callable[[Context], Awaitable[object]]


async def _excepts(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    except Exception:
        return await ctx.now()


async def _finally(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    finally:
        await ctx.now()


async def _swallows(ctx: Context) -> object:
    try:
        return await ctx.ask("a?")
    except BaseException:
        return await ctx.ask("and now?")


async def _times_out(ctx: Context) -> object:
    async with asyncio.timeout(5):
        return await ctx.ask("a?")


@pytest.mark.parametrize(("body", "more"), [(_excepts, 0), (_finally, 1), (_swallows, 0), (_times_out, 0)])
async def test_a_run_that_waits_writes_nothing_whatever_its_code_does(
    tmp_path: Path, body: Stubborn, more: int
) -> None:
    @agent(description="Is stubborn.")
    async def stubborn(ctx: Context, input: Message) -> str:
        return str(await body(ctx))

    async with harness(tmp_path, stubborn) as it:
        run = await it.start("stubborn")
        log = await it.until_interrupted(run)
        await it.until_over(run)
        assert await it.store.log.last_sequence(run.run_id) == len(log)
        await it.resume(run, reply(open_requests(log)["a?"], "A"))
        log = await it.log(run)
        await check_replay(it, log)
    assert names(log) == [
        "stubborn: run.started",
        "stubborn: control.input_requested",
        "stubborn: run.interrupted",
        "stubborn: run.resumed",
        "stubborn: control.input_received",
        *["stubborn: control.value_recorded"] * more,
        "stubborn: run.completed",
    ]
    assert answer_of(log) == "A"
