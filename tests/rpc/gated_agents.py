"""Agents in code that ask and work until a gate opens, for tests of answers to running runs."""

from bough_server import Context, Message, agent
from tests.rpc.agents import GATES


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
