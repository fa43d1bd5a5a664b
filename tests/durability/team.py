"""An agent in code for tests of storage; it asks the team of the server tests."""

from bough.v1 import message_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context


@agent(description="Waits below itself for the gate that it is told, and answers at length.", agents=["waiter"])
async def long_winded(ctx: Context, input: message_pb2.Message) -> str:
    """Answers with more than fits a page of any database."""
    await ctx.dispatch("waiter", input.parts[0].text)
    return "x" * 100_000
