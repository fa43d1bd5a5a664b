"""Sums of usages, for tests that compare them with those that a run reports."""

from collections.abc import Iterable

from bough.v1 import usage_pb2
from bough_server.log.usage import Sums


def summed(parts: Iterable[usage_pb2.Usage]) -> usage_pb2.Usage:
    """Return the sum of usages; each number covers the parts that know it."""
    total = Sums()
    for part in parts:
        total.add(Sums.of(part))
    return total.usage()
