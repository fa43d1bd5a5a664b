"""Times in a record of anybody's events that JSON cannot say: they are left out and named; pure."""

from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import invocation_pb2

ANOMALY: Final = "Some times are outside of the years 1 to 9999, or are no times; they are left out."


def leave_out_impossible_times(record: invocation_pb2.Invocation) -> None:
    """Clears what is no time of a record, in place, and says so in its anomalies."""
    found = False
    pending: list[Message] = [record]
    while pending:
        message = pending.pop()
        for field, value in message.ListFields():
            if isinstance(value, Timestamp | Duration):
                if not _is_possible(value):
                    message.ClearField(field.name)
                    found = True
            elif isinstance(value, Message):
                pending.append(value)
            elif field.is_repeated and field.message_type is not None and not field.message_type.GetOptions().map_entry:
                pending.extend(value)
    if found:
        record.anomalies.append(ANOMALY)


def _is_possible(value: Timestamp | Duration) -> bool:
    try:
        value.ToJsonString()
    except ValueError:
        return False
    return True
