"""Runs that a live worker owns and does not execute: there must be none, whatever happened on the way."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import input_pb2, message_pb2
from bough_server.agents.function import agent
from bough_server.errors import StorageFailed
from bough_server.runtime.agent import Context
from tests.support.log_readings import answer_of, check_replay, having
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts


@agent(description="Asks.")
async def asker(ctx: Context, input: message_pb2.Message) -> str:
    return str(await ctx.ask("well?"))


@agent(description="Says the same.")
async def echo(ctx: Context, input: message_pb2.Message) -> str:
    return input.parts[0].text


def _fails_once_after(write: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """A write whose first outcome is lost: it is committed, and reported as failed."""
    failures = [StorageFailed("The answer was lost.")]

    async def writing(*args: Any, **options: Any) -> None:
        await write(*args, **options)
        if failures:
            raise failures.pop()

    return writing


async def _answer(harness: RunHarness, run_id: str) -> input_pb2.InputAnswer:
    record = await harness.store.runs.get(ME, run_id)
    return input_pb2.InputAnswer(input_id=record.run.open_requests[0].input_id, value_json='"good"')


async def test_a_run_that_was_created_although_the_storage_failed_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[echo]) as harness:
        await harness.runs.recover()
        monkeypatch.setattr(harness.store.log, "create", _fails_once_after(harness.store.log.create))
        with pytest.raises(StorageFailed):
            await harness.start("echo", request_id="one")
        run = await harness.start("echo", request_id="one")
        async with asyncio.timeout(30):
            log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "hello"


async def test_a_run_whose_answer_was_recorded_although_the_storage_failed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[asker]) as harness:
        await harness.runs.recover()
        run = await harness.start("asker")
        await harness.until_interrupted(run)
        await harness.until_over(run)
        monkeypatch.setattr(harness.store.log, "take_over", _fails_once_after(harness.store.log.take_over))
        with pytest.raises(StorageFailed):
            await harness.resume(run, await _answer(harness, run.run_id))
        async with asyncio.timeout(30):
            log = await harness.log(run)
        await check_replay(harness, log)
    assert answer_of(log) == "good"
    assert len(having(log, "input_received")) == 1


async def test_a_run_whose_session_could_not_be_read_after_it_was_taken_over_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_harness(tmp_path, models=Scripts("agents: {}"), code_agents=[asker, echo]) as harness:
        await harness.runs.recover()
        run = await harness.start("asker")
        await harness.until_interrupted(run)
        await harness.until_over(run)
        takeover = harness.runs.supervisor.takeover
        launch, failures = takeover.launch, [StorageFailed("The session cannot be read.")]

        async def failing_once(*args: Any, **options: Any) -> Any:
            if failures:
                raise failures.pop()
            return await launch(*args, **options)

        monkeypatch.setattr(takeover, "launch", failing_once)
        with pytest.raises(StorageFailed):
            await harness.resume(run, await _answer(harness, run.run_id))
        async with asyncio.timeout(30):
            log = await harness.log(run)
    assert answer_of(log) == "good"
