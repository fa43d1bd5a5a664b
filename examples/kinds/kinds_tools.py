"""A tool, and an agent that is Python code: what it does through its context is recorded, shown and replayed."""

from bough.v1 import message_pb2
from bough_server import Context, agent, tool

FREE = {"tonight": [12, 14], "tomorrow": [12]}
JURORS = ["farmer", "baker", "teacher"]


@tool
def free_rooms(night: str) -> str:
    """Looks up which rooms are free.

    Args:
        night: Which night, such as "tonight".
    """
    rooms = FREE.get(night.casefold(), [])
    return f"Free {night}: {', '.join(map(str, rooms)) or 'none'}."


# `version` changes when what it does in which order does: a run that was going is then not continued by other code.
@agent(agents=JURORS, version="1")
async def jury(ctx: Context, input: message_pb2.Message) -> str:
    """Asks three jurors at once and goes with the majority."""

    async def ask(lane: Context, juror: str) -> str:
        vote = await lane.dispatch(juror, input)
        return "".join(part.text for part in vote.parts)

    # Three lanes: none hears the others, and the votes come in this order, whoever was first.
    votes = await ctx.gather(*(lambda lane, name=name: ask(lane, name) for name in JURORS))  # type: ignore[misc]
    yes = sum(vote.casefold().startswith("yes") for vote in votes)
    return f"{'Yes' if 2 * yes > len(votes) else 'No'}, by {yes} votes to {len(votes) - yes}."
