"""Agents in code that read and write session state, for tests that need no model."""

import asyncio
import json
from collections import defaultdict

from bough_server import Context, Message, agent

DOORS: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
"""Events that `keeper` waits for after it has written, by the name in its input; each test uses its own name."""


@agent(description="Keeps what it is told, waits where it is told to, and says what is kept.")
async def keeper(ctx: Context, input: Message) -> str:
    """Answers with all values."""
    told = json.loads(input.parts[0].text)
    ctx.state.update(told.get("keep", {}))
    await ctx.now()  # what is written is recorded with the next effect

    async def opened() -> None:
        await DOORS[told["door"]].wait()

    if "door" in told:
        await ctx.step("wait", opened)
    return json.dumps(dict(ctx.state))
