"""Times in a record of anybody's events that JSON cannot say: they are left out and named; pure."""

from collections.abc import Iterator
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import invocation_pb2

ANOMALY: Final = "Some times are outside of the years 1 to 9999, or are no times; they are left out."


def leave_out_impossible_times(record: invocation_pb2.Invocation) -> None:
    """Clears what is no time of a record, in place, and says so in its anomalies."""
    found = False
    for message in _messages(record):
        for field, value in message.ListFields():
            if isinstance(value, Timestamp | Duration) and not _is_possible(value):
                message.ClearField(field.name)
                found = True
    if found:
        record.anomalies.append(ANOMALY)


def _messages(record: Message) -> Iterator[Message]:
    """A message and all that it holds but times; there may be hundreds of thousands, so no list is made of them."""
    ahead: list[Iterator[Message]] = [iter((record,))]
    while ahead:
        message = next(ahead[-1], None)
        if message is None:
            ahead.pop()
            continue
        yield message
        for field, value in message.ListFields():
            if field.message_type is None or field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                ahead.append(iter(value))
            elif not isinstance(value, Timestamp | Duration):
                ahead.append(iter((value,)))


def _is_possible(value: Timestamp | Duration) -> bool:
    try:
        value.ToJsonString()
    except ValueError:
        return False
    return True
