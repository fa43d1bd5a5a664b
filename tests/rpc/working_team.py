"""Agents in code that ask and work until a gate opens, for tests of answers to runs that go on."""

from bough.v1 import message_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context
from tests.rpc.team import GATES

Message = message_pb2.Message


@agent(description="Asks while it works until the gate is open that it is told.")
async def worker(ctx: Context, input: Message) -> str:
    """Answers with what it is answered."""
    gate = GATES[input.parts[0].text]
    said, _ = await ctx.gather(lambda lane: lane.ask("meanwhile?"), lambda lane: lane.step("work", gate.wait))
    return str(said)


@agent(description="Asks, and then works until the gate is open that it is told.")
async def then_worker(ctx: Context, input: Message) -> str:
    """Answers with what it is answered."""
    said = str(await ctx.ask("before?"))
    await ctx.step("work", GATES[input.parts[0].text].wait)
    return said
