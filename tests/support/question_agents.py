"""Agents in code that ask, and short ways to wait for what they ask; it answers nothing."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bough.v1 import event_pb2, input_pb2, message_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.runtime.agent import Context
from tests.support.log_readings import having
from tests.support.run_harness import RunHarness, names, open_harness
from tests.support.teams import Scripts

Message = message_pb2.Message
Request = input_pb2.InputRequest
INTEGER = {"type": "integer"}


def harness(folder: Path, *agents: FunctionAgent, **options: object) -> AbstractAsyncContextManager[RunHarness]:
    """A harness with agents in code and no models."""
    return open_harness(folder, models=Scripts("agents: {}"), code_agents=agents, **options)  # type: ignore[arg-type]


def open_requests(log: Sequence[event_pb2.AgentEvent]) -> dict[str, Request]:
    """What the last event, an interruption, asks, by its words."""
    assert log[-1].HasField("run_interrupted"), names(log)
    return {request.prompt: request for request in log[-1].run_interrupted.requests}


def received(log: Sequence[event_pb2.AgentEvent]) -> list[input_pb2.InputAnswer]:
    """The answers that a log holds."""
    return [event.input_received.answer for event in having(log, "input_received")]


@agent(description="Asks what it is told.")
async def asker(ctx: Context, input: Message) -> str:
    """Answers with what it is answered."""
    return str(await ctx.ask(input.parts[0].text))


@agent(description="Hands on.", agents=["asker"])
async def third(ctx: Context, input: Message) -> Message:
    """Answers with what the asker is answered."""
    return await ctx.dispatch("asker", input)


@agent(description="Has three ask at once.", agents=["asker"])
async def pair(ctx: Context, input: Message) -> str:
    """Answers with all answers, in order."""

    async def ask(lane: Context) -> str:
        return str(await lane.ask("c?", schema=INTEGER))

    said = await ctx.gather(lambda lane: lane.dispatch("asker", "a?"), lambda lane: lane.dispatch("asker", "b?"), ask)
    return " ".join(one.parts[0].text if isinstance(one, Message) else str(one) for one in said)


async def until(
    stream: AsyncIterator[event_pb2.AgentEvent], kind: str, count: int = 1
) -> AsyncIterator[event_pb2.AgentEvent]:
    """The events of a stream up to one of a payload: the first, or as many on."""
    async for event in stream:
        yield event
        count -= event.HasField(kind)  # type: ignore[arg-type]
        if not count:
            return


async def interrupted_again(harness: RunHarness, run: run_pb2.Run, times: int) -> list[event_pb2.AgentEvent]:
    """A run's events up to where it has been interrupted so many times, once it waits."""
    log = [event async for event in until(harness.follow(run), "run_interrupted", times)]
    await harness.until_over(run)
    return log
