"""Who runs one another in turn: the circles of a graph, each node and link looked at a fixed number of times."""

from collections.abc import Collection, Mapping


def circles(runs: Mapping[str, Collection[str]]) -> dict[str, str]:
    """For each name one that it runs in circles with, the same for all of a circle; a name in none has its own.

    `runs` says whom each name runs; who is named there alone runs nobody. Kosaraju's two walks, without recursion.
    """
    run_by: dict[str, list[str]] = {}
    for name, others in runs.items():
        for other in others:
            run_by.setdefault(other, []).append(name)
    first: dict[str, str] = {}
    for root in reversed(_by_end(runs)):
        if root not in first:
            _mark(root, run_by, first)
    return first


def _by_end(runs: Mapping[str, Collection[str]]) -> list[str]:
    """All names in the order in which a walk in depth leaves them."""
    ended: list[str] = []
    seen: set[str] = set()
    for root in runs:
        path = [("", iter((root,)))]
        while path:
            name, others = path[-1]
            following = next(others, None)
            if following is None:
                ended.append(name)
                path.pop()
            elif following not in seen:
                seen.add(following)
                path.append((following, iter(runs.get(following, ()))))
        ended.pop()  # where the walk began is nobody
    return ended


def _mark(root: str, run_by: Mapping[str, Collection[str]], first: dict[str, str]) -> None:
    """Marks all that reach the root and are in no circle yet as its circle."""
    pending = [root]
    while pending:
        name = pending.pop()
        if name not in first:
            first[name] = root
            pending.extend(run_by.get(name, ()))
