"""Sums of Usage: tokens, calls, and cost in one currency. Absent is unknown and not zero; sums never overflow."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bough.v1 import usage_pb2

_COST: Final = "cost_nanos"
_CURRENCY: Final = "currency_code"
_CODE: Final = re.compile(r"[A-Z]{3}")
"""A currency code by ISO 4217."""
_SEVERAL: Final = "several"
_WITHOUT_COST: Final = "model_calls_without_cost"
_COUNTS: Final = ("model_calls", "model_calls_without_usage", _WITHOUT_COST, "tool_calls")
_LARGEST_COUNT: Final = 2**31 - 1
_LARGEST_NUMBER: Final = 2**63 - 1


@dataclass(slots=True)
class Sums:
    """Sums of usages, field by field.

    Costs in different currencies have no sum: as soon as a second currency is added, the cost is unknown and remains
    so, whatever is added later and in whatever order. That happens only to events of other systems, and to a run during
    which an operator changed the currency of the prices.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    """Each number of Usage that was reported, by the name of its field; those without a cost always."""
    currency: str = ""
    """The currency of the cost; empty if none is known."""

    @classmethod
    def of(cls, usage: usage_pb2.Usage) -> "Sums":
        """Return a usage as sums.

        A cost without a valid currency is unknown, and a currency without a cost says nothing.
        """
        numbers = {known.name: value for known, value in usage.ListFields() if known.name != _CURRENCY}
        currency = usage.currency_code
        if _COST in numbers and _CODE.fullmatch(currency):
            return cls(numbers, currency)
        for name in (_COST, _WITHOUT_COST):
            numbers.pop(name, None)
        if calls := numbers.get("model_calls"):
            numbers[_WITHOUT_COST] = calls
        return cls(numbers)

    @classmethod
    def of_attempt(cls, used: usage_pb2.Usage) -> "Sums":
        """Return one attempt of a model call as sums. It counts as one call; the usage's own counts are ignored."""
        sums = cls.of(used)
        for name in _COUNTS:
            sums.numbers.pop(name, None)
        sums.numbers["model_calls"] = 1
        if not is_reported(used):
            sums.numbers["model_calls_without_usage"] = 1
        if not sums.currency:
            sums.numbers[_WITHOUT_COST] = 1
        return sums

    def add(self, part: "Sums") -> None:
        """Add other sums in place."""
        for name, value in part.numbers.items():
            self.numbers[name] = self.numbers.get(name, 0) + value
        if part.currency and part.currency != self.currency:
            self.currency = _SEVERAL if self.currency else part.currency

    def copy(self) -> "Sums":
        """Return a copy that changes independently."""
        return Sums(dict(self.numbers), self.currency)

    def usage(self) -> usage_pb2.Usage:
        """Return the sums as a usage; a sum beyond its field is the largest that fits."""
        usage = usage_pb2.Usage()
        for name, value in self.numbers.items():
            largest = _LARGEST_COUNT if name in _COUNTS else _LARGEST_NUMBER
            setattr(usage, name, max(-largest, min(largest, value)))
        if self.currency == _SEVERAL:
            usage.ClearField(_COST)
        else:
            usage.currency_code = self.currency
        if not usage.HasField(_COST):
            usage.ClearField(_WITHOUT_COST)
        return usage


def count_tokens(usage: usage_pb2.Usage) -> int:
    """Return the input and output tokens of an attempt, as the ledger counts them: 0 if none were reported."""
    if usage.HasField("input_tokens") and usage.HasField("output_tokens"):
        return usage.input_tokens + usage.output_tokens
    return usage.total_tokens if usage.HasField("total_tokens") else usage.input_tokens + usage.output_tokens


MAX_TOKENS: Final = 10**9
"""The most tokens of a kind that an attempt can have used: more is a mistake of its provider, and would be charged."""

_TOKENS: Final = (
    *("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
    "total_tokens",
)


def bound_tokens(usage: usage_pb2.Usage) -> Mapping[str, int]:
    """Change numbers of tokens below 0 to 0 and above MAX_TOKENS to that; return what they were, by their fields."""
    wrong = {name: number for name in _TOKENS if not 0 <= (number := getattr(usage, name)) <= MAX_TOKENS}
    for name, number in wrong.items():
        setattr(usage, name, max(0, min(MAX_TOKENS, number)))
    return wrong


ONE_TOOL_CALL: Final = Sums({"tool_calls": 1})
"""The usage of a started tool call."""


def has_whole_cost(usage: usage_pb2.Usage) -> bool:
    """Return whether the cost of every model call is known; it is if there was none."""
    if not usage.model_calls:
        return True
    return usage.HasField(_COST) and not (usage.model_calls_without_cost or usage.model_calls_without_usage)


def is_reported(usage: usage_pb2.Usage) -> bool:
    """Return whether the provider reported usage: at least one number of tokens is known."""
    return any(usage.HasField(name) for name in ("input_tokens", "output_tokens", "total_tokens"))
