"""Two records for comparison: side by side where there is room, else one below the other; it finds no differences."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final

from rich.text import Text

from bough.v1 import invocation_pb2
from bough_server.cli.render.tree import narrowest_tree, tree_lines

_BETWEEN: Final = " │ "

Titled = tuple[str, invocation_pb2.Invocation]


def trees_beside(left: Titled, right: Titled, *, width: int) -> list[Text]:
    """Both trees, each under its title, in lines of at most that many cells where a tree's own columns fit."""
    half = (width - len(_BETWEEN)) // 2
    if half < max(narrowest_tree(left[1]), narrowest_tree(right[1])):
        return [*_titled(left, width), Text(""), *_titled(right, width)]
    return [_joined(one, other, half) for one, other in zip_longest(_titled(left, half), _titled(right, half))]


def _titled(titled: Titled, width: int) -> Sequence[Text]:
    title, invocation = titled
    return [Text(title, style="bold"), *tree_lines(invocation, width=width)]


def _joined(left: Text | None, right: Text | None, half: int) -> Text:
    line = left.copy() if left is not None else Text("")
    line.truncate(half, overflow="ellipsis", pad=True)
    line.append(_BETWEEN, style="dim")
    return line.append_text(right) if right is not None else line
