"""Anybody's events as the messages that AggregateEvents takes; what they make is the server's to say."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable

from bough.v1 import eval_service_pb2, event_pb2, invocation_pb2

_EVENTS_PER_MESSAGE = 256
_BYTES_PER_MESSAGE = 1024 * 1024


async def aggregate_messages(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
    options: invocation_pb2.InvocationOptions | None,
) -> AsyncGenerator[eval_service_pb2.AggregateEventsRequest, None]:
    """The events in messages of a bounded size, at least one of them; the options are in the first."""
    message = eval_service_pb2.AggregateEventsRequest(options=options)
    size = 0
    async for event in _each(events):
        length = event.ByteSize()
        if message.events and (len(message.events) == _EVENTS_PER_MESSAGE or size + length > _BYTES_PER_MESSAGE):
            yield message
            message, size = eval_service_pb2.AggregateEventsRequest(), 0
        message.events.append(event)
        size += length
    yield message


async def _each(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
) -> AsyncIterator[event_pb2.AgentEvent]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event
