"""Sums of Usage, as messages and as mappings. Absent is unknown and not zero; sums never overflow their fields."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from bough.v1 import message_pb2

Sums: TypeAlias = dict[str, int]
"""Field of Usage to its sum; a field that nobody reported is not in it."""

ONE_TOOL_CALL: Final[Mapping[str, int]] = MappingProxyType({"tool_calls": 1})
"""A tool call that started, as sums."""

_COUNTS: Final = ("model_calls", "model_calls_without_usage", "tool_calls")
_LARGEST_COUNT: Final = 2**31 - 1
_LARGEST_NUMBER: Final = 2**63 - 1


def add(total: message_pb2.Usage, part: message_pb2.Usage) -> None:
    """Adds `part` to `total` in place; a number that neither knows stays absent."""
    for field, value in part.ListFields():
        setattr(total, field.name, getattr(total, field.name) + value)


def summed(parts: Iterable[message_pb2.Usage]) -> message_pb2.Usage:
    """The sum of usages; each number covers the parts that know it."""
    total = message_pb2.Usage()
    for part in parts:
        add(total, part)
    return total


def is_reported(usage: message_pb2.Usage) -> bool:
    """Whether a provider said anything: some number of tokens is known."""
    return any(usage.HasField(name) for name in ("input_tokens", "output_tokens", "total_tokens"))


def sums_of(usage: message_pb2.Usage) -> Sums:
    """A usage as sums."""
    return {field.name: value for field, value in usage.ListFields()}


def add_sums(total: Sums, part: Mapping[str, int]) -> None:
    """Adds `part` to `total` in place."""
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


def sums_of_attempt(used: message_pb2.Usage) -> Sums:
    """One attempt of a model call as sums; it is counted here and not by what it says itself."""
    sums = {field.name: value for field, value in used.ListFields() if field.name not in _COUNTS}
    sums["model_calls"] = 1
    if not is_reported(used):
        sums["model_calls_without_usage"] = 1
    return sums


def usage_of(sums: Sums) -> message_pb2.Usage:
    """Sums as a usage; a sum beyond its field is the largest that fits."""
    usage = message_pb2.Usage()
    for name, value in sums.items():
        largest = _LARGEST_COUNT if name in _COUNTS else _LARGEST_NUMBER
        setattr(usage, name, max(-largest, min(largest, value)))
    return usage
