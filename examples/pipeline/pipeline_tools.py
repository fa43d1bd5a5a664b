"""Code of the pipeline: agents that check a reading and book it, and what the reader is asked."""

from bough_server import Context, RunError, Snapshot, agent, input_builder, text_of


@agent(version="1")
async def checker(ctx: Context, input: str) -> str:
    """Checks that the items of the invoice come to its total."""
    invoice = ctx.state["invoice"]
    items = round(sum(item["amount"] for item in invoice["items"]), 2)
    problem = "" if items == invoice["total"] else f"The items come to {items:g}, the total is {invoice['total']:g}."
    ctx.state["problem"], ctx.state["is_right"] = problem, not problem
    return problem or "The sums are right."


@agent(version="1")
async def book(ctx: Context, input: str) -> str:
    """Books the invoice that was read, if it is right."""
    if not ctx.state["is_right"]:
        raise RunError(f"The invoice could not be read. {ctx.state['problem']}")
    invoice = ctx.state["invoice"]
    return f"Booked {invoice['number']}: {len(invoice['items'])} items, {invoice['total']:.2f} EUR."


# Pure: it is called again by a replay, and reads only the recorded snapshot.
@input_builder
def ask_for_fields(snapshot: Snapshot) -> str:
    """The invoice, and from the second iteration on what was wrong with the last reading."""
    invoice = text_of(snapshot.user)
    problem = snapshot.state.get("problem", "")
    return f"{invoice}\n\nRead it again. {problem}" if problem else invoice
