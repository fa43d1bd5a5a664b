"""Agents in code that keep values of their session, for tests that need no model."""

import asyncio
import json
from collections import defaultdict

from bough.v1 import message_pb2
from bough_server.agents.function import agent
from bough_server.runtime.agent import Context

DOORS: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
"""What `keeper` waits for when it has written, by the name it is told; a test uses one of its own."""


@agent(description="Keeps what it is told, waits where it is told to, and says what is kept.")
async def keeper(ctx: Context, input: message_pb2.Message) -> str:
    """Answers with all values."""
    told = json.loads(input.parts[0].text)
    ctx.state.update(told.get("keep", {}))
    await ctx.now()  # what is written is recorded with the next effect

    async def opened() -> None:
        await DOORS[told["door"]].wait()

    if "door" in told:
        await ctx.step("wait", opened)
    return json.dumps(dict(ctx.state))
