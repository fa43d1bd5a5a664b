"""The shop's tools and an agent in Python; each waits for a person in a different way."""

from collections.abc import Mapping
from typing import Any

from bough_server import Context, ToolContext, agent, tool

DAY = 24 * 60 * 60
PRICES = {"1001": 40, "1002": 180}
REASONS = ["it is broken", "it does not fit", "it is not as described", "no reason"]


def is_large(arguments: Mapping[str, Any]) -> bool:
    """Return whether a refund needs an approval. Depends on the arguments alone, so a replay decides the same."""
    return bool(arguments["amount"] > 100)


# Large refunds wait up to a week for an approval. A refund in progress when the server crashed is not run again without
# asking a user first, because it is unknown whether the bank received it.
@tool(approval=is_large, on_recovery="ask", answer_within=7 * DAY)
def refund(order_id: str, amount: float, ctx: ToolContext) -> str:
    """Pay an order back, all of it or a part.

    Args:
        order_id: The order, such as "1001".
        amount: How much, in EUR.
    """
    price = PRICES.get(order_id)
    if price is None:
        raise ValueError(f"there is no order {order_id!r}")
    if not 0 < amount <= price:
        raise ValueError(f"order {order_id} was {price} EUR, so {amount:g} EUR cannot be paid back")
    # A real bank would accept this key and pay once for each key, however often the request is repeated.
    return f"{amount:g} EUR are paid back for order {order_id}, receipt {ctx.idempotency_key[:8]}."


# The client runs this tool, which it knows by its name; the function only declares it to models. It is never called, so
# it has no body.
@tool(execution="client", answer_within=DAY)
def read_card(reader: str) -> str:
    """Read the customer's card and return its last four digits.

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
