"""A fork's record with the time that the fork took itself: records count from where its origin began; keeps none."""

from google.protobuf import timestamp_pb2

from bough import AsyncClient
from bough.v1 import invocation_pb2


async def in_own_time(client: AsyncClient, invocation: invocation_pb2.Invocation) -> invocation_pb2.Invocation:
    """The record for a reader: of a fork, what was open where it was forked begins there. Raises CallFailed."""
    if not invocation.HasField("forked_from"):
        return invocation
    return counted_from(invocation, (await client.get_run(invocation.run_id)).create_time)


def counted_from(invocation: invocation_pb2.Invocation, forked: timestamp_pb2.Timestamp) -> invocation_pb2.Invocation:
    """A copy in which nothing that ended after a time began before it; what had ended by then stays as it was."""
    counted = invocation_pb2.Invocation()
    counted.CopyFrom(invocation)
    times = [(counted.start_time, counted.end_time), *((each.start_time, each.end_time) for each in counted.agents)]
    for start, end in times:
        if start.ToNanoseconds() < forked.ToNanoseconds() < end.ToNanoseconds():
            start.CopyFrom(forked)
    return counted
