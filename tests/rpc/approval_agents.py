"""An agent in code that pays, with tools that others than its user approve."""

from bough_server import Context, Message, agent
from bough_server.tools.tool import ToolContext, tool
from tests.rpc.agents import GATES


@tool(approval=True, approvers="finance", four_eyes=True)
def pay(amount: float) -> str:
    """Pays."""
    return f"paid {amount:g}"


@tool(approval=True, approvers="finance")
def book(amount: float) -> str:
    """Books."""
    return f"booked {amount:g}"


@tool(approval=True, four_eyes=True)
def drop(amount: float, ctx: ToolContext) -> str:
    """Drops."""
    return f"dropped {amount:g} for {ctx.user_id} of {ctx.tenant_id}"


@agent(description="Calls the tool that it is told.", tools=["pay", "book", "drop"])
async def clerk(ctx: Context, input: Message) -> str:
    """Answers with the result."""
    return str(await ctx.call_tool(input.parts[0].text, amount=5))


@agent(description="Pays, and then books.", tools=["pay", "book"])
async def cashier(ctx: Context, input: Message) -> str:
    """Answers with the last result."""
    await ctx.call_tool("pay", amount=5)
    return str(await ctx.call_tool("book", amount=5))


@agent(description="Calls pay while it works until the gate is open that it is told.", tools=["pay"])
async def busy_clerk(ctx: Context, input: Message) -> str:
    """Answers with the result."""
    gate = GATES[input.parts[0].text]
    result, _ = await ctx.gather(
        lambda lane: lane.call_tool("pay", amount=7), lambda lane: lane.step("work", gate.wait)
    )
    return str(result)
