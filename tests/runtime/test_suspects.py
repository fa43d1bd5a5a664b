"""Runs during which several servers crashed: continued one at a time, and counted over all those servers."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from sqlalchemy import update

from bough.v1 import event_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.runtime.agent import Context
from bough_server.store.sql import tables
from tests.support.log_laws import check_laws
from tests.support.log_readings import answer_of, having
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import Scripts


class Desk:
    """An agent whose step waits, and what it has begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on: dict[str, asyncio.Event] = {}
        self.changed = asyncio.Condition()

    def agent(self) -> FunctionAgent:
        @agent(description="Waits in a step.")
        async def waiting(ctx: Context, input: message_pb2.Message) -> str:
            async def work() -> None:
                event = self.go_on.setdefault(ctx.run_id, asyncio.Event())
                async with self.changed:
                    self.begun.append(ctx.run_id)
                    self.changed.notify_all()
                await event.wait()

            await ctx.step("work", work)
            return "done"

        return waiting

    async def until_begun(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.begun) >= count)


def server(folder: Path, desk: Desk, worker: str) -> AbstractAsyncContextManager[RunHarness]:
    return open_harness(folder, models=Scripts("agents: {}"), code_agents=[desk.agent()], worker=worker)


async def test_runs_that_have_lost_several_servers_are_continued_one_at_a_time(tmp_path: Path) -> None:
    first = Desk()
    async with server(tmp_path, first, "first") as it:
        runs = [await it.start("waiting") for _ in range(3)]
        await first.until_begun(3)
        await it.crash()
    second = Desk()
    async with server(tmp_path, second, "second") as it:
        await it.runs.recover()
        await second.until_begun(3)  # after one loss all continue at once
        await it.crash()
    third = Desk()
    async with server(tmp_path, third, "third") as it:
        await it.runs.recover()
        for count in range(1, 4):
            await third.until_begun(count)
            assert third.begun == [run.run_id for run in runs[:count]]
            third.go_on[third.begun[-1]].set()
        logs = [await it.log(run) for run in runs]
    for log in logs:
        check_laws(log)
        assert log[-1].HasField("run_completed")


async def test_a_loss_counts_although_the_next_server_is_lost_before_it_has_continued_the_run(tmp_path: Path) -> None:
    first = Desk()
    async with server(tmp_path, first, "first") as it:
        run = await it.start("waiting")
        await first.until_begun(1)
        await it.crash()
    async with server(tmp_path, Desk(), "second") as it:
        await it.crash()
    third = Desk()
    async with server(tmp_path, third, "third") as it:
        await it.runs.recover()
        await third.until_begun(1)
        third.go_on[run.run_id].set()
        log = await it.log(run)
    causes = [event.run_resumed.cause for event in having(log, "run_resumed")]
    assert causes == [event_pb2.RESUME_CAUSE_RECOVERY]


async def test_a_log_that_cannot_be_read_keeps_no_other_run_from_being_continued(tmp_path: Path) -> None:
    first = Desk()
    async with server(tmp_path, first, "first") as it:
        damaged, whole = [await it.start("waiting") for _ in range(2)]
        await first.until_begun(2)
        await it.crash()
    second = Desk()
    async with server(tmp_path, second, "second") as it:
        await it.runs.recover()
        await second.until_begun(2)
        await it.crash()
    third = Desk()
    async with server(tmp_path, third, "third") as it:
        damage = update(tables.events).where(tables.events.c.run_id == damaged.run_id).values(data=b"\xff")
        await it.store.write(lambda connection: connection.execute(damage))
        await it.runs.recover()
        async with asyncio.timeout(10):
            await third.until_begun(1)
        third.go_on[whole.run_id].set()
        log = await it.log(whole)
    assert (third.begun, answer_of(log)) == ([whole.run_id], "done")
