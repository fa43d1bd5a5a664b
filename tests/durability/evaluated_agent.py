"""The agent that tortured servers evaluate."""

import asyncio

from bough_server import Context, Message, agent


@agent(description="Takes a moment.")
async def worker(ctx: Context, input: Message) -> str:
    """Answers with its input and the number of the turn."""

    async def moment() -> None:
        await asyncio.sleep(0.01)

    await ctx.step("moment", moment)
    ctx.state["turns"] = ctx.state.get("turns", 0) + 1
    return f"{input.parts[0].text} {ctx.state['turns']}"
