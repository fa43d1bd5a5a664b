"""Python code that the teams name: a tool, an agent, and two functions that control a loop."""

from bough_server import Context, Message, Snapshot, agent, condition, input_builder, text_of, tool

FREE = {"tonight": [12, 14], "tomorrow": [12]}
LONGEST = 24


@tool
def free_rooms(night: str) -> str:
    """Look up which rooms are free.

    Args:
        night: Which night, such as "tonight".
    """
    rooms = FREE.get(night.casefold(), [])
    return f"Free {night}: {', '.join(map(str, rooms)) or 'none'}."


# Effects through the context are recorded, shown in the tree, and replayed. Change `version` whenever the effects or
# their order change: open runs are then not continued with code that would diverge from their logs.
@agent(version="1")
async def majority(ctx: Context, input: Message) -> str:
    """Asks all linked agents at once and goes with the majority."""

    async def ask(ctx: Context, juror: str) -> str:
        return text_of(await ctx.dispatch(juror, input))

    # Each has a context for itself, so none sees what the others say. The votes come in the order of the links.
    votes = await ctx.map(ask, [link.agent for link in ctx.definition.sub_agents])
    yes = sum(vote.casefold().startswith("yes") for vote in votes)
    return f"{'Yes' if 2 * yes > len(votes) else 'No'}, by {yes} votes to {len(votes) - yes}."


# Conditions and input builders must be pure, because a replay calls them again: they only read the recorded snapshot.
@condition
def fits_the_sign(snapshot: Snapshot) -> bool:
    """Return whether the last slogan is short enough."""
    return len(snapshot.state["slogan"]) <= LONGEST


@input_builder
def brief(snapshot: Snapshot) -> str:
    """What the copywriter is told: the order, and from the second iteration on what was wrong with the last slogan."""
    order = text_of(snapshot.input)
    last = snapshot.state.get("slogan", "")
    if len(last) <= LONGEST:
        return f"A slogan for {order}"
    return f"{last!r} has {len(last)} letters and may have {LONGEST}. Write a shorter slogan for {order}"
