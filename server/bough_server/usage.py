"""Sums of Usage, in which absent is unknown and not zero; it knows no prices."""

from collections.abc import Iterable

from bough.v1 import message_pb2


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
