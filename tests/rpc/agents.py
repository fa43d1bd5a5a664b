"""A team of agents in code, for tests of the server that need no model."""

import asyncio
from collections import defaultdict

from bough_server import Context, Message, agent

GATES: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
"""Events that `waiter` waits for, by its input; each test uses its own name."""


@agent(description="Says what it is told.")
async def echo(ctx: Context, input: Message) -> str:
    """Answers with its input."""
    return input.parts[0].text


@agent(description="Asks echo twice at once, and then once more below itself.", agents=["echo", "nester"])
async def lead(ctx: Context, input: Message) -> str:
    """Answers with all answers, in order."""
    text = input.parts[0].text
    answers = await ctx.gather(
        lambda lane: lane.dispatch("echo", f"{text} 1"), lambda lane: lane.dispatch("echo", f"{text} 2")
    )
    answers.append(await ctx.dispatch("nester", f"{text} 3"))
    return ", ".join(answer.parts[0].text for answer in answers)


@agent(description="Asks echo.", agents=["echo"])
async def nester(ctx: Context, input: Message) -> Message:
    """Answers with echo's answer."""
    return await ctx.dispatch("echo", input.parts[0].text)


@agent(description="Waits for the gate that it is told.")
async def waiter(ctx: Context, input: Message) -> str:
    """Answers when its gate is open."""
    gate = GATES[input.parts[0].text]

    async def opened() -> None:
        await gate.wait()

    await ctx.step("wait", opened)
    return "opened"


@agent(description="Fails.")
async def failing(ctx: Context, input: Message) -> str:
    """Raises a plain error."""
    raise ValueError(input.parts[0].text)
