"""Sums of usage in a fold: absent is unknown and not zero, and no number that anybody sends makes them overflow."""

from typing import Final, TypeAlias

from bough.v1 import message_pb2
from bough_server.usage import is_reported

Sums: TypeAlias = dict[str, int]
"""Field of Usage to its sum; a field that nobody reported is not in it."""

_COUNTS: Final = ("model_calls", "model_calls_without_usage", "tool_calls")
_LARGEST_COUNT: Final = 2**31 - 1
_LARGEST_NUMBER: Final = 2**63 - 1


def sums_of(usage: message_pb2.Usage) -> Sums:
    """A usage as sums."""
    return {field.name: value for field, value in usage.ListFields()}


def add(total: Sums, part: Sums) -> None:
    """Adds `part` to `total` in place."""
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


def add_attempt(total: Sums, used: message_pb2.Usage) -> None:
    """Adds one attempt of a model call, which is counted here and not by what it says itself."""
    for field, value in used.ListFields():
        if field.name not in _COUNTS:
            total[field.name] = total.get(field.name, 0) + value
    total["model_calls"] = total.get("model_calls", 0) + 1
    if not is_reported(used):
        total["model_calls_without_usage"] = total.get("model_calls_without_usage", 0) + 1


def usage_of(sums: Sums) -> message_pb2.Usage:
    """Sums as a usage; a sum beyond its field is the largest that fits."""
    usage = message_pb2.Usage()
    for name, value in sums.items():
        largest = _LARGEST_COUNT if name in _COUNTS else _LARGEST_NUMBER
        setattr(usage, name, max(-largest, min(largest, value)))
    return usage
