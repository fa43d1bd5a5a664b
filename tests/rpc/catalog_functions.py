"""Pure functions and code that stored agents may name."""

from bough_server import Context, Message, Snapshot, agent, condition, input_builder, rewriter


@condition
def enough(snapshot: Snapshot) -> bool:
    """Whether there were two rounds."""
    return snapshot.iteration == 1


@input_builder
def in_capitals(snapshot: Snapshot) -> str:
    """What the caller was told, louder."""
    return "".join(part.text for part in snapshot.input.parts).upper()


@rewriter
def hidden(message: Message) -> list[Message]:
    """Nothing of what others said."""
    return []


@agent(version="3")
async def repeater(ctx: Context, input: Message) -> str:
    """Says who it is and what it was told."""
    return f"{ctx.definition.name}: {input.parts[0].text}"
