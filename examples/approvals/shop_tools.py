"""The shop's tools and an agent in Python; each waits for somebody in its own way."""

from collections.abc import Mapping
from typing import Any

from bough_server import Context, ToolContext, agent, tool

DAY = 24 * 60 * 60
PRICES = {"1001": 40, "1002": 180}
REASONS = ["it is broken", "it does not fit", "it is not as described", "no reason"]


def is_large(arguments: Mapping[str, Any]) -> bool:
    """Whether a refund needs somebody's approval. It decides by the arguments alone, so it always decides the same."""
    return bool(arguments["amount"] > 100)


# Large refunds wait up to a week for an approval. One that was going when the server died is not simply paid again:
# somebody is asked, since nobody knows whether the bank had it.
@tool(approval=is_large, on_recovery="ask", answer_within=7 * DAY)
def refund(order_id: str, amount: float, ctx: ToolContext) -> str:
    """Pays an order back, all of it or a part.

    Args:
        order_id: The order, such as "1001".
        amount: How much, in EUR.
    """
    price = PRICES.get(order_id)
    if price is None:
        raise ValueError(f"there is no order {order_id!r}")
    if not 0 < amount <= price:
        raise ValueError(f"order {order_id} was {price} EUR, so {amount:g} EUR cannot be paid back")
    # A real bank takes this key, and pays a key once, however often it comes.
    return f"{amount:g} EUR are paid back for order {order_id}, receipt {ctx.idempotency_key[:8]}."


# The client knows this tool by its name and runs it; this function is only what models are told of it. It is never
# called, so it has no body.
@tool(execution="client", answer_within=DAY)
def read_card(reader: str) -> str:
    """Reads the customer's card, and gives its last four digits.

    Args:
        reader: Which card reader, such as "counter".
    """


@agent
async def interviewer(ctx: Context, input: str) -> str:
    """Asks the customer why articles come back."""
    reason = await ctx.ask(
        f"{input} May we ask why?", schema={"type": "string", "enum": REASONS}, expires=DAY, default="no reason"
    )
    return f"The customer says: {reason}."
