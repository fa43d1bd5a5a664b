"""The order of a forest that parent links make; what its nodes are is none of its business, and it never recurses."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Ids in preorder, with the links that the order follows."""

    order: tuple[str, ...]
    depths: Mapping[str, int]
    parents: Mapping[str, str]
    """Child to parent, of the links that are followed: not to a parent that is not there, and not around a cycle."""
    missing: frozenset[str]
    """Ids whose parent is named and not there; they are roots."""
    cyclic: frozenset[str]
    """Ids whose chain of parents leads back to them; they are roots as well, and the last ones."""

    def child_counts(self) -> Mapping[str, int]:
        """How many children each id has that has any."""
        counts: dict[str, int] = {}
        for parent in self.parents.values():
            counts[parent] = counts.get(parent, 0) + 1
        return counts


def arrange(parents: Mapping[str, str], *, first: str = "") -> Forest:
    """The forest of ids, given by first appearance, each with its parent or an empty text.

    Roots are `first`, where it is one, then by first appearance; children are by first appearance. Every id is in the
    order exactly once, whatever the links are.
    """
    missing = frozenset(one for one, parent in parents.items() if parent and parent not in parents)
    cyclic = _cyclic(parents)
    followed = {one: parent for one, parent in parents.items() if parent and one not in missing and one not in cyclic}
    children: dict[str, list[str]] = {}
    for one, parent in followed.items():
        children.setdefault(parent, []).append(one)
    roots = [one for one in parents if one not in followed and one not in cyclic]
    roots.sort(key=lambda one: one != first)
    roots.extend(one for one in parents if one in cyclic)
    depths = _depths_in_preorder(roots, children)
    return Forest(order=tuple(depths), depths=depths, parents=followed, missing=missing, cyclic=cyclic)


def _depths_in_preorder(roots: list[str], children: Mapping[str, list[str]]) -> dict[str, int]:
    depths: dict[str, int] = {}
    ahead = [(one, 0) for one in reversed(roots)]
    while ahead:
        one, depth = ahead.pop()
        depths[one] = depth
        ahead.extend((child, depth + 1) for child in reversed(children.get(one, ())))
    return depths


def _cyclic(parents: Mapping[str, str]) -> frozenset[str]:
    """The ids on cycles, in linear time: each id has one parent at most, so each walk up meets one cycle at most."""
    walk_of: dict[str, int] = {}
    found: set[str] = set()
    for number, start in enumerate(parents):
        one = start
        while one in parents and one not in walk_of:
            walk_of[one] = number
            one = parents[one]
        if walk_of.get(one) == number:
            member = one
            while member not in found:
                found.add(member)
                member = parents[member]
    return frozenset(found)
