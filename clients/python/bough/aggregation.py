"""Requests of AggregateEvents: events from any source, split into messages of bounded size."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator

from bough.arguments import build
from bough.v1 import eval_service_pb2, event_pb2, invocation_pb2

_EVENTS_PER_MESSAGE = 256
_BYTES_PER_MESSAGE = 1024 * 1024


class _Packing:
    """Packs events into messages of bounded size; `message` is the last one, which still has room."""

    def __init__(self, options: invocation_pb2.InvocationOptions | None) -> None:
        self.message = build(eval_service_pb2.AggregateEventsRequest, options=options)
        self._size = 0

    def add(self, event: event_pb2.AgentEvent) -> eval_service_pb2.AggregateEventsRequest | None:
        """Add an event. Return the message before it if that one has no room for the event, else None."""
        length = event.ByteSize()
        full = None
        count = len(self.message.events)
        if count and (count == _EVENTS_PER_MESSAGE or self._size + length > _BYTES_PER_MESSAGE):
            full, self.message, self._size = self.message, eval_service_pb2.AggregateEventsRequest(), 0
        self.message.events.append(event)
        self._size += length
        return full


async def aggregate_messages(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
    options: invocation_pb2.InvocationOptions | None,
) -> AsyncGenerator[eval_service_pb2.AggregateEventsRequest, None]:
    """Yield at least one message; the first has the options."""
    packing = _Packing(options)
    async for event in _iterate(events):
        if full := packing.add(event):
            yield full
    yield packing.message


def sync_aggregate_messages(
    events: Iterable[event_pb2.AgentEvent], options: invocation_pb2.InvocationOptions | None
) -> Iterator[eval_service_pb2.AggregateEventsRequest]:
    """Yield the messages of `aggregate_messages`, for programs without an event loop."""
    packing = _Packing(options)
    for event in events:
        if full := packing.add(event):
            yield full
    yield packing.message


async def _iterate(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
) -> AsyncIterator[event_pb2.AgentEvent]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event
