"""A team of agents in code that ask, for tests of the server that need no model."""

from bough_server import Context, Message, agent


@agent(description="Asks what it is told, and says the answer.")
async def asker(ctx: Context, input: Message) -> str:
    """Answers with what it is answered."""
    return str(await ctx.ask(input.parts[0].text))


@agent(description="Has two ask at once, and then asks itself.", agents=["asker"])
async def chief(ctx: Context, input: Message) -> str:
    """Answers with all answers, in order."""
    answers = await ctx.gather(
        lambda lane: lane.dispatch("asker", "first?"), lambda lane: lane.dispatch("asker", "second?")
    )
    said = [answer.parts[0].text for answer in answers]
    said.append(str(await ctx.ask("third?")))
    return ", ".join(said)
