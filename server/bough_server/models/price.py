"""What a usage costs at a price, in whole millionths of the currency; sums of usages are not its concern."""

from fractions import Fraction
from typing import Final

from bough.v1 import message_pb2
from bough_server.models.model import Price

_PER_MILLION: Final = 1_000_000


def cost(usage: message_pb2.Usage, price: Price) -> int | None:
    """The cost in micros, half rounded up; None where the tokens of a direction are unknown.

    Cached input tokens cost `cached_input` where the price has one, and as much as any other where it has not.
    """
    if not usage.HasField("input_tokens") or not usage.HasField("output_tokens"):
        return None
    cached = min(usage.cached_input_tokens, usage.input_tokens) if price.cached_input is not None else 0
    exact = (
        (usage.input_tokens - cached) * _exact(price.input)
        + cached * _exact(price.cached_input or 0.0)
        + usage.output_tokens * _exact(price.output)
    ) / _PER_MILLION
    return int(exact + Fraction(1, 2))


def _exact(price: float) -> Fraction:
    """The price as it was written: 0.1 is a tenth, not the nearest binary fraction."""
    return Fraction(repr(price))
