"""An agent in code for tests of storage; it asks the team of the server tests."""

from bough_server import Context, Message, agent


@agent(description="Waits below itself for the gate that it is told, and answers at length.", agents=["waiter"])
async def long_winded(ctx: Context, input: Message) -> str:
    """Answers with more than fits a page of any database."""
    await ctx.dispatch("waiter", input.parts[0].text)
    return "x" * 100_000
