"""What model calls may take of bounds of tokens and cost: reserved before they go out, then what was reported.

What a call is going to take is an estimate; what nobody reported of it counts as much as it had reserved.
"""

from dataclasses import dataclass

from bough.v1 import message_pb2
from bough_server import usage
from bough_server.models.model import Model, ModelRequest, cost_of
from bough_server.models.tokens import request_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Tokens of input and output, and what they cost, in millionths of the prices' currency."""

    tokens: int = 0
    cost_micros: int = 0


class Purse:
    """One bound of one subtree, what has been spent of it and what is reserved; without a limit it only counts."""

    __slots__ = ("limit", "reserved", "spent")

    def __init__(self, limit: int | None) -> None:
        self.limit, self.spent, self.reserved = limit, 0, 0

    def lacks(self, amount: int) -> bool:
        """Whether so much is not left."""
        return self.limit is not None and self.spent + self.reserved + amount > self.limit

    def refusal(self, unit: str, amount: int) -> tuple[str, str]:
        """The limit in words, and why it has no room for so much."""
        left = max(0, (self.limit or 0) - self.spent - self.reserved)
        return f"{self.limit} {unit}", f": {left} are left, and the call may take {amount}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Purses:
    """Both bounds of one subtree."""

    tokens: Purse
    cost_micros: Purse

    @property
    def is_bounded(self) -> bool:
        """Whether one of them has a limit."""
        return self.tokens.limit is not None or self.cost_micros.limit is not None

    def lacking(self, amount: Amount) -> tuple[str, str] | None:
        """The bound that has no room for an amount, and why, in words; None where there is room."""
        if self.tokens.lacks(amount.tokens):
            return self.tokens.refusal("tokens", amount.tokens)
        if self.cost_micros.lacks(amount.cost_micros):
            return self.cost_micros.refusal("millionths of cost", amount.cost_micros)
        return None

    def reserve(self, amount: Amount) -> None:
        """Takes an amount until it is released."""
        self.tokens.reserved += amount.tokens
        self.cost_micros.reserved += amount.cost_micros

    def release(self, amount: Amount) -> None:
        """Gives back what was reserved."""
        self.tokens.reserved -= amount.tokens
        self.cost_micros.reserved -= amount.cost_micros

    def spend(self, amount: Amount) -> None:
        """Takes an amount for good."""
        self.tokens.spent += amount.tokens
        self.cost_micros.spent += amount.cost_micros


def estimated(request: ModelRequest, model: Model) -> Amount:
    """What a call is going to take: its request, and the most that it may write where its settings say that."""
    sent = request_tokens(request)
    written = request.settings.max_output_tokens
    rates = model.price
    used = message_pb2.Usage(input_tokens=sent, output_tokens=written)
    cost = cost_of(used, rates) if rates is not None else 0
    return Amount(tokens=sent + written, cost_micros=cost or 0)


def reported(used: message_pb2.Usage, *, unknown: Amount) -> Amount:
    """What an attempt took; of what its provider did not say, `unknown`."""
    if not usage.is_reported(used):
        return unknown
    is_whole = used.HasField("input_tokens") and used.HasField("output_tokens")
    tokens = used.input_tokens + used.output_tokens
    cost = unknown.cost_micros
    if used.HasField("cost_micros"):
        cost = used.cost_micros
    elif is_whole:
        cost = 0  # the model has no price
    return Amount(tokens=tokens if is_whole else max(tokens, used.total_tokens), cost_micros=cost)
