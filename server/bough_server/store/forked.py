"""What a fork takes over from its origin's beginning, but for what it says itself; pure."""

from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp

from bough.v1 import event_pb2, message_pb2
from bough_server.store.derived import RunStart
from bough_server.store.ports import StoredMessage


def of_fork(origin: RunStart, forked: event_pb2.RunForked) -> RunStart:
    """What a fork's row takes from its beginning: its origin's, but for what it says itself."""
    revisions = (*origin.revisions, *(named.revision for named in forked.definitions))
    return RunStart(
        agent=origin.agent,
        labels=dict(forked.labels) or origin.labels,
        start_time_ns=origin.start_time_ns,
        request_id=forked.request_id,
        request_digest=forked.request_digest,
        revisions=tuple(dict.fromkeys(revisions)),
        origin_run_id=forked.origin_run_id,
        origin_sequence=forked.origin_sequence,
    )


def said_instead(said: StoredMessage, instead: message_pb2.Message, time: Timestamp) -> StoredMessage:
    """The user's message with other content: whose it is and what it is of stay."""
    message = message_pb2.Message()
    message.CopyFrom(said.message)
    message.ClearField("parts")
    message.parts.extend(instead.parts)
    message.create_time.CopyFrom(time)
    return replace(said, message=message)
