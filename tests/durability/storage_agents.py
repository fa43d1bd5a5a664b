"""Agents in code for tests of storage; they ask the team of the server tests."""

import random

from bough_server import Context, Message, agent


@agent(description="Waits below itself for the gate that it is told, and answers at length.", agents=["waiter"])
async def long_winded(ctx: Context, input: Message) -> str:
    """Answers with more than fits a page of any database."""
    await ctx.dispatch("waiter", input.parts[0].text)
    return "x" * 100_000


@agent(description="As long_winded, but with an answer that no database compresses.", agents=["waiter"])
async def noisy(ctx: Context, input: Message) -> str:
    """Answers with what looks random."""
    await ctx.dispatch("waiter", input.parts[0].text)
    return noise()


def noise() -> str:
    """Return a long text that hardly gets shorter by compression, the same each time."""
    return random.Random(1).randbytes(100_000).hex()
