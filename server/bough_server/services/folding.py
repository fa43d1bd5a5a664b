"""Folding without holding up the server: what is long is folded in a thread; what a tree is belongs to tree.py."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from bough.v1 import event_pb2, invocation_pb2
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.store.ports import StoredEvent
from bough_server.tree import Tree

_LONG_COUNT: Final = 1_000
_LONG_SIZE: Final = 16 * 1024
"""From so many events, or so many bytes of them, on: one event of 8 MiB may have 300,000 parts to look at."""

MAX_ITEMS: Final = 1_000_000
"""The most parts, labels and other items of lists in anybody's events that are folded together: an empty one takes two
bytes, and a thousand times as many in memory and some microseconds whenever the record is looked through."""

T = TypeVar("T")


class Folding:
    """A tree that takes in its events bit by bit."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.count = self.size = 0
        """How many events it has taken in, and how many bytes they are."""
        self._items = 0

    async def take(self, events: Sequence[event_pb2.AgentEvent], *, size: int) -> None:
        """Takes in some of anybody's events, which are that many bytes. Raises InvalidRequest beyond MAX_ITEMS."""
        add = self._add_counted if size >= _LONG_SIZE else self._tree.add
        await self._take(add, events, count=len(events), size=size)

    async def take_stored(self, page: Sequence[StoredEvent]) -> None:
        """Takes in a page of a log of our own."""
        await self._take(self._tree.add_stored, page, count=len(page), size=sum(len(stored.data) for stored in page))

    async def invocation(self) -> invocation_pb2.Invocation:
        """The record of what it has taken in."""
        if _is_long(self.count, self.size):
            return await asyncio.to_thread(self._tree.invocation)
        return self._tree.invocation()

    def _add_counted(self, event: event_pb2.AgentEvent) -> None:
        self._items += _items_of(event, MAX_ITEMS - self._items)
        if self._items > MAX_ITEMS:
            said = f"hold more than {MAX_ITEMS:,} items in their lists. Aggregate each run by itself."
            raise InvalidRequest([FieldViolation(field="events", description=said)])
        self._tree.add(event)

    async def _take(self, add: Callable[[T], None], items: Iterable[T], *, count: int, size: int) -> None:
        self.count, self.size = self.count + count, self.size + size
        if _is_long(count, size):
            await asyncio.to_thread(_add_all, add, items)
        else:
            _add_all(add, items)


def _items_of(message: Message, most: int) -> int:
    """How many items all lists of a message have, those of its items too; counted no further than beyond `most`."""
    count = 0
    waiting = [message]
    while waiting and count <= most:
        for field, value in waiting.pop().ListFields():
            if not field.is_repeated:
                if field.message_type is not None:
                    waiting.append(value)
                continue
            count += len(value)
            if count > most:
                break
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                waiting.extend(value)
    return count


def _is_long(count: int, size: int) -> bool:
    return count >= _LONG_COUNT or size >= _LONG_SIZE


def _add_all(add: Callable[[T], None], items: Iterable[T]) -> None:
    for item in items:
        add(item)
