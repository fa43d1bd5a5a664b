"""EvalService: folds events of any source into agent trees, off the event loop."""

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
"""So many events or bytes are folded in a thread: one event of 8 MiB may have 300,000 parts."""

MAX_ITEMS: Final = 1_000_000
"""The most parts, labels and other list items in events sent by callers that are folded together.

An empty item takes two bytes on the wire, a thousand times as many in memory, and microseconds each time the record is
traversed.
"""

T = TypeVar("T")

MAX_EVENTS: Final = 1_000_000
MAX_BYTES: Final = 256 * 1024 * 1024
"""The most events and bytes that one call aggregates: everything that the record may need stays in memory meanwhile."""


class TreeBuilder:
    """A tree built from batches of events."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.count = self.size = 0
        """Events added so far, and their bytes."""
        self._items = 0

    async def add(self, events: Sequence[event_pb2.AgentEvent], *, size: int) -> None:
        """Add events sent by a caller, which have `size` bytes together. Raises InvalidRequest beyond MAX_ITEMS."""
        add = self._add_counted if size >= _LONG_SIZE else self._tree.add
        await self._add_batch(add, events, count=len(events), size=size)

    async def add_stored(self, page: Sequence[StoredEvent]) -> None:
        """Add a page of a stored log."""
        await self._add_batch(
            self._tree.add_stored, page, count=len(page), size=sum(len(stored.data) for stored in page)
        )

    async def invocation(self) -> invocation_pb2.Invocation:
        """Return the record of the events added so far."""
        if _is_long(self.count, self.size):
            return await asyncio.to_thread(self._tree.invocation)
        return self._tree.invocation()

    def _add_counted(self, event: event_pb2.AgentEvent) -> None:
        self._items += _items_of(event, MAX_ITEMS - self._items)
        if self._items > MAX_ITEMS:
            description = f"hold more than {MAX_ITEMS:,} items in their lists. Aggregate each run separately."
            raise InvalidRequest([FieldViolation(field="events", description=description)])
        self._tree.add(event)

    async def _add_batch(self, add: Callable[[T], None], items: Iterable[T], *, count: int, size: int) -> None:
        self.count, self.size = self.count + count, self.size + size
        if _is_long(count, size):
            await asyncio.to_thread(_add_all, add, items)
        else:
            _add_all(add, items)


def _items_of(message: Message, most: int) -> int:
    """Count the items of all lists of a message, nested ones included; stop as soon as the count exceeds `most`."""
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
    """Returns the aggregated agent trees of runs."""

    def __init__(self, *, runs: Runs, log: EventLog, principal: Callable[[], Principal]) -> None:
        self._runs, self._log, self._principal = runs, log, principal

    async def GetInvocation(
        self,
        request: pb.GetInvocationRequest,
        context: aio.ServicerContext[pb.GetInvocationRequest, pb.GetInvocationResponse],
    ) -> pb.GetInvocationResponse:
        """Return the record of a run, up to the end of its log or the requested sequence."""
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
        """Return the record of the events in the request, in the order of arrival."""
        return pb.AggregateEventsResponse(invocation=await (await _folded(request_iterator)).invocation())

    async def _read_tree(
        self, run: run_pb2.Run, through: int, options: invocation_pb2.InvocationOptions
    ) -> invocation_pb2.Invocation:
        """Fold a log page by page, so that only one page is in memory.

        Deltas are not read: a tree does not use them.
        """
        builder = TreeBuilder(Tree(options, run_id=run.run_id, session_id=run.session_id))
        after = 0
        while page := await self._log.read(run.run_id, after=after, through=through, deltas=False):
            await builder.add_stored(page)
            after = page[-1].sequence
        # A log that is deleted meanwhile reads as one that ends early. This raises NotFound then.
        await self._runs.get(self._principal(), run.run_id)
        invocation = await builder.invocation()
        invocation.as_of_sequence = through
        return invocation


async def _folded(requests: AsyncIterator[pb.AggregateEventsRequest]) -> TreeBuilder:
    """Fold a stream of events, one request at a time. Raises InvalidRequest if there are too many."""
    builder: TreeBuilder | None = None
    async for request in requests:
        builder = builder or TreeBuilder(Tree(request.options))
        size = request.ByteSize()
        if builder.count + len(request.events) > MAX_EVENTS or builder.size + size > MAX_BYTES:
            description = f"are more than {MAX_EVENTS:,} or {MAX_BYTES >> 20} MiB. Aggregate each run separately."
            raise InvalidRequest([FieldViolation(field="events", description=description)])
        await builder.add(request.events, size=size)
    return builder or TreeBuilder(Tree())
