"""A till of tools that take money, and an agent that uses it; short ways to wait for what it asks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bough.v1 import event_pb2, execution_pb2, input_pb2, run_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.support.log_readings import check_replay
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

Request = input_pb2.InputRequest
Run = run_pb2.Run
DAY = 86_400


class Till:
    """Tools that take money, and what was taken, with the keys it was taken under."""

    def __init__(self) -> None:
        self.paid: list[float] = []
        self.keys: list[str] = []
        self.began, self.go_on = asyncio.Event(), asyncio.Event()

    def pay(self, *, waits: bool = False, **rules: object) -> Tool:
        """A tool with these rules; one that waits says that it began, and pays when it may go on."""

        @tool(**rules)  # type: ignore[call-overload,untyped-decorator]
        async def pay(amount: float, ctx: ToolContext) -> str:
            """Pays."""
            self.keys.append(ctx.idempotency_key)
            if waits:
                self.began.set()
                await self.go_on.wait()
            self.paid.append(amount)
            return f"paid {amount:g}"

        made: Tool = pay
        return made


@asynccontextmanager
async def team(
    folder: Path, turns: Sequence[object], *tools: Tool, heard: list[ModelRequest] | None = None, **options: object
) -> AsyncIterator[RunHarness]:
    """A harness with one agent, p, that has these tools."""
    agent = llm("p", tools=[one.name for one in tools])
    async with open_team(folder, script(p=turns), agent, tools=tools, heard=heard, **options) as it:  # type: ignore[arg-type]
        yield it


async def waiting(harness: RunHarness, run: Run, times: int = 1) -> dict[str, Request]:
    """What a run asks, once it has been interrupted so many times, by the tools it is about."""
    async for event in harness.follow(run):
        times -= event.HasField("run_interrupted")
        if not times:
            break
    await harness.until_over(run)
    return await asked(harness, run)


async def asked(harness: RunHarness, run: Run) -> dict[str, Request]:
    """What a run that waits asks, by the tools it is about."""
    found = (await harness.runs.get(ME, run.run_id)).run
    assert found.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
    return {request.call.name: request for request in found.open_requests}


async def whole(harness: RunHarness, run: Run) -> list[event_pb2.AgentEvent]:
    """The log of a run that has ended and keeps the laws."""
    log = await harness.log(run)
    await check_replay(harness, log)
    return log


PAY = [calls(call("pay", amount=7)), "Done."]
