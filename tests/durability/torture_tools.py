"""Tools and an agent in code for torture: whatever touches the world says so in a file, before and after.

Nothing is judged here. The file is named by TORTURE_EFFECTS.
"""

import asyncio
import json
import os
import zlib
from functools import partial

from bough_server import Context, Message, ToolContext, agent, tool


@tool
async def touch(label: str, context: ToolContext) -> str:
    """Touches something in the world."""
    await _touch(context.idempotency_key, label)
    return f"touched {label}"


@tool(approval=True)
async def pay(label: str, context: ToolContext) -> str:
    """Pays, once a person has agreed."""
    await _touch(context.idempotency_key, label)
    return f"paid {label}"


@tool(execution="client")
async def read_card(label: str) -> str:
    """Reads a card where the client is."""
    raise AssertionError("no server runs this tool")


@agent(description="Sends two scouts at once, takes a note, and asks for a word.", agents=["scout"])
async def chief(ctx: Context, input: Message) -> str:
    """Answers with what the scouts, the note and the caller said, in this order."""
    told = input.parts[0].text
    scouts = await ctx.gather(
        lambda lane: lane.dispatch("scout", f"{told}.left"), lambda lane: lane.dispatch("scout", f"{told}.right")
    )
    note = await ctx.step("note", partial(_note, f"{ctx.run_id}/note", f"{told}.note"))
    word = await ctx.ask(f"{told}.word", schema={"type": "string"})
    said = [*(scout.parts[0].text for scout in scouts), note, word]
    return f"chief says {told}: {'; '.join(said)}"


async def _note(key: str, label: str) -> str:
    await _touch(key, label)
    return f"noted {label}"


async def _touch(key: str, label: str) -> None:
    """Takes 20 to 300 milliseconds, always the same for one label."""
    _say("began", key)
    await asyncio.sleep(0.02 + zlib.crc32(label.encode()) % 280 / 1000)
    _say("ended", key)


def _say(phase: str, key: str) -> None:
    """Adds a line in one write, which a killed process has done or has not."""
    line = json.dumps({"phase": phase, "key": key, "pid": os.getpid()}) + "\n"
    file = os.open(os.environ["TORTURE_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
