"""EvalService: folds events of any source into trees, off the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message
from grpc import aio

from bough.v1 import eval_service_pb2 as pb
from bough.v1 import eval_service_pb2_grpc, event_pb2, invocation_pb2, run_pb2
from bough_server.errors import FieldViolation, InvalidRequest, SequenceOutOfRange
from bough_server.runs.runs import Runs
from bough_server.store.ports import EventLog, Principal, StoredEvent
from bough_server.tree.fold import Tree

_LONG_COUNT: Final = 1_000
_LONG_SIZE: Final = 16 * 1024
"""From so many events, or so many bytes of them, on: one event of 8 MiB may have 300,000 parts to look at."""

MAX_ITEMS: Final = 1_000_000
"""The most parts, labels and other items of lists in anybody's events that are folded together: an empty one takes two
bytes, and a thousand times as many in memory and some microseconds whenever the record is looked through."""

T = TypeVar("T")

MAX_EVENTS: Final = 1_000_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""The most that one call aggregates: what its record may need is kept in memory while it comes."""


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


class EvalService(eval_service_pb2_grpc.EvalServiceServicer):
    """Gives the aggregated agent tree of runs."""

    def __init__(self, *, runs: Runs, log: EventLog, principal: Callable[[], Principal]) -> None:
        self._runs, self._log, self._principal = runs, log, principal

    async def GetInvocation(
        self,
        request: pb.GetInvocationRequest,
        context: aio.ServicerContext[pb.GetInvocationRequest, pb.GetInvocationResponse],
    ) -> pb.GetInvocationResponse:
        """Gives the record of a run, as far as its log goes or as was asked."""
        run = (await self._runs.get(self._principal(), request.run_id)).run
        if request.as_of_sequence > run.last_sequence:
            raise SequenceOutOfRange(
                f"The log of run {run.run_id!r} ends at {run.last_sequence} so far.",
                details={"last_sequence": str(run.last_sequence)},
            )
        through = request.as_of_sequence or run.last_sequence
        return pb.GetInvocationResponse(invocation=await self._read_tree(run, through, request.options))

    async def AggregateEvents(
        self,
        request_iterator: AsyncIterator[pb.AggregateEventsRequest],
        context: aio.ServicerContext[pb.AggregateEventsRequest, pb.AggregateEventsResponse],
    ) -> pb.AggregateEventsResponse:
        """Makes the record of the events that are sent, in the order of arrival."""
        return pb.AggregateEventsResponse(invocation=await (await _folded(request_iterator)).invocation())

    async def _read_tree(
        self, run: run_pb2.Run, through: int, options: invocation_pb2.InvocationOptions
    ) -> invocation_pb2.Invocation:
        """Folds a log page by page, so that no more than a page of it is in memory. Deltas tell a tree nothing."""
        folding = Folding(Tree(options, run_id=run.run_id, session_id=run.session_id))
        after = 0
        while page := await self._log.read(run.run_id, after=after, through=through, deltas=False):
            await folding.take_stored(page)
            after = page[-1].sequence
        # A log that was deleted meanwhile reads as one that ends: then there is no run any more, and this says so.
        await self._runs.get(self._principal(), run.run_id)
        invocation = await folding.invocation()
        invocation.as_of_sequence = through
        return invocation


async def _folded(requests: AsyncIterator[pb.AggregateEventsRequest]) -> Folding:
    """The fold of a stream of events; no request outlives its turn. Raises InvalidRequest where they are too many."""
    folding: Folding | None = None
    async for request in requests:
        folding = folding or Folding(Tree(request.options))
        size = request.ByteSize()
        if folding.count + len(request.events) > MAX_EVENTS or folding.size + size > MAX_BYTES:
            said = f"are more than {MAX_EVENTS:,} or {MAX_BYTES >> 20} MiB. Aggregate each run by itself."
            raise InvalidRequest([FieldViolation(field="events", description=said)])
        await folding.take(request.events, size=size)
    return folding or Folding(Tree())
