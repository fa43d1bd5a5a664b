"""Folding without holding up the server: what is long is folded in a thread; what a tree is belongs to tree.py."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from bough.v1 import event_pb2, invocation_pb2
from bough_server.store.ports import StoredEvent
from bough_server.tree import Tree

_LONG_COUNT: Final = 1_000
_LONG_SIZE: Final = 16 * 1024
"""From so many events, or so many bytes of them, on: one event of 8 MiB may have 300,000 parts to look at."""

T = TypeVar("T")


class Folding:
    """A tree that takes in its events bit by bit."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.count = self.size = 0
        """How many events it has taken in, and how many bytes they are."""

    async def take(self, events: Sequence[event_pb2.AgentEvent], *, size: int) -> None:
        """Takes in some of anybody's events, which are that many bytes."""
        await self._take(self._tree.add, events, count=len(events), size=size)

    async def take_stored(self, page: Sequence[StoredEvent]) -> None:
        """Takes in a page of a log of our own."""
        await self._take(self._tree.add_stored, page, count=len(page), size=sum(len(stored.data) for stored in page))

    async def invocation(self) -> invocation_pb2.Invocation:
        """The record of what it has taken in."""
        if _is_long(self.count, self.size):
            return await asyncio.to_thread(self._tree.invocation)
        return self._tree.invocation()

    async def _take(self, add: Callable[[T], None], items: Iterable[T], *, count: int, size: int) -> None:
        self.count, self.size = self.count + count, self.size + size
        if _is_long(count, size):
            await asyncio.to_thread(_add_all, add, items)
        else:
            _add_all(add, items)


def _is_long(count: int, size: int) -> bool:
    return count >= _LONG_COUNT or size >= _LONG_SIZE


def _add_all(add: Callable[[T], None], items: Iterable[T]) -> None:
    for item in items:
        add(item)
