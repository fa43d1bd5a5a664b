"""Graphs whose functions do nothing, by name: what the visits of a graph cost beside those of a peer."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

Edges = tuple[tuple[str, str], ...]

WIDTH: Final = 100
LOOPS: Final = 1_000


def names(count: int) -> tuple[str, ...]:
    """Names of nodes, in their order."""
    return tuple(f"n{number:04}" for number in range(count))


def chain() -> Edges:
    """Nodes one after another."""
    nodes = ("START", *names(WIDTH), "END")
    return tuple(pairwise(nodes))


def fan_out() -> Edges:
    """Nodes at the same time, and one that waits for all of them."""
    each = [(("START", name), (name, "join")) for name in names(WIDTH)]
    return (*(edge for pair in each for edge in pair), ("join", "END"))


VISITS: Final[Mapping[str, int]] = {
    "chain of 100": WIDTH,
    "fan-out of 100": WIDTH + 1,
    "loop of 1,000": LOOPS,
    "DAG of 100": WIDTH,
}
"""How many visits each graph makes. The DAG is the chain: langgraph runs it in supersteps too."""
